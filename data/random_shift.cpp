// The rows that stay inside the image are copied into a batch filled with the border's value.
#include <lockstep/data/random_shift.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace lockstep::data {

Tensor RandomShift::operator()(const Tensor& images, std::span<const int64_t> indices,
                               const RandomSource& random) const {
  LOCKSTEP_CHECK(images.dim() >= 3, ShapeError,
                 "RandomShift: needs images [B, ..., H, W], got shape ", images.shape());
  LOCKSTEP_CHECK(images.size(0) == static_cast<int64_t>(indices.size()), ShapeError,
                 "RandomShift: got ", images.size(0), " images of ", indices.size(), " samples");
  LOCKSTEP_CHECK(pixels >= 0, ValueError, "RandomShift: pixels must not be negative, got ", pixels);
  const int64_t height = images.size(-2), width = images.size(-1);
  const Tensor source = images.contiguous();
  Tensor result = full(images.shape(), fill, {.dtype = images.dtype()});  // [B, ..., H, W]
  const int64_t element = static_cast<int64_t>(size_of(images.dtype()));
  const int64_t plane = height * width * element;
  const int64_t planes =
      plane && images.size(0) ? images.numel() * element / plane / images.size(0) : 0;
  const char* in = static_cast<const char*>(source.data_ptr());
  char* out = static_cast<char*>(result.data_ptr());
  for (int64_t sample : indices) {
    Draws draws(random.key(sample, Purpose::shift));
    const int64_t down = draws.below(2 * int64_t{pixels} + 1) - pixels;
    const int64_t right = draws.below(2 * int64_t{pixels} + 1) - pixels;
    const int64_t columns = std::max<int64_t>(width - std::abs(right), 0);
    for (int64_t p = 0; p < planes; ++p, in += plane, out += plane) {
      for (int64_t y = std::max<int64_t>(down, 0);
           columns > 0 && y < height + std::min<int64_t>(down, 0); ++y) {
        std::memcpy(out + (y * width + std::max<int64_t>(right, 0)) * element,
                    in + ((y - down) * width + std::max<int64_t>(-right, 0)) * element,
                    static_cast<size_t>(columns * element));
      }
    }
  }
  return result;
}

}  // namespace lockstep::data
