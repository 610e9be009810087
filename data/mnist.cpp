// Reading the pair of files of a split, and turning picked rows of u8 into a batch.
#include <lockstep/data/mnist.h>

#include <unistd.h>

#include <lockstep/data/idx.h>
#include <lockstep/data/random_shift.h>
#include <lockstep/data/tensor_dataset.h>

namespace lockstep::data {
namespace {

std::string find(const std::string& folder, const std::string& name) {
  const std::string plain = folder + "/" + name, gzipped = plain + ".gz";
  if (::access(gzipped.c_str(), F_OK) == 0) return gzipped;
  if (::access(plain.c_str(), F_OK) == 0) return plain;
  fail<IoError>(
      "Mnist: found neither ", gzipped, " nor ", plain,
      "; give the folder that holds the four IDX files, relative to where the program was started");
}

}  // namespace

Mnist::Mnist(const std::string& folder, Split split, MnistOptions options) : options_(options) {
  LOCKSTEP_CHECK(options.stddev > 0, ValueError, "Mnist: stddev must be positive, got ",
                 options.stddev);
  LOCKSTEP_CHECK(options.shift >= 0, ValueError, "Mnist: shift must not be negative, got ",
                 options.shift);
  const std::string prefix = split == Split::train ? "train" : "t10k";
  const std::string images_path = find(folder, prefix + "-images-idx3-ubyte");
  const std::string labels_path = find(folder, prefix + "-labels-idx1-ubyte");
  const Tensor images = read_idx(images_path);  // [N, H, W]
  const Tensor labels = read_idx(labels_path);  // [N]
  LOCKSTEP_CHECK(images.dtype() == DType::u8 && images.dim() == 3, IoError, "Mnist: ", images_path,
                 ": expected u8 images [N, 28, 28], found ", images.dtype(), " ", images.shape());
  LOCKSTEP_CHECK(labels.dtype() == DType::u8 && labels.dim() == 1, IoError, "Mnist: ", labels_path,
                 ": expected u8 labels [N], found ", labels.dtype(), " ", labels.shape());
  LOCKSTEP_CHECK(images.size(0) == labels.size(0), IoError, "Mnist: ", images_path, " has ",
                 images.size(0), " images and ", labels_path, " has ", labels.size(0),
                 " labels; take both files from one source");

  images_ = images.view({images.size(0), 1, images.size(1), images.size(2)});
  labels_ = empty(labels.shape(), {.dtype = DType::i64});
  const uint8_t* in = labels.data<uint8_t>();
  int64_t* out = labels_.data<int64_t>();
  for (int64_t i = 0; i < size(); ++i) {
    LOCKSTEP_CHECK(in[i] <= 9, IoError, "Mnist: ", labels_path, ": labels are 0 to 9, and sample ",
                   i, " has ", in[i], "; the file is damaged or of another dataset");
    out[i] = in[i];
  }
}

Mnist::Batch Mnist::get(std::span<const int64_t> indices, const RandomSource& random) const {
  Tensor pixels = gather_rows(images_, indices);  // u8 [B, 1, 28, 28]
  if (options_.shift > 0) pixels = RandomShift{options_.shift}(pixels, indices, random);
  Tensor labels = gather_rows(labels_, indices);  // i64 [B]
  if (options_.raw) return {pixels, labels};
  Tensor x = empty(pixels.shape());  // f32 [B, 1, 28, 28]
  // (pixel / 255 - mean) / stddev with one rounding less: no division, and nothing to contract.
  const float zero = static_cast<float>(255.0 * options_.mean);
  const float scale = static_cast<float>(1.0 / (255.0 * options_.stddev));
  const uint8_t* in = pixels.data<uint8_t>();
  float* out = x.data<float>();
  for (int64_t i = 0, n = pixels.numel(); i < n; ++i)
    out[i] = (static_cast<float>(in[i]) - zero) * scale;
  return {x, labels};
}

}  // namespace lockstep::data
