// Mnist: the handwritten digits (and Fashion-MNIST, in the same format) from their four IDX files,
// gzipped or not.
//
//   data::Mnist train{"data/mnist", data::Split::train};
//   for (auto [x, y] : data::Loader{train, {.batch_size = 64, .shuffle = true}}.epoch(0)) ...
#pragma once

#include <array>
#include <span>
#include <string>

#include <lockstep/data/random_source.h>
#include <lockstep/tensor/tensor.h>

namespace lockstep::data {

enum class Split { train, test };

struct MnistOptions {
  bool raw = false;        // u8 pixels, as in the file
  float mean = 0.1307f;    // of pixels / 255 over the training set; Fashion-MNIST has 0.2860
  float stddev = 0.3081f;  // Fashion-MNIST has 0.3530
  int shift = 0;  // augmentation: move each image by up to so many pixels (see random_shift.h)
};

/// A batch is {images, labels}: images f32 [B, 1, 28, 28], (pixel / 255 - mean) / stddev, or u8
/// with `raw`; labels i64 [B] in 0 .. 9. Pixels are kept as u8 (47 MB) and normalised batch by
/// batch. A copy shares them.
class LOCKSTEP_API Mnist {
 public:
  using Batch = std::array<Tensor, 2>;

  /// Reads train-images-idx3-ubyte[.gz] and train-labels-idx1-ubyte[.gz] in `folder`, or t10k-...
  /// for the test split. Throws IoError when one is missing or damaged, when the two do not belong
  /// together, and for a label outside 0 .. 9.
  Mnist(const std::string& folder, Split split, MnistOptions options = {});

  int64_t size() const { return labels_.size(0); }
  Batch get(std::span<const int64_t> indices, const RandomSource& random) const;

  const Tensor& images() const { return images_; }  // u8 [N, 1, 28, 28]
  const Tensor& labels() const { return labels_; }  // i64 [N]

 private:
  MnistOptions options_;
  Tensor images_, labels_;
};

}  // namespace lockstep::data
