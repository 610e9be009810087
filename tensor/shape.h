// Shape: the sizes of a tensor's dimensions (or its strides, in elements), stored inline.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>

#include <lockstep/tensor/error.h>

namespace lockstep {

class Shape {
 public:
  static constexpr int kMaxDims = 8;

  Shape() = default;
  Shape(std::initializer_list<int64_t> dims)
      : Shape(std::span<const int64_t>(dims.begin(), dims.size())) {}
  explicit Shape(std::span<const int64_t> dims) {
    for (int64_t d : dims) push_back(d);
  }
  /// n dimensions of one value each.
  static Shape filled(int n, int64_t value) {
    Shape s;
    for (int i = 0; i < n; ++i) s.push_back(value);
    return s;
  }

  int dims() const { return count_; }
  bool empty() const { return count_ == 0; }
  int64_t operator[](int i) const { return values_[i]; }
  int64_t& operator[](int i) { return values_[i]; }
  int64_t back() const { return values_[count_ - 1]; }
  const int64_t* begin() const { return values_; }
  const int64_t* end() const { return values_ + count_; }
  int64_t* begin() { return values_; }
  int64_t* end() { return values_ + count_; }

  void push_back(int64_t d) {
    LOCKSTEP_CHECK(count_ < kMaxDims, ShapeError, "shape: a tensor has at most 8 dimensions");
    values_[count_++] = d;
  }
  void erase(int i) {
    for (int j = i; j + 1 < count_; ++j) values_[j] = values_[j + 1];
    --count_;
  }
  void insert(int i, int64_t d) {
    push_back(d);
    for (int j = count_ - 1; j > i; --j) values_[j] = values_[j - 1];
    values_[i] = d;
  }

  /// The product of the sizes; 1 for a 0-d tensor.
  int64_t numel() const {
    int64_t n = 1;
    for (int64_t d : *this) n *= d;
    return n;
  }
  bool operator==(const Shape& o) const {
    if (count_ != o.count_) return false;
    for (int i = 0; i < count_; ++i)
      if (values_[i] != o.values_[i]) return false;
    return true;
  }

 private:
  int64_t values_[kMaxDims];
  int count_ = 0;
};

using Strides = Shape;  // in elements, not bytes

/// The product of the sizes. Throws a ShapeError that names `op` if a size is negative or the
/// product exceeds 64 bits.
LOCKSTEP_API int64_t checked_numel(std::string_view op, const Shape& shape);

/// Prints as [2, 3].
inline void append(std::string& text, const Shape& s) {
  text += '[';
  for (int i = 0; i < s.dims(); ++i) {
    if (i) text += ", ";
    append(text, s[i]);
  }
  text += ']';
}
/// Writes what append() writes; a template so that this header needs no <ostream>.
template <class Stream>
auto operator<<(Stream& out, const Shape& s) -> decltype(out << std::string()) {
  return out << str_cat(s);
}

/// Row-major strides of a shape whose checked_numel() is known.
LOCKSTEP_API Strides contiguous_strides(const Shape& shape);

/// The common shape of a and b under NumPy's broadcasting rule; `op` names the caller in the error.
LOCKSTEP_API Shape broadcast_shapes(std::string_view op, const Shape& a, const Shape& b);

/// The dimension, where negative ones count from the end. Throws an IndexError that names `op` if
/// it is out of range.
inline int wrap_dim(std::string_view op, int64_t dim, int dims) {
  const int64_t n = dims ? dims : 1;  // a 0-d tensor accepts 0 and -1
  LOCKSTEP_CHECK(dim >= -n && dim < n, IndexError, op, ": dimension ", dim,
                 " is out of range for a tensor of ", dims, " dimensions");
  return static_cast<int>(dim < 0 ? dim + n : dim);
}

}  // namespace lockstep
