// What loops down columns share: several rows are added at a time, so that the sums are stored once in
// several loads and memory is read in long runs.
#if defined(LOCKSTEP_TENSOR_CPU_COLUMNS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LOCKSTEP_TENSOR_CPU_COLUMNS_INL_H_
#undef LOCKSTEP_TENSOR_CPU_COLUMNS_INL_H_
#else
#define LOCKSTEP_TENSOR_CPU_COLUMNS_INL_H_
#endif

#include <lockstep/tensor/cpu/row-inl.h>

HWY_BEFORE_NAMESPACE();
namespace lockstep::HWY_NAMESPACE {

/// sums += f.map of 1 or 8 rows, for one pack of columns.
template <int kRows, class Map, class T, class Columns>
HWY_INLINE void add_pack(const Map& f, const T* x, int64_t stride, Columns columns, T* sums) {
  Pack<T> s = f.map(columns.get(x));
  if constexpr (kRows == 8) {
    Pack<T> t = f.map(columns.get(x + stride));
    s = s + f.map(columns.get(x + 2 * stride));
    t = t + f.map(columns.get(x + 3 * stride));
    s = s + f.map(columns.get(x + 4 * stride));
    t = t + f.map(columns.get(x + 5 * stride));
    s = s + f.map(columns.get(x + 6 * stride));
    t = t + f.map(columns.get(x + 7 * stride));
    s = s + t;
  }
  columns.put(columns.get(sums) + s, sums);
}
template <int kRows, class Map, class T>
HWY_INLINE void add_group(const Map& f, const T* x, int64_t stride, int64_t n, T* sums) {
  const int64_t lanes = lanes_of<T>();
  int64_t j = 0;
  for (; j + lanes <= n; j += lanes) add_pack<kRows>(f, x + j, stride, WholePack<T>(), sums + j);
  if (j < n) add_pack<kRows>(f, x + j, stride, PartOfPack<T>{n - j}, sums + j);
}
/// sums += f.map(x), over all rows, in T.
template <class Map, class T>
HWY_INLINE void add_in_t(const Map& f, const T* x, int64_t stride, int64_t rows, int64_t n, T* sums) {
  int64_t r = 0;
  for (; r + 8 <= rows; r += 8) add_group<8>(f, x + r * stride, stride, n, sums);
  for (; r < rows; ++r) add_group<1>(f, x + r * stride, stride, n, sums);
}

// A tile of so many rows and columns is summed in T.
inline constexpr int64_t kRows = 64, kColumns = 512;

/// Calls f(first row, rows, first column, columns) for the tiles of a block, row by row.
template <class F>
HWY_INLINE void for_each_tile(int64_t rows, int64_t n, const F& f) {
  for (int64_t r = 0; r < rows; r += kRows)
    for (int64_t j = 0; j < n; j += kColumns)
      f.tile(r, rows - r < kRows ? rows - r : kRows, j, n - j < kColumns ? n - j : kColumns);
}

}  // namespace lockstep::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
