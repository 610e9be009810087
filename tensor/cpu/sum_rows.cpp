// Across rows, several are added at a time, so that the sums are stored once in several loads and
// memory is read in long runs.
#include <lockstep/tensor/cpu/simd_targets.h>
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE <lockstep/tensor/cpu/sum_rows.cpp>
#include <hwy/foreach_target.h>

#include <lockstep/tensor/cpu/columns-inl.h>
#include <lockstep/tensor/cpu/sum_rows.h>

HWY_BEFORE_NAMESPACE();
namespace lockstep::HWY_NAMESPACE {

namespace {

using cpu::Moments, cpu::Wide;

/// The map of a plain sum.
struct Same {
  template <class V>
  HWY_INLINE V map(V x) const {
    return x;
  }
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
Wide<T> sum_row(const T* x, int64_t n) {
  return row_sum(x, n);
}
template <class T>
Wide<T> products_row(const T* a, const T* x, T centre, int64_t n) {
  const double fast = sum_terms<T>(n, ProductFrom<T>{a, x, Pack<T>(centre)});
  if (cpu::in_range<T>(fast, n)) return fast;
  Wide<T> sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += static_cast<Wide<T>>(a[i]) * (static_cast<Wide<T>>(x[i]) - centre);
  return sum;
}

/// sums += a, products += a (x - centre), for one pack of columns. Where a is null it is x - centre
/// itself, so that products are squares.
template <int kRows, class T, class Columns>
HWY_INLINE void add_product_pack(const T* a, const T* x, int64_t stride, Columns columns,
                                 const T* centre, T* sums, T* products) {
  const Pack<T> c = columns.get(centre);
  Pack<T> s = columns.get(sums), p = columns.get(products);
  for (int r = 0; r < kRows; ++r) {
    const Pack<T> deviation = columns.get(x + r * stride) - c;
    const Pack<T> v = a ? columns.get(a + r * stride) : deviation;
    s = s + v;
    p = p + v * deviation;
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
    add_product_pack<kRows>(a ? a + j : a, x + j, stride, WholePack<T>(), centre + j, sums + j,
                            products + j);
  if (j < n)
    add_product_pack<kRows>(a ? a + j : a, x + j, stride, PartOfPack<T>{n - j}, centre + j,
                            sums + j, products + j);
}
template <class T>
HWY_INLINE void add_products_in_t(const T* a, const T* x, int64_t stride, int64_t rows, int64_t n,
                                  const T* centre, T* sums, T* products) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4)
    add_product_group<4>(a ? a + r * stride : a, x + r * stride, stride, n, centre, sums, products);
  for (; r < rows; ++r)
    add_product_group<1>(a ? a + r * stride : a, x + r * stride, stride, n, centre, sums, products);
}

template <class T>
struct AddMoments {
  const T* x;
  int64_t stride;
  Moments<T>* moments;
  HWY_INLINE void tile(int64_t r, int64_t rows, int64_t column, int64_t n) const {
    const T* from = x + r * stride + column;
    T centre[kColumns], deviations[kColumns], squares[kColumns];
    for (T* sums : {centre, deviations, squares}) std::fill_n(sums, n, T(0));
    add_in_t(Same(), from, stride, rows, n, centre);
    for (int64_t j = 0; j < n; ++j) centre[j] /= static_cast<T>(rows);
    add_products_in_t<T>(nullptr, from, stride, rows, n, centre, deviations, squares);
    // All columns have the same count: one division for all of them.
    const Wide<T> before = moments[column].n, count = static_cast<Wide<T>>(rows),
                  share = count / (before + count), per_row = 1 / count;
    for (int64_t j = 0; j < n; ++j) {
      Wide<T> rest = deviations[j] * per_row, mean = centre[j] + rest,
              m2 = std::max<Wide<T>>(squares[j] - rest * deviations[j], 0);
      if (!cpu::in_range<T>(squares[j], rows)) {
        const Moments<T> exact = Moments<T>::strided(from + j, stride, rows);
        mean = exact.mean;
        m2 = exact.m2;
      }
      Moments<T>& m = moments[column + j];
      const Wide<T> delta = mean - m.mean;
      m.n = before + count;
      m.m2 += m2 + delta * delta * (before * share);
      m.mean = before == 0 ? mean : m.mean + delta * share;
    }
  }
};
template <class T>
void add_moment_rows(const T* x, int64_t stride, int64_t rows, int64_t n, Moments<T>* moments) {
  for_each_tile(rows, n, AddMoments<T>{x, stride, moments});
}

template <class T>
struct AddProducts {
  const T *a, *x;
  int64_t stride;
  const T* centre;
  Wide<T>*sums, *products;
  HWY_INLINE void tile(int64_t r, int64_t rows, int64_t column, int64_t n) const {
    const T *from = a + r * stride + column, *with = x + r * stride + column, *c = centre + column;
    T run[kColumns], product[kColumns];
    for (T* sums : {run, product}) std::fill_n(sums, n, T(0));
    add_products_in_t(from, with, stride, rows, n, c, run, product);
    for (int64_t j = 0; j < n; ++j) {
      Wide<T> s = run[j], p = product[j];
      if (!cpu::in_range<T>(product[j], rows) ||
          !(std::abs(run[j]) <= std::numeric_limits<T>::max())) {
        s = p = 0;
        for (int64_t i = 0; i < rows; ++i) {
          s += from[i * stride + j];
          p += static_cast<Wide<T>>(from[i * stride + j]) *
               (static_cast<Wide<T>>(with[i * stride + j]) - c[j]);
        }
      }
      sums[column + j] += s;
      products[column + j] += p;
    }
  }
};
template <class T>
void add_product_rows(const T* a, const T* x, int64_t stride, int64_t rows, int64_t n,
                      const T* centre, Wide<T>* sums, Wide<T>* products) {
  for_each_tile(rows, n, AddProducts<T>{a, x, stride, centre, sums, products});
}

template <class T>
const cpu::SumRows<T>* rows_of() {
  static constexpr cpu::SumRows<T> rows{sum_row<T>, products_row<T>, row_moments<T>,
                                        add_moment_rows<T>, add_product_rows<T>};
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
