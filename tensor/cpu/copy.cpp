// copy and fill on the CPU, for any two layouts and dtypes. What is dense moves as bytes; a transpose (also
// channels-last to row-major and back) in strips that read whole cache lines; the rest row by row.
#include <algorithm>
#include <cstring>

#include <lockstep/tensor/cpu/convert_rows.h>
#include <lockstep/tensor/cpu/loops.h>
#include <lockstep/tensor/element_cast.h>
#include <lockstep/tensor/ops/copy.h>
#include <lockstep/tensor/parallel.h>

namespace lockstep::cpu {
namespace {

constexpr int64_t kPiece = 32768;  // elements that one thread takes at a time

// ---- transposes ----

template <class T>
T read(const char* p) {
  T v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

/// A transpose within a plan: `inner` is dense in the result, dimension `across` is dense in the
/// source.
struct Strips {
  static constexpr int64_t kRows = 16;  // of 4 bytes: one cache line of the source
  const LoopPlan& plan;
  int across;

  /// Copies result rows [j, j + rows) of one matrix, `columns` long.
  template <int64_t kBytes>
  void strip(char* to, const char* from, int64_t rows) const {
    const int64_t columns = plan.sizes[0], to_row = plan.strides[0][across],
                  from_column = plan.strides[1][0];
    int64_t c = 0;
    if constexpr (kBytes == 4) {
      using V [[gnu::vector_size(16)]] = uint32_t;
      if (rows == kRows)
        for (; c + 4 <= columns; c += 4)
          for (int64_t j = 0; j < kRows; j += 4) {
            const char* in = from + c * from_column + j * 4;
            const V a = read<V>(in), b = read<V>(in + from_column),
                    e = read<V>(in + 2 * from_column), f = read<V>(in + 3 * from_column);
            const V ab0 = __builtin_shufflevector(a, b, 0, 4, 1, 5),
                    ab1 = __builtin_shufflevector(a, b, 2, 6, 3, 7);
            const V ef0 = __builtin_shufflevector(e, f, 0, 4, 1, 5),
                    ef1 = __builtin_shufflevector(e, f, 2, 6, 3, 7);
            const V out[] = {__builtin_shufflevector(ab0, ef0, 0, 1, 4, 5),
                             __builtin_shufflevector(ab0, ef0, 2, 3, 6, 7),
                             __builtin_shufflevector(ab1, ef1, 0, 1, 4, 5),
                             __builtin_shufflevector(ab1, ef1, 2, 3, 6, 7)};
            for (int k = 0; k < 4; ++k) std::memcpy(to + (j + k) * to_row + c * 4, &out[k], 16);
          }
    }
    for (; c < columns; ++c)
      for (int64_t j = 0; j < rows; ++j)
        std::memcpy(to + j * to_row + c * kBytes, from + c * from_column + j * kBytes, kBytes);
  }

  template <int64_t kBytes>
  void run() const {
    const int64_t rows = plan.sizes[across], strips = (rows + kRows - 1) / kRows;
    const int64_t total = plan.numel() / (plan.sizes[0] * rows) * strips;
    auto work = [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t j = i % strips * kRows;
        char* to = plan.data[0] + j * plan.strides[0][across];
        const char* from = plan.data[1] + j * plan.strides[1][across];
        for (int64_t rest = i / strips, d = 1; d < plan.dims; ++d) {
          if (d == across) continue;
          to += rest % plan.sizes[d] * plan.strides[0][d];
          from += rest % plan.sizes[d] * plan.strides[1][d];
          rest /= plan.sizes[d];
        }
        strip<kBytes>(to, from, std::min(kRows, rows - j));
      }
    };
    if (plan.numel() <= kPiece)
      work(0, total);
    else
      parallel_for(total, std::max<int64_t>(1, kPiece / (kRows * plan.sizes[0])), work);
  }
};

/// The dimension along which the source is dense while the result is not, or 0.
int transposed_dim(const LoopPlan& plan, int64_t bytes) {
  if (plan.strides[0][0] != bytes || plan.strides[1][0] == bytes || plan.strides[1][0] == 0)
    return 0;
  for (int d = 1; d < plan.dims; ++d)
    if (plan.strides[1][d] == bytes && plan.sizes[d] >= 4) return d;
  return 0;
}

// ---- rows ----

template <class To, class From>
void convert_row(void*, char* const* data, const int64_t* strides, int64_t n, int64_t) {
  if (strides[0] == sizeof(To) && strides[1] == sizeof(From)) {
    To* to = reinterpret_cast<To*>(data[0]);
    const From* from = reinterpret_cast<const From*>(data[1]);
    if constexpr (requires { cpu::convert_rows()(from, to, n); })
      cpu::convert_rows()(from, to, n);
    else
      for (int64_t i = 0; i < n; ++i) to[i] = cast_element<To>(from[i]);
  } else {
    for (int64_t i = 0; i < n; ++i)
      *reinterpret_cast<To*>(data[0] + i * strides[0]) =
          cast_element<To>(*reinterpret_cast<const From*>(data[1] + i * strides[1]));
  }
}

template <int64_t kBytes>
void move_row(void*, char* const* data, const int64_t* strides, int64_t n, int64_t) {
  char *to = data[0], *from = data[1];
  const int64_t step = strides[1];
  if (strides[0] == kBytes && step == kBytes) {
    std::memcpy(to, from, static_cast<size_t>(n * kBytes));
  } else if (strides[0] == kBytes) {
    for (int64_t i = 0; i < n; ++i) std::memcpy(to + i * kBytes, from + i * step, kBytes);
  } else {
    for (int64_t i = 0; i < n; ++i) std::memcpy(to + i * strides[0], from + i * step, kBytes);
  }
}

template <int64_t kBytes>
void move(const LoopPlan& plan) {
  if (const int across = transposed_dim(plan, kBytes))
    Strips{plan, across}.run<kBytes>();
  else
    plan.run(nullptr, move_row<kBytes>);
}

void move_dense(char* to, const char* from, int64_t bytes) {
  constexpr int64_t piece = kPiece * 8;
  if (bytes <= piece) {
    std::memcpy(to, from, static_cast<size_t>(bytes));
    return;
  }
  parallel_for(bytes, piece, [&](int64_t begin, int64_t end) {
    std::memcpy(to + begin, from + begin, static_cast<size_t>(end - begin));
  });
}

void copy_cpu(const Tensor& dst, const Tensor& src) {
  if (dst.numel() == 0) return;
  if (dst.dtype() != src.dtype()) {
    const LoopPlan plan = LoopPlan::make(Operands(dst, src));
    dispatch_any(dst.dtype(), [&]<class To>(TypeTag<To>) {
      dispatch_any(src.dtype(),
                   [&]<class From>(TypeTag<From>) { plan.run(nullptr, convert_row<To, From>); });
    });
    return;
  }
  const int64_t bytes = static_cast<int64_t>(size_of(dst.dtype()));
  const bool dense =
      dst.shape() == src.shape() && ((dst.is_contiguous() && src.is_contiguous()) ||
                                     (dst.is_channels_last() && src.is_channels_last()));
  if (dense)
    return move_dense(static_cast<char*>(dst.data_ptr()), static_cast<const char*>(src.data_ptr()),
                      dst.numel() * bytes);
  const LoopPlan plan = LoopPlan::make(Operands(dst, src));
  switch (bytes) {
    case 1:
      return move<1>(plan);
    case 2:
      return move<2>(plan);
    case 4:
      return move<4>(plan);
    default:
      return move<8>(plan);
  }
}

void fill_cpu(const Tensor& t, Number value) {
  if (t.numel() == 0) return;
  dispatch_any(t.dtype(), [&]<class T>(TypeTag<T>) {
    T v = value.is_whole ? cast_element<T>(value.whole) : cast_element<T>(value.value);
    if (t.is_contiguous() && t.numel() <= kPiece) {
      std::fill_n(t.data<T>(), t.numel(), v);
      return;
    }
    LoopPlan::make(Operands(t)).run(
        &v, [](void* context, char* const* data, const int64_t* strides, int64_t n, int64_t) {
          const T v = *static_cast<const T*>(context);
          if (strides[0] == sizeof(T))
            std::fill_n(reinterpret_cast<T*>(data[0]), n, v);
          else
            for (int64_t i = 0; i < n; ++i) *reinterpret_cast<T*>(data[0] + i * strides[0]) = v;
        });
  });
}

void arange_cpu(const Tensor& t, int64_t start, int64_t step) {
  dispatch_any(t.dtype(), [&]<class T>(TypeTag<T>) {
    // In unsigned arithmetic, which wraps around instead of overflowing after the last.
    for (int64_t i = 0; i < t.numel(); ++i)
      t.data<T>()[i] = cast_element<T>(static_cast<int64_t>(
          static_cast<uint64_t>(start) + static_cast<uint64_t>(i) * static_cast<uint64_t>(step)));
  });
}
// Between the CPU and itself, for whoever transfers without asking where.
void upload_cpu(const Tensor& dst, const OnHost& src) { copy_cpu(dst, src.tensor); }
void download_cpu(const OnHost& dst, const Tensor& src) { copy_cpu(dst.tensor, src); }

const bool entered = kernels::copy.set(DeviceType::cpu, copy_cpu, dtypes::kAll) &&
                     kernels::fill.set(DeviceType::cpu, fill_cpu, dtypes::kAll) &&
                     kernels::arange.set(DeviceType::cpu, arange_cpu, dtypes::kAll) &&
                     kernels::upload.set(DeviceType::cpu, upload_cpu, dtypes::kAll) &&
                     kernels::download.set(DeviceType::cpu, download_cpu, dtypes::kAll);

}  // namespace
}  // namespace lockstep::cpu
