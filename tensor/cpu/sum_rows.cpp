// Across rows, eight are added at a time, so that the sums are stored once in eight loads and
// memory is read in long runs.
#include <lockstep/tensor/cpu/simd_targets.h>
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE <lockstep/tensor/cpu/sum_rows.cpp>
#include <hwy/foreach_target.h>

#include <lockstep/tensor/cpu/row-inl.h>
#include <lockstep/tensor/cpu/sum_rows.h>

HWY_BEFORE_NAMESPACE();
namespace lockstep::HWY_NAMESPACE {

namespace {

template <class T>
struct Element {
  const T* x;
  HWY_INLINE Pack<T> whole(int64_t i) const { return load(x + i); }
  HWY_INLINE Pack<T> part(int64_t i, int64_t k) const { return load_first(x + i, k, Pack<T>(0)); }
};
template <class T>
struct SquareFrom {
  const T* x;
  Pack<T> centre;
  HWY_INLINE Pack<T> of(Pack<T> v) const { return (v - centre) * (v - centre); }
  HWY_INLINE Pack<T> whole(int64_t i) const { return of(load(x + i)); }
  HWY_INLINE Pack<T> part(int64_t i, int64_t k) const { return of(load_first(x + i, k, centre)); }
};
template <class T>
struct ProductFrom {
  const T *a, *x;
  Pack<T> centre;
  HWY_INLINE Pack<T> whole(int64_t i) const { return load(a + i) * (load(x + i) - centre); }
  HWY_INLINE Pack<T> part(int64_t i, int64_t k) const {
    return load_first(a + i, k, Pack<T>(0)) * (load_first(x + i, k, centre) - centre);
  }
};

template <class T>
double sum_row(const T* x, int64_t n) {
  return sum_terms<T>(n, Element<T>{x});
}
template <class T>
double squares_row(const T* x, T centre, int64_t n) {
  return sum_terms<T>(n, SquareFrom<T>{x, Pack<T>(centre)});
}
template <class T>
double products_row(const T* a, const T* x, T centre, int64_t n) {
  return sum_terms<T>(n, ProductFrom<T>{a, x, Pack<T>(centre)});
}

template <bool kSquares, class T>
HWY_INLINE Pack<T> term(Pack<T> x, Pack<T> centre) {
  if constexpr (kSquares)
    return (x - centre) * (x - centre);
  else
    return x;
}

/// sums += the terms of 1 or 8 rows, for one pack of columns.
template <bool kSquares, int kRows, class T, class Columns>
HWY_INLINE void add_pack(const T* x, int64_t stride, Columns columns, const T* centre, T* sums) {
  Pack<T> c(0);
  if constexpr (kSquares) c = columns.get(centre);
  Pack<T> s = term<kSquares>(columns.get(x), c);
  if constexpr (kRows == 8) {
    Pack<T> t = term<kSquares>(columns.get(x + stride), c);
    s = s + term<kSquares>(columns.get(x + 2 * stride), c);
    t = t + term<kSquares>(columns.get(x + 3 * stride), c);
    s = s + term<kSquares>(columns.get(x + 4 * stride), c);
    t = t + term<kSquares>(columns.get(x + 5 * stride), c);
    s = s + term<kSquares>(columns.get(x + 6 * stride), c);
    t = t + term<kSquares>(columns.get(x + 7 * stride), c);
    s = s + t;
  }
  columns.put(columns.get(sums) + s, sums);
}
template <bool kSquares, int kRows, class T>
HWY_INLINE void add_group(const T* x, int64_t stride, int64_t n, const T* centre, T* sums) {
  const int64_t lanes = lanes_of<T>();
  int64_t j = 0;
  for (; j + lanes <= n; j += lanes)
    add_pack<kSquares, kRows>(x + j, stride, WholePack<T>(), centre + j, sums + j);
  if (j < n) add_pack<kSquares, kRows>(x + j, stride, PartOfPack<T>{n - j}, centre + j, sums + j);
}
template <bool kSquares, class T>
HWY_INLINE void add_all(const T* x, int64_t stride, int64_t rows, int64_t n, const T* centre,
                        T* sums) {
  int64_t r = 0;
  for (; r + 8 <= rows; r += 8) add_group<kSquares, 8>(x + r * stride, stride, n, centre, sums);
  for (; r < rows; ++r) add_group<kSquares, 1>(x + r * stride, stride, n, centre, sums);
}
template <class T>
void add_rows(const T* x, int64_t stride, int64_t rows, int64_t n, T* sums) {
  add_all<false>(x, stride, rows, n, sums, sums);
}
template <class T>
void add_square_rows(const T* x, int64_t stride, int64_t rows, int64_t n, const T* centre,
                     T* sums) {
  add_all<true>(x, stride, rows, n, centre, sums);
}

template <int kRows, class T, class Columns>
HWY_INLINE void add_product_pack(const T* a, const T* x, int64_t stride, Columns columns,
                                 const T* centre, T* sums, T* products) {
  const Pack<T> c = columns.get(centre);
  Pack<T> s = columns.get(sums), p = columns.get(products);
  for (int r = 0; r < kRows; ++r) {
    const Pack<T> v = columns.get(a + r * stride);
    s = s + v;
    p = p + v * (columns.get(x + r * stride) - c);
  }
  columns.put(s, sums);
  columns.put(p, products);
}
template <int kRows, class T>
HWY_INLINE void add_product_group(const T* a, const T* x, int64_t stride, int64_t n,
                                  const T* centre, T* sums, T* products) {
  const int64_t lanes = lanes_of<T>();
  int64_t j = 0;
  for (; j + lanes <= n; j += lanes)
    add_product_pack<kRows>(a + j, x + j, stride, WholePack<T>(), centre + j, sums + j,
                            products + j);
  if (j < n)
    add_product_pack<kRows>(a + j, x + j, stride, PartOfPack<T>{n - j}, centre + j, sums + j,
                            products + j);
}
template <class T>
void add_product_rows(const T* a, const T* x, int64_t stride, int64_t rows, int64_t n,
                      const T* centre, T* sums, T* products) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4)
    add_product_group<4>(a + r * stride, x + r * stride, stride, n, centre, sums, products);
  for (; r < rows; ++r)
    add_product_group<1>(a + r * stride, x + r * stride, stride, n, centre, sums, products);
}

template <class T>
const cpu::SumRows<T>* rows_of() {
  static constexpr cpu::SumRows<T> rows{sum_row<T>,  squares_row<T>,     products_row<T>,
                                        add_rows<T>, add_square_rows<T>, add_product_rows<T>};
  return &rows;
}

}  // namespace

const cpu::SumRows<float>* sum_rows_f32() { return rows_of<float>(); }
const cpu::SumRows<double>* sum_rows_f64() { return rows_of<double>(); }

}  // namespace lockstep::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lockstep {
HWY_EXPORT(sum_rows_f32);
HWY_EXPORT(sum_rows_f64);
template <>
const cpu::SumRows<float>& cpu::sum_rows<float>() {
  static const cpu::SumRows<float>* rows =
      (cpu::respect_isa_limit(), HWY_DYNAMIC_DISPATCH(sum_rows_f32)());
  return *rows;
}
template <>
const cpu::SumRows<double>& cpu::sum_rows<double>() {
  static const cpu::SumRows<double>* rows =
      (cpu::respect_isa_limit(), HWY_DYNAMIC_DISPATCH(sum_rows_f64)());
  return *rows;
}
}  // namespace lockstep
#endif
