#include <lockstep/optim/clip.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>

#include <lockstep/optim/kernels.h>
#include <lockstep/optim/layout.h>
#include <lockstep/tensor/cpu/sum_rows.h>
#include <lockstep/tensor/node.h>
#include <lockstep/tensor/ops/copy.h>
#include <lockstep/tensor/ops/elementwise.h>
#include <lockstep/tensor/ops/reduce.h>
#include <lockstep/tensor/parallel.h>

namespace lockstep::optim {
namespace {

constexpr int64_t kBlock = 1 << 14;

std::vector<Tensor> gradients_of(const char* op, const std::vector<Tensor>& parameters) {
  std::vector<Tensor> gradients;
  for (const Tensor& p : parameters) {
    const Tensor g = p.grad();
    if (!g.defined()) continue;
    LOCKSTEP_CHECK(g.dtype() == DType::f32 || g.dtype() == DType::f64, DTypeError, op,
                   ": gradients are f32 or f64, got ", g.dtype());
    g.storage().check_writable(op);
    gradients.push_back(g.detach());
  }
  return gradients;
}

/// The sum of f(block) over fixed blocks of a dense tensor, added in order. long double, since
/// squares of large and small f64 leave the range of f64.
template <class F>
long double sum_blocks(const Tensor& dense, const F& f) {
  const int64_t n = dense.numel(), blocks = (n + kBlock - 1) / kBlock;
  std::vector<long double> parts(static_cast<size_t>(blocks));
  parallel_for(n, kBlock, [&](int64_t begin, int64_t end) {
    parts[static_cast<size_t>(begin / kBlock)] = f(begin, end);
  });
  return std::accumulate(parts.begin(), parts.end(), 0.0L);
}

/// The largest absolute value; NaN if there is one.
double largest_of(const std::vector<Tensor>& gradients) {
  double largest = 0;
  for (const Tensor& g : gradients) {
    const double m = g.numel() ? max(abs(g)).item<double>() : 0;
    largest = std::isnan(m) || std::isnan(largest) ? NAN : std::max(largest, m);
  }
  return largest;
}

long double total_norm(const std::vector<Tensor>& gradients, double norm_type) {
  // Powers are taken of values relative to the largest, so that they stay in range.
  const bool relative = norm_type != 1 && norm_type != 2;
  const double largest = relative ? largest_of(gradients) : 1;
  if (std::isinf(norm_type) || largest == 0 || !std::isfinite(largest)) return largest;
  long double total = 0;
  for (const Tensor& g : gradients) {
    const Tensor dense = is_dense(g) ? g : g.contiguous();
    total += dispatch_floating("clip_grad_norm_", g.dtype(), [&]<class T>(TypeTag<T>) {
      const T* p = dense.data<T>();
      return sum_blocks(dense, [&](int64_t begin, int64_t end) -> long double {
        if (norm_type == 2)
          return cpu::sum_rows<T>().products(p + begin, p + begin, T(0), end - begin);
        long double sum = 0;
        for (int64_t i = begin; i < end; ++i) {
          const double value = std::abs(static_cast<double>(p[i]));
          sum += relative ? std::pow(value / largest, norm_type) : value;
        }
        return sum;
      });
    });
  }
  return norm_type == 1   ? total
         : norm_type == 2 ? std::sqrt(total)
                          : largest * std::pow(total, 1 / static_cast<long double>(norm_type));
}

/// Gradients times a factor, in place, in one pass over their memory. What can fail does so before
/// anything is changed, but for gradients with gaps, which are scaled beside and written back last.
struct Scaling {
  struct Task {
    Tensor gradient, dense;
    Update::Row row;
    void* data;
    std::array<double, 2> factors;
    int64_t begin, end;  // its place in the traversal of all gradients
  };
  std::vector<Task> tasks;
  int64_t elements = 0;

  void add(const Tensor& g, long double factor) {
    const bool single = g.dtype() == DType::f32;
    // Below the smallest normal number a factor has few digits: it is applied in two steps.
    const long double least =
        single ? std::numeric_limits<float>::min() : std::numeric_limits<double>::min();
    const long double first = factor > 0 && factor < least ? 0x1p-60L : 1;
    const Tensor dense = is_dense(g) ? g : g.contiguous();
    tasks.push_back({g,
                     dense,
                     single ? kernels::table().scale.f32 : kernels::table().scale.f64,
                     dense.data_ptr(),
                     {static_cast<double>(first), static_cast<double>(factor / first)},
                     elements,
                     elements + g.numel()});
    // Tensors begin at multiples of 64, so that a block never cuts a tensor inside a SIMD pack.
    elements = (tasks.back().end + 63) / 64 * 64;
  }

  void run() {
    parallel_for(elements, kBlock, [this](int64_t begin, int64_t end) {
      auto task = std::upper_bound(tasks.begin(), tasks.end(), begin,
                                   [](int64_t at, const Task& t) { return at < t.begin; }) -
                  1;
      for (; task != tasks.end() && task->begin < end; ++task) {
        const int64_t from = std::max(begin, task->begin), to = std::min(end, task->end);
        for (const double& factor : task->factors)
          if (from < to && factor != 1)
            task->row(&factor, &task->data, from - task->begin, to - task->begin);
      }
    });
    for (const Task& task : tasks) {
      if (!task.dense.is_same(task.gradient))
        lockstep::detail::copy_kernel(task.gradient, task.dense);
      task.gradient.storage().bump_version();
    }
  }
};

}  // namespace

double clip_grad_norm_(const std::vector<Tensor>& parameters, double max_norm,
                       ClipOptions options) {
  LOCKSTEP_CHECK(max_norm >= 0, ValueError, "clip_grad_norm_: max_norm must not be negative, got ",
                 max_norm);
  LOCKSTEP_CHECK(options.norm_type > 0, ValueError,
                 "clip_grad_norm_: norm_type must be positive, got ", options.norm_type);
  const NoGradGuard guard;
  const std::vector<Tensor> gradients = gradients_of("clip_grad_norm_", parameters);
  const long double norm = total_norm(gradients, options.norm_type);
  LOCKSTEP_CHECK(std::isfinite(norm) || !options.error_if_nonfinite, ValueError,
                 "clip_grad_norm_: the norm of the gradients is ", static_cast<double>(norm),
                 "; look for the first NaN, or pass {.error_if_nonfinite = false} to scale by it");
  const long double factor = max_norm / (norm + 1e-6L);
  if (factor >= 1) return static_cast<double>(norm);
  Scaling scaling;
  for (const Tensor& g : gradients) scaling.add(g, factor);
  scaling.run();
  return static_cast<double>(norm);
}

void clip_grad_value_(const std::vector<Tensor>& parameters, double value) {
  LOCKSTEP_CHECK(value >= 0, ValueError, "clip_grad_value_: the value must not be negative, got ",
                 value);
  const NoGradGuard guard;
  for (Tensor g : gradients_of("clip_grad_value_", parameters)) clamp_(g, -value, value);
}

}  // namespace lockstep::optim
