// RandomShift: moves each image by up to `pixels` rows and columns, the classic augmentation for
// small images: PyTorch's RandomCrop(size, padding=pixels).
//
//   auto augmented = data::map(train, data::RandomShift{2});
#pragma once

#include <span>

#include <lockstep/data/dataset.h>

namespace lockstep::data {

struct RandomShift {
  int pixels = 2;
  double fill = 0;  // what comes in at the border

  /// images: [B, ..., H, W] of any dtype on the CPU, of the samples `indices`; all planes of a
  /// sample move together. Each of the (2 pixels + 1)^2 shifts is equally likely.
  LOCKSTEP_API Tensor operator()(const Tensor& images, std::span<const int64_t> indices,
                                 const RandomSource& random) const;
  /// A batch whose first field is the images.
  template <class Batch>
  requires detail::TupleLike<Batch> Batch operator()(Batch batch, std::span<const int64_t> indices,
                                                     const RandomSource& random) const {
    std::get<0>(batch) = (*this)(std::get<0>(batch), indices, random);
    return batch;
  }
};

}  // namespace lockstep::data
