// How ops call oneDNN: on one thread, without a trace on the caller's OpenMP settings, with errors of
// our family. This program's own oneDNN functions stand before the library's: they look on, or fail.
#include <doctest/doctest.h>

#include <dlfcn.h>
#include <omp.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <thread>

#include <oneapi/dnnl/dnnl.h>

#include <lockstep/tensor/ops/conv2d.h>
#include <lockstep/tensor/ops/elementwise.h>
#include <lockstep/tensor/ops/matmul.h>
#include <lockstep/tensor/ops/reduce.h>
#include <lockstep/tensor/parallel.h>
#include <lockstep/tensor/random.h>

using namespace lockstep;
using doctest::Contains;

namespace {

std::atomic<int> created{0}, executed{0}, products{0};
std::atomic<int> most_threads{0};  // that OpenMP offered to any of them
std::atomic<dnnl_status_t> create_fails{dnnl_success}, execute_fails{dnnl_success};

void seen(std::atomic<int>& calls) {
  ++calls;
  most_threads = std::max(most_threads.load(), omp_get_max_threads());
}

/// The next function of this name: oneDNN's own.
template <class F>
F* next(F*, const char* name) {
  return reinterpret_cast<F*>(dlsym(RTLD_NEXT, name));
}

}  // namespace

extern "C" dnnl_status_t dnnl_primitive_create(dnnl_primitive_t* primitive,
                                               const_dnnl_primitive_desc_t desc) {
  seen(created);
  if (create_fails != dnnl_success) return create_fails;
  return next(dnnl_primitive_create, "dnnl_primitive_create")(primitive, desc);
}
extern "C" dnnl_status_t dnnl_primitive_execute(const_dnnl_primitive_t primitive,
                                                dnnl_stream_t stream, int count,
                                                const dnnl_exec_arg_t* arguments) {
  seen(executed);
  if (execute_fails != dnnl_success) return execute_fails;
  return next(dnnl_primitive_execute, "dnnl_primitive_execute")(primitive, stream, count,
                                                                arguments);
}
extern "C" dnnl_status_t dnnl_sgemm(char ta, char tb, dnnl_dim_t m, dnnl_dim_t n, dnnl_dim_t k,
                                    float alpha, const float* a, dnnl_dim_t lda, const float* b,
                                    dnnl_dim_t ldb, float beta, float* c, dnnl_dim_t ldc) {
  seen(products);
  return next(dnnl_sgemm, "dnnl_sgemm")(ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

namespace {

/// Sets OpenMP's and our number of threads for a scope.
struct Threads {
  int omp = omp_get_max_threads(), ours = get_num_threads();
  Threads(int omp_threads, int our_threads) {
    omp_set_num_threads(omp_threads);
    set_num_threads(our_threads);
    most_threads = 0;
  }
  ~Threads() {
    omp_set_num_threads(omp);
    set_num_threads(ours);
  }
};

/// The size of the team that the user's own parallel region gets.
int team() {
  int size = 0;
#pragma omp parallel
  {
#pragma omp single
    size = omp_get_num_threads();
  }
  return size;
}

int64_t threads_of_process() {
  const std::filesystem::directory_iterator tasks("/proc/self/task");
  return std::distance(begin(tasks), end(tasks));
}

Tensor image(int64_t size) {
  return arange(0, 4 * 3 * size * size).view({4, 3, size, size}).to(DType::f32);
}
Tensor filter() { return (arange(0, 16 * 3 * 9).to(DType::f32) * 0.01).view({16, 3, 3, 3}); }

bool same_bits(const Tensor& a, const Tensor& b) {
  return a.shape() == b.shape() && std::memcmp(a.contiguous().data_ptr(), b.contiguous().data_ptr(),
                                               static_cast<size_t>(a.numel()) * 4) == 0;
}

}  // namespace

TEST_CASE("conv2d and matmul call oneDNN single-threaded and leave OpenMP as they found it") {
  for (const int ours : {1, 3}) {
    CAPTURE(ours);
    const Threads scope(4, ours);
    created = executed = products = 0;
    const Tensor x = image(10 + ours).requires_grad_(), w = filter().requires_grad_(),
                 b = ones({16}).requires_grad_();
    conv2d(x, w, b).sum().backward();
    matmul(ones({300, 70}), ones({70, 90}));
    CHECK(created > 0);
    CHECK(executed > 0);
    CHECK(products > 0);
    CHECK(most_threads == 1);
    CHECK(omp_get_max_threads() == 4);
    CHECK(team() == 4);
  }
}

TEST_CASE(
    "conv2d as a thread's first op starts no threads of OpenMP, with the bits of any other "
    "thread") {
  const Threads scope(4, 1);
  const Tensor x = image(14), w = filter(), here = conv2d(x, w);
  Tensor there;
  int64_t before = 0, after = 0;
  int team_there = 0;
  std::thread([&] {
    omp_set_num_threads(4);
    set_num_threads(1);
    before = threads_of_process();
    there = conv2d(x, w);
    after = threads_of_process();
    team_there = team();
  }).join();
  CHECK(same_bits(there, here));
  CHECK(after == before);
  CHECK(team_there == 4);
}

TEST_CASE("conv2d inside the user's own parallel region") {
  const Threads scope(2, 1);
  const Tensor x = image(12), w = filter(), alone = conv2d(x, w);
  Tensor results[2];
#pragma omp parallel num_threads(2)
  results[omp_get_thread_num()] = conv2d(x, w);
  CHECK(omp_get_max_threads() == 2);
  for (const Tensor& t : results)
    if (t.defined()) CHECK(same_bits(t, alone));  // the second is not promised
}

TEST_CASE("conv2d: a failure of oneDNN is an Error, and the next call works") {
  const Threads scope(4, 2);
  const Tensor x = image(15), w = filter();
  create_fails = dnnl_out_of_memory;  // a shape not seen before has to be compiled
  CHECK_THROWS_WITH_AS(conv2d(x, w), Contains("conv2d: oneDNN"), OutOfMemory);
  create_fails = dnnl_runtime_error;
  CHECK_THROWS_WITH_AS(conv2d(x, w), Contains("conv2d: oneDNN"), Error);
  create_fails = dnnl_success;
  execute_fails = dnnl_runtime_error;
  CHECK_THROWS_WITH_AS(conv2d(x, w), Contains("status"), Error);
  CHECK(omp_get_max_threads() == 4);
  execute_fails = dnnl_success;
  CHECK(conv2d(x, w).defined());
}
