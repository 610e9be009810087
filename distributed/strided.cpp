// StridedBytes: merges dimensions once, then walks rows like an odometer.
#include <lockstep/distributed/strided.h>

#include <algorithm>
#include <cstring>

namespace lockstep::dist {

bool has_overlap(const Tensor& t) {
  for (int i = 0; i < t.dim(); ++i)
    if (t.shape()[i] > 1 && t.strides()[i] == 0) return true;
  return false;
}

StridedBytes::StridedBytes(const Tensor& t)
    : data_(static_cast<std::byte*>(t.data_ptr())),
      element_(size_of(t.dtype())),
      numel_(t.numel()) {
  const auto width = static_cast<int64_t>(element_);
  for (int i = 0; i < t.dim(); ++i) {
    if (t.shape()[i] == 1) continue;
    const int64_t stride = t.strides()[i] * width;
    if (dims_ > 0 && strides_[dims_ - 1] == stride * t.shape()[i]) {
      sizes_[dims_ - 1] *= t.shape()[i];
      strides_[dims_ - 1] = stride;
    } else {
      sizes_[dims_] = t.shape()[i];
      strides_[dims_++] = stride;
    }
  }
  if (dims_ == 1 && strides_[0] == width) dims_ = 0;
}

namespace {

// Copies n elements between a strided and a dense row; Element has the dtype's width.
template <class Element>
void copy_row(std::byte* strided, int64_t stride, std::byte* dense, int64_t n, bool read) {
  for (int64_t i = 0; i < n; ++i) {
    std::byte *a = strided + i * stride, *b = dense + i * static_cast<int64_t>(sizeof(Element));
    if (read)
      std::memcpy(b, a, sizeof(Element));
    else
      std::memcpy(a, b, sizeof(Element));
  }
}

void copy_row(size_t element, std::byte* strided, int64_t stride, std::byte* dense, int64_t n,
              bool read) {
  if (stride == static_cast<int64_t>(element)) {
    const size_t bytes = static_cast<size_t>(n) * element;
    read ? std::memcpy(dense, strided, bytes) : std::memcpy(strided, dense, bytes);
    return;
  }
  switch (element) {
    case 1:
      return copy_row<uint8_t>(strided, stride, dense, n, read);
    case 2:
      return copy_row<uint16_t>(strided, stride, dense, n, read);
    case 4:
      return copy_row<uint32_t>(strided, stride, dense, n, read);
    default:
      return copy_row<uint64_t>(strided, stride, dense, n, read);
  }
}

}  // namespace

void StridedBytes::read(int64_t first, int64_t count, std::byte* to) const {
  if (dense()) {
    std::memcpy(to, data_ + static_cast<size_t>(first) * element_,
                static_cast<size_t>(count) * element_);
    return;
  }
  walk(first, count, [&](std::byte* p, int64_t n) {
    copy_row(element_, p, strides_[dims_ - 1], to, n, true);
    to += static_cast<size_t>(n) * element_;
  });
}

void StridedBytes::write(int64_t first, int64_t count, const std::byte* from) const {
  auto* dense_row = const_cast<std::byte*>(from);  // only read
  if (dense()) {
    std::memcpy(data_ + static_cast<size_t>(first) * element_, from,
                static_cast<size_t>(count) * element_);
    return;
  }
  walk(first, count, [&](std::byte* p, int64_t n) {
    copy_row(element_, p, strides_[dims_ - 1], dense_row, n, false);
    dense_row += static_cast<size_t>(n) * element_;
  });
}

}  // namespace lockstep::dist
