// Loader when something fails: exceptions of the user's code, and fork in the middle of a pass.
#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>

#include <lockstep/tensor/warning.h>

#include "loader_helpers.h"

using namespace loader_helpers;

TEST_CASE("Loader: an error in a worker reaches the loop in its turn, and every thread is gone") {
  const int before = thread_count();
  for (int workers : {0, 1, 3}) {
    CAPTURE(workers);
    data::Loader loader{
        Probe{40,
              [](int64_t i) { LOCKSTEP_CHECK(i != 22, IndexError, "sample ", i, " is broken"); }},
        {.batch_size = 4, .workers = workers}};
    int64_t batches = 0;
    std::string text;
    auto epoch = loader.epoch(0);  // outlives the error: the threads must not
    try {
      for (Tensor x : epoch) batches += x.size(0) / 4;
    } catch (const IndexError& e) {
      text = e.what();
      CHECK(threads_are_gone(before));
    }
    CHECK(batches == 5);
    CHECK(text.find("sample 22 is broken") == 0);
    CHECK(text.find("in Loader: batch 5 of epoch 0, samples 20, 21, 22, 23, of") !=
          std::string::npos);
    CHECK(loader.state() == data::LoaderState{0, 20});
  }
}

TEST_CASE(
    "Loader: exceptions of every type reach the loop, with the sample where they have a text") {
  struct Own : std::runtime_error {
    using runtime_error::runtime_error;
  };
  const int before = thread_count();
  std::mutex mutex;
  std::vector<std::string> warnings;
  set_warning_handler([&](const std::string& text) {
    const std::lock_guard lock(mutex);
    warnings.push_back(text);
  });
  for (int workers : {0, 2}) {
    warnings.clear();
    const auto begin = [&](std::function<void(int64_t)> at) {
      data::Loader loader{Probe{8, std::move(at)}, {.batch_size = 4, .workers = workers}};
      loader.epoch(0).begin();
    };
    CHECK_THROWS_AS(begin([](int64_t) { throw 42; }), int);
    CHECK_THROWS_WITH_AS(
        begin([](int64_t i) {
          if (i == 2) throw std::runtime_error("bad file 7");
        }),
        doctest::Contains("bad file 7\n  in get of sample 2\n  in Loader: batch 0 of "
                          "epoch 0, samples 0, 1, 2, 3, of "
                          "loader_helpers::Probe"),
        std::runtime_error);
    CHECK_THROWS_WITH_AS(begin([](int64_t) { (void)std::vector<int>().at(3); }),
                         doctest::Contains("in get of sample 0"), std::out_of_range);
    CHECK_THROWS_WITH_AS(begin([](int64_t) { throw Own("as it is"); }), "as it is", Own);
    CHECK_THROWS_AS(begin([](int64_t) { throw std::bad_alloc(); }), std::bad_alloc);
    CHECK(threads_are_gone(before));
    // what has no text that could be added to is named in warnings
    const auto warned = [&](const std::string& text) {
      return std::any_of(warnings.begin(), warnings.end(),
                         [&](const std::string& w) { return w.find(text) != std::string::npos; });
    };
    CHECK(warned("in get of sample 0: an exception of type int was thrown"));
    CHECK(
        warned("in Loader: batch 0 of epoch 0, samples 0, 1, 2, 3, of "
                          "loader_helpers::Probe: an exception of type int was thrown"));
    CHECK(warned("Own was thrown: as it is"));
    CHECK(!warned("bad file 7"));
  }
  set_warning_handler({});
}

TEST_CASE("Loader: after an exception the pass says that it is over, and the next goes on there") {
  for (int workers : {0, 1, 3}) {
    CAPTURE(workers);
    bool broken = true;
    data::Loader loader{Probe{20,
                              [&](int64_t i) {
                                if (broken && i == 9) throw 1;
                              }},
                        {.batch_size = 4, .workers = workers}};
    auto epoch = loader.epoch(0);
    auto it = epoch.begin();
    ++it;
    CHECK_THROWS_AS(++it, int);
    for (int i = 0; i < 2; ++i)
      CHECK_THROWS_WITH_AS(++it, doctest::Contains("this pass ended with an error"), Error);
    CHECK(loader.state() == data::LoaderState{0, 8});
    broken = false;
    loader.resume(loader.state());
    std::vector<int64_t> rest;
    for (Tensor x : loader.epoch(0))
      for (int64_t v : x.to_vector<int64_t>()) rest.push_back(v);
    CHECK(rest == std::vector<int64_t>{8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19});
  }
}

TEST_CASE("Loader: a sampler that throws names the epoch and costs neither loader nor resume()") {
  bool broken = false;
  data::Loader loader{numbers(6), {.batch_size = 2, .sampler = [&](int64_t) {
                                     if (broken) throw std::runtime_error("no list");
                                     return std::vector<int64_t>{5, 4, 3, 2, 1, 0};
                                   }}};
  loader.resume({.epoch = 2, .samples = 4});
  broken = true;
  CHECK_THROWS_WITH_AS(loader.epoch(2), "no list\n  in Loader: the sampler, for epoch 2",
                       std::runtime_error);
  CHECK_THROWS_AS(loader.resume({.epoch = 1, .samples = 2}), std::runtime_error);
  CHECK(loader.state() == data::LoaderState{2, 4});
  broken = false;
  { auto unused = loader.epoch(2); }  // has no loop, so the position stays
  CHECK(collect(loader, 2) == Batches{{1, 0}});
  CHECK(collect(loader, 2) == Batches{{5, 4}, {3, 2}, {1, 0}});
}

TEST_CASE(
    "Loader after fork, as processes: the parent's pass is an error, a pass of its own is not") {
  data::Loader loader{numbers(40), {.batch_size = 4, .workers = 2}};
  auto pass = loader.epoch(0);
  auto it = pass.begin();
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(60);
    int failed = 0;
    try {
      ++it;
      failed = 1;
    } catch (const Error& e) {
      failed = std::string(e.what()).find("threads of the parent") == std::string::npos ? 2 : 0;
    }
    if (collect(loader, 1).size() != 10) failed = 3;
    { const auto ended = std::move(pass); }
    ::_exit(failed);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(status == 0);
  int64_t batches = 1;
  for (++it; it != pass.end(); ++it) ++batches;
  CHECK(batches == 10);
}
