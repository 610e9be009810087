// Gradient clipping on the CPU: sums over fixed blocks, added in order, in long double, since squares of
// large and small f64 leave the range of f64.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include <lockstep/optim/cpu/rows.h>
#include <lockstep/optim/update.h>
#include <lockstep/tensor/cpu/sum_rows.h>
#include <lockstep/tensor/cpu/widened.h>
#include <lockstep/tensor/parallel.h>

namespace lockstep::optim::cpu {
namespace {

constexpr int64_t kBlock = 1 << 14;

/// combine(...) of f(begin, end) over fixed blocks of n elements, in order.
template <class R, class F, class Combine>
R over_blocks(int64_t n, R start, const F& f, const Combine& combine) {
  std::vector<R> parts(static_cast<size_t>((n + kBlock - 1) / kBlock));
  parallel_for(n, kBlock, [&](int64_t begin, int64_t end) {
    parts[static_cast<size_t>(begin / kBlock)] = f(begin, end);
  });
  return std::accumulate(parts.begin(), parts.end(), start, combine);
}

double larger(double a, double b) { return std::isnan(a) || std::isnan(b) ? NAN : std::max(a, b); }

/// The largest absolute value; NaN if there is one.
double largest_of(const std::vector<Tensor>& gradients) {
  double largest = 0;
  for (const Tensor& g : gradients)
    dispatch_floating("clip_grad_norm_", g.dtype(), [&]<class T>(TypeTag<T>) {
      const T* p = g.data<T>();
      const auto of_block = [p](int64_t begin, int64_t end) {
        double most = 0;
        for (int64_t i = begin; i < end; ++i) most = larger(most, std::abs(p[i]));
        return most;
      };
      largest = over_blocks(g.numel(), largest, of_block, larger);
    });
  return largest;
}

long double norm_of(const std::vector<Tensor>& gradients, double p_norm) {
  // Powers are taken of values relative to the largest, so that they stay in range.
  const bool relative = p_norm != 1 && p_norm != 2;
  const double largest = relative ? largest_of(gradients) : 1;
  if (std::isinf(p_norm) || largest == 0 || !std::isfinite(largest)) return largest;
  long double total = 0;
  for (const Tensor& g : gradients)
    dispatch_floating("clip_grad_norm_", g.dtype(), [&]<class T>(TypeTag<T>) {
      const T* p = g.data<T>();
      const auto of_block = [&](int64_t begin, int64_t end) -> long double {
        if (p_norm == 2)
          return lockstep::cpu::sum_rows<T>().products(p + begin, p + begin, T(0), end - begin);
        long double sum = 0;
        for (int64_t i = begin; i < end; ++i) {
          const double value = std::abs(static_cast<double>(p[i]));
          sum += relative ? std::pow(value / largest, p_norm) : value;
        }
        return sum;
      };
      total += over_blocks(g.numel(), 0.0L, of_block, std::plus<long double>());
    });
  return p_norm == 1   ? total
         : p_norm == 2 ? std::sqrt(total)
                       : largest * std::pow(total, 1 / static_cast<long double>(p_norm));
}

/// Gradients of f16 and bf16 as copies in f32, the others themselves.
std::vector<Tensor> widened(const std::vector<Tensor>& gradients) {
  std::vector<Tensor> wide;
  for (const Tensor& g : gradients) wide.push_back(lockstep::cpu::in_f32(g, true));
  return wide;
}

void grad_norm_cpu(const Tensor& norm, const std::vector<Tensor>& gradients, double p) {
  const long double value = norm_of(widened(gradients), p);
  const long double scale = std::isfinite(value) && value > 0x1p900L ? 0x1p600L
                            : value > 0 && value < 0x1p-900L         ? 0x1p-600L
                                                                     : 1;
  norm.data<double>()[0] = static_cast<double>(value / scale);
  norm.data<double>()[1] = static_cast<double>(scale);
}

void clip_grad_norm_cpu(const std::vector<Tensor>& given, const Tensor& norm, double max_norm) {
  const long double value = static_cast<long double>(norm.data<double>()[0]) * norm.data<double>()[1];
  const long double factor = max_norm / (value + 1e-6L);
  if (factor >= 1) return;
  // Below the smallest normal number a factor has few digits: it is applied in two steps.
  const std::vector<Tensor> gradients = widened(given);
  Pass first, second;
  for (const Tensor& g : gradients) {
    const bool single = g.dtype() == DType::f32;
    const long double least =
        single ? std::numeric_limits<float>::min() : std::numeric_limits<double>::min();
    const long double step = factor > 0 && factor < least ? 0x1p-60L : 1;
    const Row row = table().scale.of(g.dtype());
    if (step != 1) first.add(row, {static_cast<double>(step)}, {g.data_ptr()}, g.numel());
    second.add(row, {static_cast<double>(factor / step)}, {g.data_ptr()}, g.numel());
  }
  first.run();
  second.run();
  for (size_t i = 0; i < given.size(); ++i)
    if (!gradients[i].is_same(given[i])) lockstep::kernels::copy(given[i], gradients[i]);
}

const bool entered =
    kernels::grad_norm.set(DeviceType::cpu, grad_norm_cpu, dtypes::kFloating) &&
    kernels::clip_grad_norm.set(DeviceType::cpu, clip_grad_norm_cpu, dtypes::kFloating);

}  // namespace
}  // namespace lockstep::optim::cpu
