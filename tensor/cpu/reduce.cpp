// Sums on the CPU. Dimensions are sorted by stride and merged, so that one of two loops runs along
// memory: down a row that is summed up, or across a row of results that further rows are added to.
// Short runs are summed in the element's own type and their results in double; work is cut into
// blocks that depend on the shape alone, and the blocks' totals are added in order.
#include <algorithm>
#include <limits>
#include <memory>
#include <type_traits>
#include <vector>

#include <lockstep/tensor/cpu/sum_rows.h>
#include <lockstep/tensor/ops/reduce.h>
#include <lockstep/tensor/parallel.h>

namespace lockstep {
namespace {

/// What a short run of T is summed in, and what the runs' sums are added up in.
template <class T>
using Run = std::conditional_t<std::is_floating_point_v<T>, T, int64_t>;
template <class T>
using Total = std::conditional_t<std::is_floating_point_v<T>, double, int64_t>;

constexpr int64_t kTile = 512;       // results that one task keeps at a time
constexpr int64_t kRunRows = 64;     // rows added in Run<T> before they move to Total<T>
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

/// The summed-up quantity: an element, or its squared deviation from a centre.
template <bool kSquares, class T>
Run<T> term(T x, [[maybe_unused]] Run<T> centre) {
  if constexpr (kSquares)
    return (x - centre) * (x - centre);
  else
    return x;
}

/// f32 and f64 rows without gaps have SIMD kernels.
template <class T>
constexpr bool kHasRows = std::is_floating_point_v<T>;

template <bool kSquares, class T>
Total<T> sum_row(const T* x, int64_t stride, int64_t n, Run<T> centre) {
  if constexpr (kHasRows<T>) {
    if (stride == 1 && n >= 4)
      return kSquares ? cpu::sum_rows<T>().squares(x, centre, n) : cpu::sum_rows<T>().sum(x, n);
  }
  Total<T> total = 0;
  for (int64_t i = 0; i < n; ++i) total += term<kSquares>(x[i * stride], centre);
  return total;
}

/// totals[j] += the terms of `rows` rows, `step` apart; at most kTile columns.
template <bool kSquares, class T>
void sum_columns(const T* x, int64_t step, int64_t rows, int64_t stride, int64_t n,
                 const Run<T>* centre, Total<T>* totals) {
  Run<T> runs[kTile];
  for (int64_t r = 0; r < rows; r += kRunRows) {
    const int64_t r_end = std::min(rows, r + kRunRows);
    std::fill_n(runs, n, Run<T>(0));
    if constexpr (kHasRows<T>) {
      if (stride == 1) {
        const T* block = x + r * step;
        if (kSquares)
          cpu::sum_rows<T>().add_squares(block, step, r_end - r, n, centre, runs);
        else
          cpu::sum_rows<T>().add(block, step, r_end - r, n, runs);
        for (int64_t j = 0; j < n; ++j) totals[j] += runs[j];
        continue;
      }
    }
    for (int64_t i = r; i < r_end; ++i) {
      const T* row = x + i * step;
      if (stride == 1)
        for (int64_t j = 0; j < n; ++j) runs[j] += term<kSquares>(row[j], centre[j]);
      else
        for (int64_t j = 0; j < n; ++j) runs[j] += term<kSquares>(row[j * stride], centre[j]);
    }
    for (int64_t j = 0; j < n; ++j) totals[j] += runs[j];
  }
}

/// One whole reduction: tasks (kept index, tile of results, block of summed elements) in any order.
template <bool kSquares, class T, class Out>
class Sum {
 public:
  Sum(const Tensor& y, const Tensor& x, Out* out, const double* centre, double scale)
      : plan_(y, x),
        x_(x.data<T>()),
        out_(out),
        centre_(centre),
        scale_(scale),
        results_(y.numel()) {
    const Plan& p = plan_;
    if (p.inner_summed) {
      per_result_ = p.summed.count * p.inner.size;
      least_ = kBlock;
    } else {
      tiles_ = (p.inner.size + kTile - 1) / kTile;
      per_result_ = p.summed.count;
      least_ = std::max(kRunRows, kBlock / std::min(p.inner.size, kTile));
    }
    const int64_t groups = p.kept.count * tiles_;
    block_ = groups >= kMostBlocks
                 ? per_result_
                 : std::max(least_, (per_result_ + kMostBlocks - 1) / kMostBlocks);
    blocks_ = (per_result_ + block_ - 1) / block_;
    tasks_ = groups * blocks_;
  }

  void run() {
    if (blocks_ > 1) partial_.reset(new Total<T>[static_cast<size_t>(blocks_ * results_)]);
    const int64_t work = std::min(block_, per_result_) *
                         (plan_.inner_summed ? 1 : std::min(plan_.inner.size, kTile));
    parallel_for(tasks_, std::max<int64_t>(1, kBlock / work), [this](int64_t begin, int64_t end) {
      for (int64_t task = begin; task < end; ++task) {
        if (plan_.inner_summed && blocks_ == 1) {
          row_task(task, 0, 0, per_result_);
          continue;
        }
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
      Total<T> totals[kTile] = {};
      for (int64_t b = 0; b < blocks_; ++b)
        for (int64_t i = begin; i < end; ++i) totals[i - begin] += partial_[b * results_ + i];
      for (int64_t i = begin; i < end; ++i) write(i, totals[i - begin]);
    });
  }

 private:
  void write(int64_t i, Total<T> total) {
    if constexpr (std::is_floating_point_v<T>)
      out_[i] = static_cast<Out>(total * scale_);
    else
      out_[i] = total;
  }
  void finish(int64_t i, int64_t block, Total<T> total) {
    if (blocks_ > 1)
      partial_[block * results_ + i] = total;
    else
      write(i, total);
  }
  Run<T> centre(int64_t i) const { return kSquares ? static_cast<Run<T>>(centre_[i]) : Run<T>(0); }

  /// Elements first .. last of one result, counted along its rows.
  void row_task(int64_t group, int64_t block, int64_t first, int64_t last) {
    const Axis& inner = plan_.inner;
    const Axis at = plan_.kept.at(group);
    if (per_result_ == inner.size && blocks_ == 1)
      return write(at.y, sum_row<kSquares>(x_ + at.x, inner.x, inner.size, centre(at.y)));
    Total<T> total = 0;
    while (first < last) {
      const int64_t column = first % inner.size, n = std::min(last - first, inner.size - column);
      const T* row = x_ + at.x + plan_.summed.at(first / inner.size).x + column * inner.x;
      total += sum_row<kSquares>(row, inner.x, n, centre(at.y));
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
    Total<T> totals[kTile] = {};
    Run<T> centres[kTile] = {};
    if (n == inner.size && n <= kTile / 8 && inner.x == 1 && summed.n == 1 &&
        summed.axis[0].x == n) {
      // Narrow rows without gaps: several of them make one wide row.
      const int64_t fold = kTile / n, wide = fold * n;
      if constexpr (kSquares)
        for (int64_t j = 0; j < wide; ++j) centres[j] = centre(y + j % n * inner.y);
      x += first * n;
      sum_columns<kSquares>(x, wide, rows / fold, 1, wide, centres, totals);
      for (int64_t j = n; j < wide; ++j) totals[j % n] += totals[j];
      sum_columns<kSquares>(x + rows / fold * wide, n, rows % fold, 1, n, centres, totals);
    } else {
      if constexpr (kSquares)
        for (int64_t j = 0; j < n; ++j) centres[j] = centre(y + j * inner.y);
      const Axis run = summed.n ? summed.axis[summed.n - 1] : Axis();
      while (first < last) {
        const int64_t evenly_spaced = std::min(last - first, run.size - first % run.size);
        sum_columns<kSquares>(x + summed.at(first).x, run.x, evenly_spaced, inner.x, n, centres,
                              totals);
        first += evenly_spaced;
      }
    }
    for (int64_t j = 0; j < n; ++j) finish(y + j * inner.y, block, totals[j]);
  }

  Plan plan_;
  const T* x_;
  Out* out_;
  const double* centre_;
  double scale_;
  int64_t results_, tiles_ = 1, per_result_, least_, block_, blocks_, tasks_;
  std::unique_ptr<Total<T>[]> partial_;  // [blocks, results]
};

void sum_cpu(const Tensor& y, const Tensor& x, double scale) {
  dispatch("sum", x.dtype(), [&]<class T>(TypeTag<T>) {
    using Out = std::conditional_t<std::is_floating_point_v<T>, T, int64_t>;
    if (x.numel() == 0)
      std::fill_n(y.data<Out>(), y.numel(), static_cast<Out>(0 * scale));
    else
      Sum<false, T, Out>(y, x, y.data<Out>(), nullptr, scale).run();
  });
}

void squared_deviations_cpu(const Tensor& y, const Tensor& x, double scale) {
  dispatch_floating("var", x.dtype(), [&]<class T>(TypeTag<T>) {
    if (x.numel() == 0) return void(std::fill_n(y.data<T>(), y.numel(), static_cast<T>(0 * scale)));
    std::vector<double> means(static_cast<size_t>(y.numel()));
    const double n = static_cast<double>(x.numel() / y.numel());
    Sum<false, T, double>(y, x, means.data(), nullptr, 1 / n).run();
    Sum<true, T, T>(y, x, y.data<T>(), means.data(), scale).run();
  });
}

}  // namespace

namespace kernels {
constinit Kernel<void(const Tensor&, const Tensor&, double)> sum("sum", sum_cpu);
constinit Kernel<void(const Tensor&, const Tensor&, double)> squared_deviations(
    "var", squared_deviations_cpu);
}  // namespace kernels

}  // namespace lockstep
