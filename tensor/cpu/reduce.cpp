// Reductions on the CPU: those that are formulas, and variances. Dimensions are sorted by stride and merged, so that one of two
// loops runs along memory: down a row that is reduced to one result, or across a row of results to
// which further rows are added. Work is cut into blocks that depend on the shape alone, and the
// totals of the blocks are combined in order.
#include <algorithm>
#include <limits>
#include <memory>
#include <type_traits>

#include <lockstep/tensor/cpu/convert_rows.h>
#include <lockstep/tensor/cpu/reduce_rows.h>
#include <lockstep/tensor/cpu/scalar_value.h>
#include <lockstep/tensor/cpu/sum_rows.h>
#include <lockstep/tensor/element_cast.h>
#include <lockstep/tensor/ops/reduce.h>
#include <lockstep/tensor/parallel.h>

namespace lockstep {
namespace {

constexpr int64_t kTile = 512;       // results that one task keeps at a time
constexpr int64_t kRunRows = 64;     // at least so many rows are added at a time
constexpr int64_t kWiden = 2048;     // elements of f16 or bf16 widened at a time
constexpr int64_t kPiece = 8192;     // of a row whose moments are taken while it is in cache
constexpr int64_t kBlock = 32768;    // elements worth a task of their own
constexpr int64_t kMostBlocks = 64;  // into which the elements of one result are cut

struct Axis {
  int64_t size = 1, x = 0, y = 0;  // strides in elements
};

/// Axes of one kind, outermost first, walked by a flat index.
struct Axes {
  Axis axis[Shape::kMaxDims];
  int n = 0;
  int64_t count = 1;

  void push(const Axis& a) {
    axis[n++] = a;
    count *= a.size;
  }
  /// The strides' sums at a flat index.
  Axis at(int64_t index) const {
    if (n == 1) return {1, index * axis[0].x, index * axis[0].y};
    Axis sum;
    for (int i = n; i-- > 0; index /= axis[i].size) {
      sum.x += index % axis[i].size * axis[i].x;
      sum.y += index % axis[i].size * axis[i].y;
    }
    return sum;
  }
};

struct Plan {
  Axis inner;  // along memory
  bool inner_summed = true;
  Axes kept, summed;  // the others

  Plan(const Tensor& y, const Tensor& x) {
    struct Candidate : Axis {
      bool is_summed;
    } axes[Shape::kMaxDims];
    int n = 0;
    for (int i = 0; i < x.dim(); ++i)
      if (x.shape()[i] != 1)
        axes[n++] = {{x.shape()[i], x.strides()[i], y.strides()[i]}, y.shape()[i] == 1};
    // A stride of 0 repeats what lies inside it: outermost.
    auto key = [](const Axis& a) { return a.x ? a.x : std::numeric_limits<int64_t>::max(); };
    std::stable_sort(axes, axes + n, [&](const Axis& a, const Axis& b) { return key(a) > key(b); });
    int merged = 0;
    for (int i = 0; i < n; ++i) {
      if (merged) {
        Candidate& outer = axes[merged - 1];
        if (outer.is_summed == axes[i].is_summed && outer.x == axes[i].x * axes[i].size &&
            (outer.is_summed || outer.y == axes[i].y * axes[i].size)) {
          outer = {{outer.size * axes[i].size, axes[i].x, axes[i].y}, outer.is_summed};
          continue;
        }
      }
      axes[merged++] = axes[i];
    }
    if (merged) {
      inner = axes[--merged];
      inner_summed = axes[merged].is_summed;
    }
    for (int i = 0; i < merged; ++i) (axes[i].is_summed ? summed : kept).push(axes[i]);
  }
};

// A quantity Q over elements of type T: its Total<T>, what a total starts from, how a row or rows of elements
// are added to totals, and how totals are combined.

template <class R>
struct FormulaOf {
  /// Integers wrap around where their sum leaves i64.
  template <class T>
  struct TotalFor {
    using type = std::conditional_t<R::additive, uint64_t, T>;
  };
  template <class T>
  requires std::is_floating_point_v<T>
  struct TotalFor<T> { using type = cpu::TotalOf<R, T>; };
  template <class T>
  using Total = typename TotalFor<T>::type;

  template <class T>
  static Total<T> start() {
    if constexpr (R::additive)
      return 0;
    else
      return R::template identity<T>();
  }
  template <class T>
  static void add_one(T x, Total<T>& total) {
    using V = cpu::One<Total<T>>;
    if constexpr (R::additive)
      total += R().map(V(static_cast<Total<T>>(x))).v;
    else
      total = R().combine(V(total), R().map(V(x))).v;
  }
  template <class T>
  static void add_row(const T* x, int64_t stride, int64_t n, Total<T>& total) {
    if constexpr (std::is_floating_point_v<T>)
      if (stride == 1) return cpu::reduce_rows<R, T>().row(x, n, total);
    for (int64_t i = 0; i < n; ++i) add_one(x[i * stride], total);
  }
  /// totals[j] grow by the elements of `rows` rows, `step` apart; at most kTile columns.
  template <class T>
  static void add_columns(const T* x, int64_t step, int64_t rows, int64_t stride, int64_t n,
                          Total<T>* totals) {
    if constexpr (std::is_floating_point_v<T>)
      if (stride == 1) return cpu::reduce_rows<R, T>().columns(x, step, rows, n, totals);
    for (int64_t i = 0; i < rows; ++i, x += step)
      if (stride == 1)
        for (int64_t j = 0; j < n; ++j) add_one(x[j], totals[j]);
      else
        for (int64_t j = 0; j < n; ++j) add_one(x[j * stride], totals[j]);
  }
  template <class V>
  static void combine(V& total, const V& other) {
    if constexpr (R::additive)
      total += other;
    else
      total = R().combine(cpu::One<V>(total), cpu::One<V>(other)).v;
  }
};

struct MomentsOf {
  template <class T>
  using Total = cpu::Moments<T>;
  template <class T>
  static Total<T> start() {
    return {};
  }

  template <class T>
  static void add_row(const T* x, int64_t stride, int64_t n, Total<T>& total) {
    for (int64_t i = 0; i < n; i += kPiece) {
      const int64_t k = std::min(kPiece, n - i);
      total.combine(stride == 1 ? cpu::sum_rows<T>().moments(x + i, k)
                                : Total<T>::strided(x + i * stride, stride, k));
    }
  }
  template <class T>
  static void add_columns(const T* x, int64_t step, int64_t rows, int64_t stride, int64_t n,
                          Total<T>* totals) {
    if (stride == 1) return cpu::sum_rows<T>().add_moments(x, step, rows, n, totals);
    for (int64_t j = 0; j < n; ++j) add_row(x + j * stride, step, rows, totals[j]);
  }
  template <class V>
  static void combine(V& total, const V& other) {
    total.combine(other);
  }
};

/// One whole reduction of elements of S, computed in T: tasks (kept index, tile of results, block of reduced
/// elements) in any order. write(i, total) is called once for each result.
template <class Q, class S, class Write>
class Reduction {
  using T = std::conditional_t<detail::is_two_byte_float<S>, float, S>;
  using Total = typename Q::template Total<T>;

 public:
  Reduction(const Tensor& y, const Tensor& x, Write write)
      : plan_(y, x), x_(x.data<S>()), write_(write), results_(y.numel()) {
    const Plan& p = plan_;
    int64_t least = kBlock;
    if (p.inner_summed) {
      per_result_ = p.summed.count * p.inner.size;
    } else {
      tiles_ = (p.inner.size + kTile - 1) / kTile;
      per_result_ = p.summed.count;
      least = std::max(kRunRows, kBlock / std::min(p.inner.size, kTile));
    }
    const int64_t groups = p.kept.count * tiles_;
    block_ = groups >= kMostBlocks
                 ? per_result_
                 : std::max(least, (per_result_ + kMostBlocks - 1) / kMostBlocks);
    blocks_ = (per_result_ + block_ - 1) / block_;
    tasks_ = groups * blocks_;
  }

  void run() {
    if (blocks_ > 1) partial_.reset(new Total[static_cast<size_t>(blocks_ * results_)]);
    const int64_t work = std::min(block_, per_result_) *
                         (plan_.inner_summed ? 1 : std::min(plan_.inner.size, kTile));
    parallel_for(tasks_, std::max<int64_t>(1, kBlock / work), [this](int64_t begin, int64_t end) {
      for (int64_t task = begin; task < end; ++task) {
        const int64_t group = task / blocks_, first = task % blocks_ * block_;
        const int64_t last = std::min(per_result_, first + block_);
        if (plan_.inner_summed)
          row_task(group, task % blocks_, first, last);
        else
          column_task(group / tiles_, group % tiles_ * kTile, task % blocks_, first, last);
      }
    });
    if (blocks_ == 1) return;
    parallel_for(results_, kTile, [this](int64_t begin, int64_t end) {
      Total totals[kTile];
      std::fill_n(totals, end - begin, Q::template start<T>());
      for (int64_t b = 0; b < blocks_; ++b)
        for (int64_t i = begin; i < end; ++i)
          Q::combine(totals[i - begin], partial_[b * results_ + i]);
      for (int64_t i = begin; i < end; ++i) write_(i, totals[i - begin]);
    });
  }

 private:
  void finish(int64_t i, int64_t block, const Total& total) {
    if (blocks_ > 1)
      partial_[block * results_ + i] = total;
    else
      write_(i, total);
  }

  /// Elements first .. last of one result, counted along its rows.
  void row_task(int64_t group, int64_t block, int64_t first, int64_t last) {
    const Axis& inner = plan_.inner;
    const Axis at = plan_.kept.at(group);
    Total total = Q::template start<T>();
    if (per_result_ == inner.size && blocks_ == 1) {
      add_row(x_ + at.x, inner.x, inner.size, total);
      return write_(at.y, total);
    }
    while (first < last) {
      const int64_t column = first % inner.size, n = std::min(last - first, inner.size - column);
      const S* row = x_ + at.x + plan_.summed.at(first / inner.size).x + column * inner.x;
      add_row(row, inner.x, n, total);
      first += n;
    }
    finish(at.y, block, total);
  }

  /// Rows first .. last, columns from `column` on, of one group of results.
  void column_task(int64_t group, int64_t column, int64_t block, int64_t first, int64_t last) {
    const Axis& inner = plan_.inner;
    const Axes& summed = plan_.summed;
    const Axis at = plan_.kept.at(group);
    const int64_t n = std::min(kTile, inner.size - column), rows = last - first;
    const S* x = x_ + at.x + column * inner.x;
    const int64_t y = at.y + column * inner.y;
    Total totals[kTile];
    std::fill_n(totals, kTile, Q::template start<T>());
    if (n == inner.size && n <= kTile / 8 && inner.x == 1 && summed.n == 1 &&
        summed.axis[0].x == n) {
      // Narrow rows without gaps: several of them make one wide row.
      const int64_t fold = kTile / n, wide = fold * n;
      x += first * n;
      add_columns(x, wide, rows / fold, 1, wide, totals);
      for (int64_t j = n; j < wide; ++j) Q::combine(totals[j % n], totals[j]);
      add_columns(x + rows / fold * wide, n, rows % fold, 1, n, totals);
    } else {
      const Axis run = summed.n ? summed.axis[summed.n - 1] : Axis();
      while (first < last) {
        const int64_t evenly_spaced = std::min(last - first, run.size - first % run.size);
        add_columns(x + summed.at(first).x, run.x, evenly_spaced, inner.x, n, totals);
        first += evenly_spaced;
      }
    }
    for (int64_t j = 0; j < n; ++j) finish(y + j * inner.y, block, totals[j]);
  }

  /// The same with elements of S, widened piece by piece where S is not T.
  void add_row(const S* x, int64_t stride, int64_t n, Total& total) {
    if constexpr (std::is_same_v<S, T>) {
      Q::add_row(x, stride, n, total);
    } else {
      T wide[kWiden];
      for (int64_t i = 0; i < n; i += kWiden) {
        const int64_t m = std::min(kWiden, n - i);
        widen(x + i * stride, stride, m, wide);
        Q::add_row(wide, 1, m, total);
      }
    }
  }
  void add_columns(const S* x, int64_t step, int64_t rows, int64_t stride, int64_t n,
                   Total* totals) {
    if constexpr (std::is_same_v<S, T>) {
      Q::add_columns(x, step, rows, stride, n, totals);
    } else {
      T wide[16 * kTile];
      for (int64_t r = 0; r < rows; r += 16) {
        const int64_t m = std::min<int64_t>(16, rows - r);
        for (int64_t i = 0; i < m; ++i) widen(x + (r + i) * step, stride, n, wide + i * n);
        Q::add_columns(wide, n, m, 1, n, totals);
      }
    }
  }
  static void widen(const S* x, int64_t stride, int64_t n, T* wide) {
    if (stride == 1) return cpu::convert_rows()(x, wide, n);
    for (int64_t i = 0; i < n; ++i) wide[i] = static_cast<T>(x[i * stride]);
  }

  Plan plan_;
  const S* x_;
  Write write_;
  int64_t results_, tiles_ = 1, per_result_, block_, blocks_, tasks_;
  std::unique_ptr<Total[]> partial_;  // [blocks, results]
};

template <class R>
void reduce_cpu(const Tensor& y, const Tensor& x) {
  const double count =
      static_cast<double>(x.numel()) / static_cast<double>(std::max<int64_t>(y.numel(), 1));
  dispatch_any(x.dtype(), [&]<class S>(TypeTag<S>) {
    using T = std::conditional_t<detail::is_two_byte_float<S>, float, S>;
    using Q = FormulaOf<R>;
    if constexpr (R::domain == Domain::any || std::is_floating_point_v<T>) {
      dispatch_any(y.dtype(), [&]<class Out>(TypeTag<Out>) {
        if constexpr (std::is_same_v<Out, S> || std::is_same_v<Out, int64_t> ||
                      std::is_same_v<Out, bool>) {
          using Total = typename Q::template Total<T>;
          Out* out = y.data<Out>();
          const auto write = [=](int64_t i, Total total) {
            const cpu::One<Total> n(static_cast<Total>(count));
            out[i] = cast_element<Out>(R().finish(cpu::One<Total>(total), n).v);
          };
          if (x.numel() == 0)
            for (int64_t i = 0; i < y.numel(); ++i) write(i, Q::template start<T>());
          else
            Reduction<Q, S, decltype(write)>(y, x, write).run();
        }
      });
    }
  });
}

void squared_deviations_cpu(const Tensor& y, const Tensor& x, double divisor) {
  dispatch_any(x.dtype(), [&]<class S>(TypeTag<S>) {
    if constexpr (!std::is_integral_v<S>) {
      using T = std::conditional_t<detail::is_two_byte_float<S>, float, S>;
      S* out = y.data<S>();
      if (x.numel() == 0) return void(std::fill_n(out, y.numel(), static_cast<S>(0 / divisor)));
      auto write = [=](int64_t i, const cpu::Moments<T>& m) {
        out[i] = cast_element<S>(m.m2 / divisor);
      };
      Reduction<MomentsOf, S, decltype(write)>(y, x, write).run();
    }
  });
}

template <class... R>
bool enter(List<R...>) {
  return (reduction_kernel<R>().set(
              DeviceType::cpu, reduce_cpu<R>,
              R::domain == Domain::any ? dtypes::kAll : dtypes::kFloating) &&
          ...);
}
const bool entered =
    enter(reductions::Reductions()) &&
    kernels::squared_deviations.set(DeviceType::cpu, squared_deviations_cpu, dtypes::kFloating);

}  // namespace
}  // namespace lockstep
