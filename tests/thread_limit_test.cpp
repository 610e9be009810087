// parallel_for where the system starts no more threads. This program's own pthread_create stands before
// the system's and can refuse.
#include <doctest/doctest.h>

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <cerrno>
#include <set>
#include <thread>
#include <vector>

#include <lockstep/tensor/parallel.h>

using namespace lockstep;

namespace {
std::atomic<int> allowed{0};  // threads that may still be started
}

extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes,
                              void* (*f)(void*), void* argument) {
  if (allowed-- <= 0) return EAGAIN;
  static const auto next =
      reinterpret_cast<decltype(&pthread_create)>(dlsym(RTLD_NEXT, "pthread_create"));
  return next(thread, attributes, f, argument);
}

TEST_CASE("parallel_for goes on with the threads that there are") {
  CHECK_THROWS_AS(std::thread([] {}), std::system_error);  // pthread_create is ours
  set_num_threads(4);
  for (const int may_start : {0, 1, 8}) {
    CAPTURE(may_start);
    allowed = may_start;
    for (int round = 0; round < 20; ++round) {
      std::vector<std::atomic<int>> seen(100);
      parallel_for(100, 1, [&](int64_t begin, int64_t) { ++seen[static_cast<size_t>(begin)]; });
      CHECK(std::multiset<int>(seen.begin(), seen.end()).count(1) == 100);
    }
  }
  CHECK(allowed == 8 - 2);  // a pool of three, one of them started before
}
