// batch_norm on the CPU. In memory a batch is either rows of C channels ([N, C], channels-last) or
// planes of one channel ([N, C, H, W]). Either way statistics are taken block by block, each block
// in two passes while it is in cache, and combined pairwise (Chan, Golub and LeVeque, 1979): one
// pass over memory, no cancellation.
#include <algorithm>
#include <cmath>
#include <vector>

#include <lockstep/tensor/cpu/norm_rows.h>
#include <lockstep/tensor/cpu/sum_rows.h>
#include <lockstep/tensor/ops/batch_norm.h>
#include <lockstep/tensor/parallel.h>

namespace lockstep {
namespace {

constexpr int64_t kRows = 64;         // of a block in cache
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

/// Count, mean and sum of squared deviations of some values.
struct Moments {
  double n = 0, mean = 0, m2 = 0;
  void combine(const Moments& o) {
    if (o.n == 0) return;
    const double delta = o.mean - mean, total = n + o.n;
    mean += delta * (o.n / total);
    m2 += o.m2 + delta * delta * (n * (o.n / total));
    n = total;
  }
};

/// The moments of values whose mean is known, with squares taken from that mean rounded to T.
template <class T>
Moments moments_of(double n, double sum, T centre, double squares) {
  const double mean = sum / n;
  return {n, mean, std::max(squares - n * (mean - centre) * (mean - centre), 0.0)};
}

template <class T>
void add_block(const T* x, int64_t rows, int64_t channels, T* buffer, Moments* moments) {
  T *sums = buffer, *centres = sums + channels, *squares = centres + channels;
  std::fill_n(sums, channels, T(0));
  std::fill_n(squares, channels, T(0));
  cpu::sum_rows<T>().add(x, channels, rows, channels, sums);
  const double n = static_cast<double>(rows);
  for (int64_t c = 0; c < channels; ++c) centres[c] = static_cast<T>(sums[c] / n);
  cpu::sum_rows<T>().add_squares(x, channels, rows, channels, centres, squares);
  for (int64_t c = 0; c < channels; ++c)
    moments[c].combine(moments_of(n, sums[c], centres[c], squares[c]));
}

template <class T>
void statistics_of(const Layout& l, const T* x, double* statistics) {
  std::vector<Moments> moments(static_cast<size_t>(l.channels));
  if (l.rows) {
    const int64_t per_task = l.rows_per_task(), tasks = (l.samples + per_task - 1) / per_task;
    std::vector<Moments> shares(static_cast<size_t>(tasks * l.channels));
    parallel_for(l.samples, per_task, [&](int64_t begin, int64_t end) {
      std::vector<T> buffer(static_cast<size_t>(3 * l.channels));
      for (int64_t i = begin; i < end; i += kRows)
        add_block(x + i * l.channels, std::min(kRows, end - i), l.channels, buffer.data(),
                  shares.data() + begin / per_task * l.channels);
    });
    for (size_t i = 0; i < shares.size(); ++i) moments[i % moments.size()].combine(shares[i]);
  } else {
    parallel_for(l.channels, l.channels_per_task(), [&](int64_t begin, int64_t end) {
      for (int64_t c = begin; c < end; ++c)
        for (int64_t i = 0; i < l.samples; ++i)
          for (int64_t at = 0; at < l.plane; at += kPiece) {
            const T* piece = x + (i * l.channels + c) * l.plane + at;
            const int64_t k = std::min(kPiece, l.plane - at);
            const double n = static_cast<double>(k);
            const double sum = cpu::sum_rows<T>().sum(piece, k);
            const T centre = static_cast<T>(sum / n);
            moments[static_cast<size_t>(c)].combine(
                moments_of(n, sum, centre, cpu::sum_rows<T>().squares(piece, centre, k)));
          }
    });
  }
  for (int64_t c = 0; c < l.channels; ++c) {
    const Moments& m = moments[static_cast<size_t>(c)];
    statistics[c] = m.mean;
    statistics[l.channels + c] = m.n > 0 ? m.m2 / m.n : 0;
  }
}

void statistics_cpu(const Tensor& statistics, const Tensor& x) {
  dispatch_floating("batch_norm", x.dtype(), [&]<class T>(TypeTag<T>) {
    statistics_of(Layout(x), x.data<T>(), statistics.data<double>());
  });
}

/// Calls row(first element, count) or plane(first element, count, channel) for pieces of the whole
/// batch.
template <class Row, class Plane>
void for_each_piece(const Layout& l, const Row& row, const Plane& plane) {
  if (l.samples * l.channels * l.plane == 0) return;
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

void batch_norm_cpu(const Tensor& y, const Tensor& x, const Tensor& statistics,
                    const Tensor& weight, const Tensor& bias, double eps) {
  const Layout l(x);
  dispatch_floating("batch_norm", x.dtype(), [&]<class T>(TypeTag<T>) {
    const double* kept = statistics.data<double>();
    std::vector<T> buffer(static_cast<size_t>(3 * l.channels));
    T *mean = buffer.data(), *scale = mean + l.channels, *shift = scale + l.channels;
    for (int64_t c = 0; c < l.channels; ++c) {
      const double factor = at_or<T>(weight, c, 1) / std::sqrt(kept[l.channels + c] + eps);
      mean[c] = static_cast<T>(kept[c]);
      scale[c] = static_cast<T>(factor);
      // What rounding took from the mean goes into the shift.
      shift[c] = static_cast<T>(at_or<T>(bias, c, 0) - (kept[c] - mean[c]) * factor);
    }
    const T* from = x.data<T>();
    T* to = y.data<T>();
    const auto& rows = cpu::norm_rows<T>();
    for_each_piece(
        l, [&](int64_t i) { rows.affine_row(from + i, mean, scale, shift, to + i, l.channels); },
        [&](int64_t i, int64_t c) {
          rows.affine_plane(from + i, mean[c], scale[c], shift[c], to + i, l.plane);
        });
  });
}

template <class T>
void sums_of(const Layout& l, const T* dy, const T* x, const double* statistics, double* sums) {
  std::vector<T> means(statistics, statistics + l.channels);
  std::fill_n(sums, 2 * l.channels, 0.0);
  if (l.rows) {
    const int64_t per_task = l.rows_per_task(), tasks = (l.samples + per_task - 1) / per_task;
    std::vector<double> shares(static_cast<size_t>(tasks * 2 * l.channels));
    parallel_for(l.samples, per_task, [&](int64_t begin, int64_t end) {
      double* share = shares.data() + begin / per_task * 2 * l.channels;
      std::vector<T> run(static_cast<size_t>(2 * l.channels));
      for (int64_t i = begin; i < end; i += kRows) {
        std::fill(run.begin(), run.end(), T(0));
        cpu::sum_rows<T>().add_products(dy + i * l.channels, x + i * l.channels, l.channels,
                                        std::min(kRows, end - i), l.channels, means.data(),
                                        run.data(), run.data() + l.channels);
        for (size_t c = 0; c < run.size(); ++c) share[c] += run[c];
      }
    });
    for (size_t i = 0; i < shares.size(); ++i)
      sums[i % static_cast<size_t>(2 * l.channels)] += shares[i];
  } else {
    parallel_for(l.channels, l.channels_per_task(), [&](int64_t begin, int64_t end) {
      for (int64_t c = begin; c < end; ++c)
        for (int64_t i = 0; i < l.samples; ++i)
          for (int64_t at = 0; at < l.plane; at += kPiece) {
            const int64_t first = (i * l.channels + c) * l.plane + at,
                          k = std::min(kPiece, l.plane - at);
            sums[c] += cpu::sum_rows<T>().sum(dy + first, k);
            sums[l.channels + c] += cpu::sum_rows<T>().products(dy + first, x + first,
                                                                means[static_cast<size_t>(c)], k);
          }
    });
  }
  // The products were taken from the rounded mean.
  for (int64_t c = 0; c < l.channels; ++c)
    sums[l.channels + c] += sums[c] * (means[static_cast<size_t>(c)] - statistics[c]);
}

void sums_cpu(const Tensor& sums, const Tensor& dy, const Tensor& x, const Tensor& statistics) {
  dispatch_floating("batch_norm", x.dtype(), [&]<class T>(TypeTag<T>) {
    sums_of(Layout(x), dy.data<T>(), x.data<T>(), statistics.data<double>(), sums.data<double>());
  });
}

void backward_cpu(const Tensor& dx, const Tensor& dy, const Tensor& x, const Tensor& statistics,
                  const Tensor& sums, const Tensor& weight, double count, double eps) {
  const Layout l(x);
  dispatch_floating("batch_norm", x.dtype(), [&]<class T>(TypeTag<T>) {
    const double *kept = statistics.data<double>(), *sum = sums.data<double>();
    std::vector<T> buffer(static_cast<size_t>(4 * l.channels));
    T *mean = buffer.data(), *scale = mean + l.channels, *a = scale + l.channels,
      *b = a + l.channels;
    for (int64_t c = 0; c < l.channels; ++c) {
      const double variance = kept[l.channels + c] + eps;
      mean[c] = static_cast<T>(kept[c]);
      scale[c] = static_cast<T>(at_or<T>(weight, c, 1) / std::sqrt(variance));
      b[c] = static_cast<T>(sum[l.channels + c] / variance / count);
      a[c] = static_cast<T>(sum[c] / count - (kept[c] - mean[c]) * b[c]);
    }
    const T *g = dy.data<T>(), *from = x.data<T>();
    T* to = dx.data<T>();
    const auto& rows = cpu::norm_rows<T>();
    for_each_piece(
        l,
        [&](int64_t i) {
          rows.affine_backward_row(g + i, from + i, mean, scale, a, b, to + i, l.channels);
        },
        [&](int64_t i, int64_t c) {
          rows.affine_backward_plane(g + i, from + i, mean[c], scale[c], a[c], b[c], to + i,
                                     l.plane);
        });
  });
}

}  // namespace

namespace kernels {
constinit Kernel<void(const Tensor&, const Tensor&)> batch_norm_statistics("batch_norm",
                                                                           statistics_cpu);
constinit Kernel<void(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                      double)>
    batch_norm("batch_norm", batch_norm_cpu);
constinit Kernel<void(const Tensor&, const Tensor&, const Tensor&, const Tensor&)> batch_norm_sums(
    "batch_norm", sums_cpu);
constinit Kernel<void(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                      const Tensor&, double, double)>
    batch_norm_backward("batch_norm", backward_cpu);
}  // namespace kernels

}  // namespace lockstep
