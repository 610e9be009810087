// Sums and variances on the CPU. Dimensions are sorted by stride and merged, so that one of two
// loops runs along memory: down a row that is reduced to one result, or across a row of results to
// which further rows are added. Work is cut into blocks that depend on the shape alone, and the
// totals of the blocks are combined in order.
#include <algorithm>
#include <limits>
#include <memory>
#include <type_traits>

#include <lockstep/tensor/cpu/sum_rows.h>
#include <lockstep/tensor/cpu/widened.h>
#include <lockstep/tensor/ops/reduce.h>
#include <lockstep/tensor/parallel.h>

namespace lockstep {
namespace {

constexpr int64_t kTile = 512;       // results that one task keeps at a time
constexpr int64_t kRunRows = 64;     // at least so many rows are added at a time
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

// A quantity Q over elements of type T: its Total<T>, how a row or rows of elements are added to
// totals, and how totals are combined.

struct SumOf {
  /// Integers wrap around where their sum leaves i64.
  template <class T>
  using Total = std::conditional_t<std::is_floating_point_v<T>, cpu::Wide<T>, uint64_t>;

  template <class T>
  static void add_row(const T* x, int64_t stride, int64_t n, Total<T>& total) {
    if (stride != 1) {
      for (int64_t i = 0; i < n; ++i) total += static_cast<Total<T>>(x[i * stride]);
    } else if constexpr (std::is_floating_point_v<T>) {
      total += cpu::sum_rows<T>().sum(x, n);
    } else {
      for (int64_t i = 0; i < n; ++i) total += static_cast<Total<T>>(x[i]);
    }
  }
  /// totals[j] grow by the elements of `rows` rows, `step` apart; at most kTile columns.
  template <class T>
  static void add_columns(const T* x, int64_t step, int64_t rows, int64_t stride, int64_t n,
                          Total<T>* totals) {
    if constexpr (std::is_floating_point_v<T>)
      if (stride == 1) return cpu::sum_rows<T>().add(x, step, rows, n, totals);
    for (int64_t i = 0; i < rows; ++i, x += step)
      if (stride == 1)
        for (int64_t j = 0; j < n; ++j) totals[j] += static_cast<Total<T>>(x[j]);
      else
        for (int64_t j = 0; j < n; ++j) totals[j] += static_cast<Total<T>>(x[j * stride]);
  }
  template <class V>
  static void combine(V& total, const V& other) {
    total += other;
  }
};

struct MomentsOf {
  template <class T>
  using Total = cpu::Moments<T>;

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

/// One whole reduction: tasks (kept index, tile of results, block of reduced elements) in any order.
/// write(i, total) is called once for each result.
template <class Q, class T, class Write>
class Reduction {
  using Total = typename Q::template Total<T>;

 public:
  Reduction(const Tensor& y, const Tensor& x, Write write)
      : plan_(y, x), x_(x.data<T>()), write_(write), results_(y.numel()) {
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
      Total totals[kTile] = {};
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
    Total total{};
    if (per_result_ == inner.size && blocks_ == 1) {
      Q::add_row(x_ + at.x, inner.x, inner.size, total);
      return write_(at.y, total);
    }
    while (first < last) {
      const int64_t column = first % inner.size, n = std::min(last - first, inner.size - column);
      const T* row = x_ + at.x + plan_.summed.at(first / inner.size).x + column * inner.x;
      Q::add_row(row, inner.x, n, total);
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
    const T* x = x_ + at.x + column * inner.x;
    const int64_t y = at.y + column * inner.y;
    Total totals[kTile] = {};
    if (n == inner.size && n <= kTile / 8 && inner.x == 1 && summed.n == 1 &&
        summed.axis[0].x == n) {
      // Narrow rows without gaps: several of them make one wide row.
      const int64_t fold = kTile / n, wide = fold * n;
      x += first * n;
      Q::add_columns(x, wide, rows / fold, 1, wide, totals);
      for (int64_t j = n; j < wide; ++j) Q::combine(totals[j % n], totals[j]);
      Q::add_columns(x + rows / fold * wide, n, rows % fold, 1, n, totals);
    } else {
      const Axis run = summed.n ? summed.axis[summed.n - 1] : Axis();
      while (first < last) {
        const int64_t evenly_spaced = std::min(last - first, run.size - first % run.size);
        Q::add_columns(x + summed.at(first).x, run.x, evenly_spaced, inner.x, n, totals);
        first += evenly_spaced;
      }
    }
    for (int64_t j = 0; j < n; ++j) finish(y + j * inner.y, block, totals[j]);
  }

  Plan plan_;
  const T* x_;
  Write write_;
  int64_t results_, tiles_ = 1, per_result_, block_, blocks_, tasks_;
  std::unique_ptr<Total[]> partial_;  // [blocks, results]
};

void sum_cpu(const Tensor& y, const Tensor& x, double divisor) {
  dispatch("sum", x.dtype(), [&]<class T>(TypeTag<T>) {
    using Out = std::conditional_t<std::is_floating_point_v<T>, T, int64_t>;
    Out* out = y.data<Out>();
    if (x.numel() == 0) return void(std::fill_n(out, y.numel(), static_cast<Out>(0 / divisor)));
    auto write = [=](int64_t i, SumOf::Total<T> total) {
      if constexpr (std::is_floating_point_v<T>)
        out[i] = static_cast<T>(total / divisor);
      else
        out[i] = static_cast<int64_t>(total);
    };
    Reduction<SumOf, T, decltype(write)>(y, x, write).run();
  });
}

void squared_deviations_cpu(const Tensor& y, const Tensor& x, double divisor) {
  dispatch_floating("var", x.dtype(), [&]<class T>(TypeTag<T>) {
    T* out = y.data<T>();
    if (x.numel() == 0) return void(std::fill_n(out, y.numel(), static_cast<T>(0 / divisor)));
    auto write = [=](int64_t i, const cpu::Moments<T>& m) {
      out[i] = static_cast<T>(m.m2 / divisor);
    };
    Reduction<MomentsOf, T, decltype(write)>(y, x, write).run();
  });
}

const bool entered =
    kernels::sum.set(DeviceType::cpu, cpu::Widened<sum_cpu, 1>::run, dtypes::kAll) &&
    kernels::squared_deviations.set(DeviceType::cpu, cpu::Widened<squared_deviations_cpu, 1>::run, dtypes::kFloating);

}  // namespace
}  // namespace lockstep
