// What all calls of oneDNN share, for its major versions 2 and 3: the engine and a stream per thread, one
// way to make primitive descriptors, execution on the calling thread alone, and errors of our family.
#pragma once

#include <oneapi/dnnl/dnnl.hpp>

#include <lockstep/tensor/error.h>

// Weak, so that they are those of the OpenMP runtime that oneDNN was linked with, whichever that is, and
// null where oneDNN is sequential.
extern "C" {
[[gnu::weak]] int omp_get_max_threads() noexcept;
[[gnu::weak]] void omp_set_num_threads(int) noexcept;
}

namespace lockstep::cpu {

/// While it lives, oneDNN works on the calling thread alone; afterwards the thread's OpenMP setting is
/// what it was. Creating a primitive needs it as much as executing one: the number of threads is compiled in.
class SingleThreaded {
 public:
  SingleThreaded() { omp_set(1); }
  ~SingleThreaded() { omp_set(before_); }
  SingleThreaded(const SingleThreaded&) = delete;

 private:
  static void omp_set(int n) {
    if (omp_set_num_threads) omp_set_num_threads(n);
  }
  int before_ = omp_get_max_threads ? omp_get_max_threads() : 1;
};

/// f(), which calls oneDNN, single-threaded. Throws OutOfMemory or Error, named after `op`, for dnnl::error.
template <class F>
auto call_onednn(const char* op, F f) {
  const SingleThreaded scope;
  try {
    return f();
  } catch (const dnnl::error& e) {
    if (e.status == dnnl_out_of_memory) fail<OutOfMemory>(op, ": oneDNN: ", e.what());
    fail(op, ": oneDNN: ", e.what(), " (status ", static_cast<int>(e.status), ")");
  }
}

inline dnnl::engine& engine() {
  static dnnl::engine e(dnnl::engine::kind::cpu, 0);
  return e;
}
inline dnnl::stream& stream() {
  thread_local dnnl::stream s(engine());
  return s;
}

// Up to oneDNN 2 the arguments of a primitive went through an operation descriptor, P::desc.
template <class P, class... Args>
auto forward_desc(const Args&... args) {
  if constexpr (requires { typename P::desc; })
    return typename P::primitive_desc(typename P::desc(args...), engine());
  else
    return typename P::primitive_desc(engine(), args...);
}
template <class P, class Forward, class... Args>
auto backward_desc(const Forward& forward, const Args&... args) {
  if constexpr (requires { typename P::desc; })
    return typename P::primitive_desc(typename P::desc(args...), engine(), forward);
  else
    return typename P::primitive_desc(engine(), args..., forward);
}

}  // namespace lockstep::cpu
