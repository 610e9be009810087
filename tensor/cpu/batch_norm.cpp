// batch_norm on the CPU. In memory a batch is either rows of C channels ([N, C], channels-last) or
// planes of one channel ([N, C, H, W]). Either way moments are taken block by block, each block
// while it is in cache, and combined: one pass over memory, no cancellation.
#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include <lockstep/tensor/cpu/norm_rows.h>
#include <lockstep/tensor/cpu/sum_rows.h>
#include <lockstep/tensor/cpu/widened.h>
#include <lockstep/tensor/ops/batch_norm.h>
#include <lockstep/tensor/parallel.h>

namespace lockstep {
namespace {

constexpr int64_t kRows = 64;         // added at a time
constexpr int64_t kPiece = 8192;      // elements of a plane taken at once
constexpr int64_t kTaskSize = 32768;  // elements of a task
constexpr int64_t kMostTasks = 64;    // whose results are kept apart and then combined

struct Layout {
  int64_t samples, channels, plane;  // planes: samples x channels x plane; rows: samples x channels
  bool rows;

  explicit Layout(const Tensor& x) : channels(x.size(1)) {
    plane = x.numel() / std::max<int64_t>(1, x.size(0) * channels);
    rows = plane == 1 || !x.is_contiguous();
    if (rows) plane = 1;
    samples = x.numel() / std::max<int64_t>(1, channels * plane);
  }
  int64_t channels_per_task() const {
    return std::max<int64_t>(1, kTaskSize / std::max<int64_t>(1, samples * plane));
  }
  int64_t rows_per_task() const {
    return std::max<int64_t>(
        {kRows, kTaskSize / channels / kRows * kRows, (samples + kMostTasks - 1) / kMostTasks});
  }
};

template <class T>
void statistics_of(const Layout& l, const T* x, double* statistics) {
  using Moments = cpu::Moments<T>;
  std::vector<Moments> moments(static_cast<size_t>(l.channels));
  if (l.rows) {
    const int64_t per_task = l.rows_per_task(), tasks = (l.samples + per_task - 1) / per_task;
    std::vector<Moments> partial(static_cast<size_t>(tasks * l.channels));
    parallel_for(l.samples, per_task, [&](int64_t begin, int64_t end) {
      cpu::sum_rows<T>().add_moments(x + begin * l.channels, l.channels, end - begin, l.channels,
                                     partial.data() + begin / per_task * l.channels);
    });
    for (size_t i = 0; i < partial.size(); ++i) moments[i % moments.size()].combine(partial[i]);
  } else {
    parallel_for(l.channels, l.channels_per_task(), [&](int64_t begin, int64_t end) {
      for (int64_t c = begin; c < end; ++c)
        for (int64_t i = 0; i < l.samples; ++i)
          for (int64_t at = 0; at < l.plane; at += kPiece)
            moments[static_cast<size_t>(c)].combine(cpu::sum_rows<T>().moments(
                x + (i * l.channels + c) * l.plane + at, std::min(kPiece, l.plane - at)));
    });
  }
  for (int64_t c = 0; c < l.channels; ++c) {
    const Moments& m = moments[static_cast<size_t>(c)];
    statistics[c] = static_cast<double>(m.mean);
    statistics[l.channels + c] = m.n > 0 ? static_cast<double>(std::sqrt(m.m2 / m.n)) : 0;
    statistics[2 * l.channels + c] = static_cast<double>(m.mean - statistics[c]);
  }
}

void statistics_cpu(const Tensor& statistics, const Tensor& x) {
  if (x.numel() == 0)
    return void(std::fill_n(statistics.data<double>(), statistics.numel(), 0.0));
  dispatch_floating("batch_norm", x.dtype(), [&]<class T>(TypeTag<T>) {
    statistics_of(Layout(x), x.data<T>(), statistics.data<double>());
  });
}

/// Calls row(first element, count) or plane(first element, count, channel) for pieces of the whole
/// batch.
template <class Row, class Plane>
void for_each_piece(const Layout& l, const Row& row, const Plane& plane) {
  if (l.rows)
    parallel_for(l.samples, std::max<int64_t>(1, kTaskSize / l.channels),
                 [&](int64_t begin, int64_t end) {
                   for (int64_t i = begin; i < end; ++i) row(i * l.channels);
                 });
  else
    parallel_for(l.samples * l.channels, std::max<int64_t>(1, kTaskSize / l.plane),
                 [&](int64_t begin, int64_t end) {
                   for (int64_t i = begin; i < end; ++i) plane(i * l.plane, i % l.channels);
                 });
}

template <class T>
T at_or(const Tensor& t, int64_t c, T otherwise) {
  return t.defined() ? t.data<T>()[c] : otherwise;
}

/// Statistics [3, C], read by channel.
struct Statistics {
  const double *means, *deviations, *rests;
  Statistics(const Tensor& statistics)  // NOLINT: implicit
      : means(statistics.data<double>()),
        deviations(means + statistics.size(1)),
        rests(deviations + statistics.size(1)) {}
  /// sqrt(variance + eps), which neither overflows nor vanishes where the deviation does not.
  double spread(int64_t c, double eps) const {
    const double variance = deviations[c] * deviations[c] + eps;
    return variance > 0x1p-900 && variance < 0x1p900 ? std::sqrt(variance)
                                                     : std::hypot(deviations[c], std::sqrt(eps));
  }
  /// What rounding to T took from the mean.
  template <class T>
  double rest(int64_t c) const {
    return std::isfinite(means[c]) ? means[c] - static_cast<T>(means[c]) + rests[c] : 0;
  }
  /// (x - mean) / spread of an element of any magnitude.
  template <class T>
  cpu::Wide<T> normal(int64_t c, T x, double eps) const {
    using W = cpu::Wide<T>;
    return (static_cast<W>(x) - means[c] - rests[c]) / spread(c, eps);
  }
};

/// Whether (x - mean) * factor + shift, for x of this spread around the mean, stays clear of the limits
/// of T.
template <class T>
bool is_moderate(double spread, double factor, double mean, double shift) {
  constexpr double large = std::is_same_v<T, float> ? 0x1p60 : 0x1p500;
  const double size = std::abs(factor), least = std::numeric_limits<T>::min();
  const bool wide = size > large || std::abs(mean) > large || std::abs(shift) > large;
  return cpu::is_moderate<T>(spread) && !wide && !(size < least && size > 0);
}

/// y[i] = f(c, i) for all elements i, of channel c: for batches whose spread is near the limits of
/// T, in Wide<T>.
template <class T, class F>
void for_each_element(const Layout& l, T* y, const F& f) {
  parallel_for(l.samples * l.channels, std::max<int64_t>(1, kTaskSize / l.plane),
               [&](int64_t begin, int64_t end) {
                 for (int64_t i = begin; i < end; ++i)
                   for (int64_t k = i * l.plane; k < (i + 1) * l.plane; ++k)
                     y[k] = static_cast<T>(f(i % l.channels, k));
               });
}

void batch_norm_cpu(const Tensor& y, const Tensor& x, const Tensor& statistics,
                    const Tensor& weight, const Tensor& bias, double eps) {
  const Layout l(x);
  if (x.numel() == 0) return;
  dispatch_floating("batch_norm", x.dtype(), [&]<class T>(TypeTag<T>) {
    const Statistics given(statistics);
    std::vector<T> buffer(static_cast<size_t>(3 * l.channels));
    T *mean = buffer.data(), *scale = mean + l.channels, *shift = scale + l.channels;
    bool moderate = true;
    for (int64_t c = 0; c < l.channels; ++c) {
      const double spread = given.spread(c, eps), factor = at_or<T>(weight, c, 1) / spread;
      mean[c] = static_cast<T>(given.means[c]);
      scale[c] = static_cast<T>(factor);
      // What rounding took from the mean goes into the shift.
      const double whole_shift = at_or<T>(bias, c, 0) - given.rest<T>(c) * factor;
      shift[c] = static_cast<T>(whole_shift);
      moderate = moderate && is_moderate<T>(spread, factor, given.means[c], whole_shift);
    }
    const T* from = x.data<T>();
    T* to = y.data<T>();
    if (!moderate)
      return for_each_element(l, to, [&](int64_t c, int64_t i) {
        return given.normal(c, from[i], eps) * at_or<T>(weight, c, 1) + at_or<T>(bias, c, 0);
      });
    const auto& rows = cpu::norm_rows<T>();
    for_each_piece(
        l, [&](int64_t i) { rows.affine_row(from + i, mean, scale, shift, to + i, l.channels); },
        [&](int64_t i, int64_t c) {
          rows.affine_plane(from + i, mean[c], scale[c], shift[c], to + i, l.plane);
        });
  });
}

template <class T>
void sums_of(const Layout& l, const T* dy, const T* x, const Statistics& statistics, double eps,
             double* sums) {
  using W = cpu::Wide<T>;
  const int64_t channels = l.channels;
  std::vector<T> means(statistics.means, statistics.means + channels);
  std::vector<W> totals(static_cast<size_t>(2 * channels));
  if (l.rows) {
    const int64_t per_task = l.rows_per_task(), tasks = (l.samples + per_task - 1) / per_task;
    std::vector<W> partial(static_cast<size_t>(tasks * 2 * channels));
    parallel_for(l.samples, per_task, [&](int64_t begin, int64_t end) {
      W* own = partial.data() + begin / per_task * 2 * channels;
      cpu::sum_rows<T>().add_products(dy + begin * channels, x + begin * channels, channels,
                                      end - begin, channels, means.data(), own, own + channels);
    });
    for (size_t i = 0; i < partial.size(); ++i) totals[i % totals.size()] += partial[i];
  } else {
    parallel_for(channels, l.channels_per_task(), [&](int64_t begin, int64_t end) {
      for (int64_t c = begin; c < end; ++c)
        for (int64_t i = 0; i < l.samples; ++i)
          for (int64_t at = 0; at < l.plane; at += kPiece) {
            const int64_t first = (i * channels + c) * l.plane + at,
                          k = std::min(kPiece, l.plane - at);
            totals[static_cast<size_t>(c)] += cpu::sum_rows<T>().sum(dy + first, k);
            totals[static_cast<size_t>(channels + c)] += cpu::sum_rows<T>().products(
                dy + first, x + first, means[static_cast<size_t>(c)], k);
          }
    });
  }
  for (int64_t c = 0; c < channels; ++c) {
    const W sum = totals[static_cast<size_t>(c)],
            product = totals[static_cast<size_t>(channels + c)];  // taken from the rounded mean
    sums[c] = static_cast<double>(sum);
    sums[channels + c] = static_cast<double>((product - sum * statistics.rest<T>(c)) /
                                             statistics.spread(c, eps));
  }
}

void sums_cpu(const Tensor& sums, const Tensor& dy, const Tensor& x, const Tensor& statistics,
              double eps) {
  if (x.numel() == 0) return void(std::fill_n(sums.data<double>(), sums.numel(), 0.0));
  dispatch_floating("batch_norm", x.dtype(), [&]<class T>(TypeTag<T>) {
    sums_of(Layout(x), dy.data<T>(), x.data<T>(), statistics, eps, sums.data<double>());
  });
}

void backward_cpu(const Tensor& dx, const Tensor& dy, const Tensor& x, const Tensor& statistics,
                  const Tensor& sums, const Tensor& weight, const Tensor& count_of_all, double eps) {
  const double count = *count_of_all.data<double>();
  const Layout l(x);
  if (x.numel() == 0) return;
  dispatch_floating("batch_norm", x.dtype(), [&]<class T>(TypeTag<T>) {
    const Statistics given(statistics);
    const double *sum = sums.data<double>(), *product = sum + l.channels;
    std::vector<T> buffer(static_cast<size_t>(4 * l.channels));
    T *mean = buffer.data(), *scale = mean + l.channels, *a = scale + l.channels,
      *b = a + l.channels;
    const bool constant = std::isinf(count);  // statistics: dx = dy scale, whatever x is
    bool moderate = true;
    for (int64_t c = 0; c < l.channels; ++c) {
      const double spread = given.spread(c, eps), factor = at_or<T>(weight, c, 1) / spread;
      scale[c] = static_cast<T>(factor);
      if (constant) {
        moderate = moderate && is_moderate<T>(spread, factor, 0, 0);
        continue;
      }
      mean[c] = static_cast<T>(given.means[c]);
      b[c] = static_cast<T>(product[c] / spread / count);
      const double whole_a = sum[c] / count - given.rest<T>(c) * b[c];
      a[c] = static_cast<T>(whole_a);
      moderate = moderate && is_moderate<T>(spread, factor, given.means[c], whole_a);
    }
    const T *g = dy.data<T>(), *from = x.data<T>();
    T* to = dx.data<T>();
    if (!moderate)
      return for_each_element(l, to, [&](int64_t c, int64_t i) {
        cpu::Wide<T> centred = g[i];
        if (!constant)
          centred -= sum[c] / count + given.normal(c, from[i], eps) * (product[c] / count);
        return centred / given.spread(c, eps) * at_or<T>(weight, c, 1);
      });
    const auto& rows = cpu::norm_rows<T>();
    for_each_piece(
        l,
        [&](int64_t i) {
          if (constant) return rows.affine_row(g + i, mean, scale, a, to + i, l.channels);
          rows.affine_backward_row(g + i, from + i, mean, scale, a, b, to + i, l.channels);
        },
        [&](int64_t i, int64_t c) {
          if (constant) return rows.affine_plane(g + i, 0, scale[c], 0, to + i, l.plane);
          rows.affine_backward_plane(g + i, from + i, mean[c], scale[c], a[c], b[c], to + i,
                                     l.plane);
        });
  });
}

void combine_cpu(const Tensor& statistics, const Tensor& count, const Tensor& all, double own,
                 Shape x) {
  using W = long double;  // squares of f64 deviations neither overflow nor vanish
  const auto channels = static_cast<size_t>(statistics.size(1));
  std::vector<W> means(channels), variances(channels);
  double total = 0;
  for (int64_t rank = 0; rank < all.size(0); ++rank) {
    const double* theirs = all.data<double>() + rank * all.size(1);
    const double n = *theirs++;
    if (n == 0) continue;
    const double share = n / (total + n);
    for (size_t c = 0; c < channels; ++c) {
      const W mean = static_cast<W>(theirs[c]) + theirs[2 * channels + c], delta = mean - means[c];
      const W deviation = theirs[channels + c];
      means[c] += delta * share;
      variances[c] += (deviation * deviation - variances[c]) * share +
                      delta * delta * share * (1 - share);
    }
    total += n;
  }
  LOCKSTEP_CHECK(total >= 2, ShapeError,
                 "batch_norm: training needs more than one value per channel, and all ranks together "
                 "have ",
                 total, "; this one has ", own, " in ", x);
  double* result = statistics.data<double>();
  for (size_t c = 0; c < channels; ++c) {
    result[c] = static_cast<double>(means[c]);
    result[channels + c] = static_cast<double>(std::sqrt(variances[c]));
    result[2 * channels + c] = static_cast<double>(means[c] - result[c]);
  }
  *count.data<double>() = total;
}

void update_cpu(const Tensor& running_mean, const Tensor& running_var, const Tensor& statistics,
                const Tensor& count, const Tensor& batches, double momentum) {
  const double n = *count.data<double>(), *means = statistics.data<double>();
  const int64_t channels = statistics.size(1);
  if (n == 0) return;
  if (batches.defined()) momentum = 1 / (static_cast<double>(*batches.data<int64_t>()) + 1);
  dispatch_floating("batch_norm", running_mean.dtype(), [&]<class T>(TypeTag<T>) {
    const auto move = [&](T& running, double value) {
      running = static_cast<T>(running * (1 - momentum) + value * momentum);
    };
    T* mean = running_mean.data<T>();
    T* var = running_var.data<T>();
    for (int64_t c = 0; c < channels; ++c) {
      const double deviation = means[channels + c];
      move(mean[c * running_mean.strides()[0]], means[c]);
      move(var[c * running_var.strides()[0]], deviation * deviation * (n / (n - 1)));
    }
  });
}

const bool entered =
    kernels::batch_norm_statistics.set(DeviceType::cpu, cpu::Widened<statistics_cpu, 1>::run, dtypes::kFloating) &&
    kernels::batch_norm.set(DeviceType::cpu, cpu::Widened<batch_norm_cpu, 1>::run, dtypes::kFloating) &&
    kernels::batch_norm_sums.set(DeviceType::cpu, cpu::Widened<sums_cpu, 1>::run, dtypes::kFloating) &&
    kernels::batch_norm_backward.set(DeviceType::cpu, cpu::Widened<backward_cpu, 1>::run, dtypes::kFloating) &&
    kernels::batch_norm_combine.set(DeviceType::cpu, combine_cpu, dtypes::kFloats) &&
    kernels::batch_norm_update.set(DeviceType::cpu, cpu::Widened<update_cpu, 2, true>::run, dtypes::kFloating);

}  // namespace
}  // namespace lockstep
