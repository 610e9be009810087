// layer_norm on the CPU: rows side by side, and the sums behind the gradients of weight and bias in blocks
// of rows.
#include <algorithm>
#include <cmath>
#include <vector>

#include <lockstep/tensor/cpu/moments.h>
#include <lockstep/tensor/cpu/norm_rows.h>
#include <lockstep/tensor/cpu/widened.h>
#include <lockstep/tensor/ops/layer_norm.h>
#include <lockstep/tensor/parallel.h>

namespace lockstep {
namespace {

template <class T>
T* pointer(const Tensor& t) {
  return t.defined() ? t.data<T>() : nullptr;
}

void layer_norm_cpu(const Tensor& y, const Tensor& statistics, const Tensor& x,
                    const Tensor& weight, const Tensor& bias, double eps) {
  const int64_t n = x.size(1);
  dispatch_floating("layer_norm", x.dtype(), [&]<class T>(TypeTag<T>) {
    const T *from = x.data<T>(), *w = pointer<T>(weight), *b = pointer<T>(bias);
    T *to = y.data<T>(), *kept = statistics.data<T>();
    parallel_for(x.size(0), std::max<int64_t>(1, 16384 / std::max<int64_t>(n, 1)),
                 [&](int64_t begin, int64_t end) {
                   for (int64_t i = begin; i < end; ++i)
                     cpu::norm_rows<T>().layer_norm(from + i * n, w, b, eps, to + i * n,
                                                    kept + 3 * i, n);
                 });
  });
}

/// The gradients of weight and bias are summed in blocks of rows, the sums added in order.
void layer_norm_backward_cpu(const Tensor& dx, const Tensor& dweight, const Tensor& dbias,
                             const Tensor& dy, const Tensor& x, const Tensor& weight,
                             const Tensor& statistics) {
  const int64_t rows = x.size(0), n = x.size(1);
  const int64_t block = std::max<int64_t>({16, 65536 / std::max<int64_t>(n, 1), (rows + 63) / 64});
  constexpr int64_t kRunRows = 64;  // added in T before they are added in Wide<T>
  dispatch_floating("layer_norm", x.dtype(), [&]<class T>(TypeTag<T>) {
    using W = cpu::Wide<T>;
    T *to = pointer<T>(dx), *dw = pointer<T>(dweight), *db = pointer<T>(dbias);
    const T *g = dy.data<T>(), *from = x.data<T>(), *w = pointer<T>(weight),
            *kept = statistics.data<T>();
    const int64_t width = (dw ? n : 0) + (db ? n : 0);  // dweight's sums, then dbias's
    std::vector<W> partial(
        static_cast<size_t>(std::max<int64_t>(1, (rows + block - 1) / block) * width));
    // Element j of a run of rows of dweight (of dbias, from width - n on) without overflow.
    auto wide_run = [&](int64_t first, int64_t last, int64_t j) {
      W sum = 0;
      for (int64_t i = first; i < last; ++i) {
        const T* row = kept + 3 * i;
        const int64_t k = i * n + j % n;
        sum += dw && j < n ? g[k] * ((static_cast<W>(from[k]) - row[0] - row[1]) / row[2]) : g[k];
      }
      return sum;
    };
    parallel_for(rows, block, [&](int64_t begin, int64_t end) {
      std::vector<T> run(static_cast<size_t>(width));
      W* sums = partial.data() + begin / block * width;
      for (int64_t i = begin; i < end; i += kRunRows) {
        const int64_t last = std::min(i + kRunRows, end);
        std::fill(run.begin(), run.end(), T(0));
        for (int64_t r = i; r < last; ++r)
          cpu::norm_rows<T>().layer_norm_backward(
              g + r * n, from + r * n, w, kept + 3 * r, to ? to + r * n : nullptr,
              dw ? run.data() : nullptr, db ? run.data() + width - n : nullptr, n);
        for (int64_t j = 0; j < width; ++j) {
          const T sum = run[static_cast<size_t>(j)];
          sums[j] += std::isfinite(sum) ? sum : wide_run(i, last, j);
        }
      }
    });
    for (size_t i = static_cast<size_t>(width); i < partial.size(); ++i)
      partial[i % static_cast<size_t>(width)] += partial[i];
    if (dw) std::copy_n(partial.begin(), n, dw);
    if (db) std::copy_n(partial.begin() + (width - n), n, db);
  });
}

const bool entered =
    kernels::layer_norm.set(DeviceType::cpu, cpu::Widened<layer_norm_cpu, 2>::run, dtypes::kFloating) &&
    kernels::layer_norm_backward.set(DeviceType::cpu, cpu::Widened<layer_norm_backward_cpu, 3>::run, dtypes::kFloating);

}  // namespace
}  // namespace lockstep
