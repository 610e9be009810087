// StridedBytes: the elements of a strided tensor as one row-major sequence, read from and written
// to in pieces. This is how collectives move tensors that do not lie in shared memory.
#pragma once

#include <algorithm>
#include <cstddef>

#include <lockstep/tensor/tensor.h>

namespace lockstep::dist {

class StridedBytes {
 public:
  StridedBytes() = default;
  explicit StridedBytes(const Tensor& t);

  /// Elements [first, first + count) of the sequence into `to`.
  void read(int64_t first, int64_t count, std::byte* to) const;
  /// The same elements from `from`.
  void write(int64_t first, int64_t count, const std::byte* from) const;
  /// Calls f with the address of every element, in order.
  template <class F>
  void each(F f) const {
    const auto width = static_cast<int64_t>(element_);
    if (dense())
      for (int64_t i = 0; i < numel_; ++i) f(data_ + i * width);
    else
      walk(0, numel_, [&](std::byte* p, int64_t n) {
        for (int64_t i = 0; i < n; ++i) f(p + i * strides_[dims_ - 1]);
      });
  }
  bool dense() const { return dims_ == 0; }
  /// The first element.
  std::byte* data() const { return data_; }

 private:
  template <class Row>
  void walk(int64_t first, int64_t count, Row row) const;

  std::byte* data_ = nullptr;
  size_t element_ = 1;
  int64_t numel_ = 0;
  int dims_ = 0;                      // 0: contiguous
  int64_t sizes_[Shape::kMaxDims];    // outermost first, neighbours merged where strides allow
  int64_t strides_[Shape::kMaxDims];  // in bytes
};

template <class Row>
void StridedBytes::walk(int64_t first, int64_t count, Row row) const {
  int64_t index[Shape::kMaxDims];
  std::byte* p = data_;
  for (int d = dims_ - 1; d >= 0; --d) {
    index[d] = first % sizes_[d];
    first /= sizes_[d];
    p += index[d] * strides_[d];
  }
  const int last = dims_ - 1;
  while (count > 0) {
    const int64_t n = std::min(count, sizes_[last] - index[last]);
    row(p, n);
    count -= n;
    p += n * strides_[last];
    index[last] += n;
    for (int d = last; d > 0 && index[d] == sizes_[d]; --d) {
      p += strides_[d - 1] - sizes_[d] * strides_[d];
      index[d] = 0;
      ++index[d - 1];
    }
  }
}

/// Whether two indices share an element (an expanded dimension): such a tensor can be read, not
/// written.
bool has_overlap(const Tensor& t);

}  // namespace lockstep::dist
