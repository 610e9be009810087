// Sums over blocks of long products, batches and columns: short runs in the element's own type,
// their results in f64, in an order that depends on the number of blocks alone.
#pragma once

#include <algorithm>
#include <cstdint>

#include <lockstep/tensor/parallel.h>
#include <lockstep/tensor/tensor.h>

namespace lockstep::cpu {

/// out[0 .. count) = the sum over blocks b of what f(b, partial) writes to partial[0 .. count). The
/// blocks run in at most `most_chunks` chunks, side by side; the sums of the chunks are added in order.
template <class T, class F>
void sum_blocks(int64_t blocks, int64_t count, T* out, const F& f, int64_t most_chunks = 8) {
  if (blocks == 0) return void(std::fill_n(out, count, T(0)));
  if (blocks == 1) return f(int64_t{0}, out);
  const int64_t per_chunk = (blocks + most_chunks - 1) / most_chunks;
  const int64_t chunks = (blocks + per_chunk - 1) / per_chunk;
  const Tensor totals = empty({chunks, count}, {.dtype = DType::f64});
  parallel_for(blocks, per_chunk, [&](int64_t begin, int64_t end) {
    const Tensor partial = empty({count}, {.dtype = dtype_of<T>()});
    double* total = totals.data<double>() + begin / per_chunk * count;
    std::fill_n(total, count, 0.0);
    for (int64_t b = begin; b < end; ++b) {
      f(b, partial.data<T>());
      const T* part = partial.data<T>();
      for (int64_t i = 0; i < count; ++i) total[i] += part[i];
    }
  });
  parallel_for(count, 1 << 14, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      double sum = 0;
      for (int64_t c = 0; c < chunks; ++c) sum += totals.data<double>()[c * count + i];
      out[i] = static_cast<T>(sum);
    }
  });
}

}  // namespace lockstep::cpu
