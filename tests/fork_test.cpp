// A process that forks after it has computed: the child computes as well, on several threads, and
// ends in any way; the parent and its other threads notice nothing.
#include <doctest/doctest.h>

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <thread>

#include <lockstep/nn/nn.h>
#include <lockstep/tensor/ops.h>
#include <lockstep/tensor/parallel.h>

using namespace lockstep;

namespace {

/// Two threads for a scope.
struct TwoThreads {
  int before = get_num_threads();
  TwoThreads() { set_num_threads(2); }
  ~TwoThreads() { set_num_threads(before); }
};

/// Work of each kind that the library has threads, caches or locks for.
double compute() {
  const Tensor x = (arange(0, 200000).to(DType::f32) * 1e-5).requires_grad_();
  exp(x).sum().backward();
  const Tensor product = matmul(ones({300, 70}), ones({70, 90}));
  const Tensor image = conv2d(ones({8, 2, 9, 9}), ones({3, 2, 3, 3}));
  return x.grad().sum().item<double>() + product.sum().item<double>() + image.sum().item<double>();
}

/// The status of a child that runs f and then ends; one that has not ended after a minute is killed.
int status_of_child(const std::function<void()>& f) {
  std::fflush(nullptr);
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    f();
    _exit(99);  // f should have ended the process
  }
  int status = 0;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  while (waitpid(child, &status, WNOHANG) == 0) {
    if (std::chrono::steady_clock::now() > deadline) {
      kill(child, SIGKILL);
      waitpid(child, &status, 0);
      FAIL("the child hangs");
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return status;
}

}  // namespace

TEST_CASE("fork: a child computes and ends by exit, _exit or a signal") {
  const TwoThreads scope;
  const double here = compute();
  CHECK(status_of_child([&] { std::exit(compute() == here ? 0 : 1); }) == 0);
  CHECK(status_of_child([&] { _exit(compute() == here ? 0 : 1); }) == 0);
  CHECK(status_of_child([] { std::exit(0); }) == 0);
  const int killed = status_of_child([&] {
    compute();
    raise(SIGKILL);
  });
  CHECK(WIFSIGNALED(killed));
  CHECK(compute() == here);
}

TEST_CASE("fork: a child's child computes too") {
  const TwoThreads scope;
  const double here = compute();
  const int status = status_of_child([&] {
    if (compute() != here) std::exit(1);
    const int inner = status_of_child([&] { std::exit(compute() == here ? 0 : 1); });
    std::exit(inner == 0 && compute() == here ? 0 : 2);
  });
  CHECK(status == 0);
}

TEST_CASE("fork: from a thread, while other threads allocate and compute") {
  const TwoThreads scope;
  const double here = compute();
  std::atomic<bool> done{false};
  std::atomic<int> wrong{0};
  std::vector<std::thread> busy;
  for (int t = 0; t < 2; ++t)
    busy.emplace_back([&] {
      set_num_threads(2);
      while (!done) wrong += compute() != here;
    });
  int failed = 0;
  std::thread([&] {
    set_num_threads(2);
    for (int i = 0; i < 15; ++i)
      failed += status_of_child([&] { std::exit(compute() == here ? 0 : 1); }) != 0;
  }).join();
  done = true;
  for (std::thread& t : busy) t.join();
  CHECK(failed == 0);
  CHECK(wrong == 0);
}
