// TensorDataset: tensors whose first dimension counts samples, as a dataset.
//
//   data::TensorDataset train{x, y};                 // x: [N, ...], y: [N, ...]
//   for (auto [xb, yb] : data::Loader{train, {.batch_size = 32}}.epoch(0)) ...
#pragma once

#include <array>
#include <concepts>
#include <span>

#include <lockstep/tensor/tensor.h>

namespace lockstep::data {

/// A contiguous copy of the rows of `source` (at least 1-d, on the CPU) in the order of `indices`;
/// IndexError for one out of range.
LOCKSTEP_API Tensor gather_rows(const Tensor& source, std::span<const int64_t> indices);

namespace detail {
/// The tensor ready for gather_rows; ShapeError unless it has `samples` rows (or any number, for
/// -1).
LOCKSTEP_API Tensor rows_of(const Tensor& t, size_t position, int64_t samples);
}  // namespace detail

/// N tensors of equal size(0), on the CPU. A batch is an array of N contiguous tensors [B, ...].
template <size_t N>
class TensorDataset {
 public:
  using Batch = std::array<Tensor, N>;

  template <std::same_as<Tensor>... T>
  requires(sizeof...(T) == N && N > 0) explicit TensorDataset(const T&... tensors)
      : tensors_{tensors...} {
    for (size_t i = 0; i < N; ++i) tensors_[i] = detail::rows_of(tensors_[i], i, i ? size() : -1);
  }
  int64_t size() const { return tensors_[0].size(0); }
  Batch get(std::span<const int64_t> indices) const {
    Batch batch;
    for (size_t i = 0; i < N; ++i) batch[i] = gather_rows(tensors_[i], indices);
    return batch;
  }
  const Batch& tensors() const { return tensors_; }

 private:
  Batch tensors_;
};
template <std::same_as<Tensor>... T>
TensorDataset(const T&...) -> TensorDataset<sizeof...(T)>;

}  // namespace lockstep::data
