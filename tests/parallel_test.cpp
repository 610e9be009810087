// parallel_for: each index once, whoever calls and however it ends.
#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <filesystem>
#include <mutex>
#include <set>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include <lockstep/tensor/quota.h>
#include <lockstep/tensor/error.h>
#include <lockstep/tensor/parallel.h>

#include "temporary_folder.h"

using namespace lockstep;

namespace {

/// Sets the number of threads for a scope.
struct Threads {
  int before = get_num_threads();
  explicit Threads(int n) { set_num_threads(n); }
  ~Threads() { set_num_threads(before); }
};

/// How often each of n indices was visited.
std::vector<int> visits(int64_t n, int64_t block) {
  std::vector<std::atomic<int>> seen(static_cast<size_t>(n));
  parallel_for(n, block, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) ++seen[static_cast<size_t>(i)];
  });
  return {seen.begin(), seen.end()};
}

}  // namespace

TEST_CASE("parallel_for: each index is visited once, for any count, block and number of threads") {
  for (int threads : {1, 2, 3, 8}) {
    const Threads scope(threads);
    for (int64_t n : {1, 2, 7, 64, 1000})
      for (int64_t block : {1, 3, 64, 5000}) {
        INFO(threads << " threads, " << n << " in blocks of " << block);
        CHECK(visits(n, block) == std::vector<int>(static_cast<size_t>(n), 1));
      }
  }
}

TEST_CASE("parallel_for: nothing is called for an empty range") {
  const Threads scope(3);
  int calls = 0;
  parallel_for(0, 4, [&](int64_t, int64_t) { ++calls; });
  parallel_for(-5, 4, [&](int64_t, int64_t) { ++calls; });
  CHECK(calls == 0);
}

TEST_CASE("parallel_for: blocks have the same bounds for any number of threads") {
  std::vector<std::set<std::pair<int64_t, int64_t>>> all;
  for (int threads : {1, 2, 5}) {
    const Threads scope(threads);
    std::mutex mutex;
    std::set<std::pair<int64_t, int64_t>> bounds;
    parallel_for(10, 4, [&](int64_t begin, int64_t end) {
      std::lock_guard lock(mutex);
      bounds.emplace(begin, end);
    });
    all.push_back(bounds);
  }
  CHECK(all[0] == std::set<std::pair<int64_t, int64_t>>{{0, 4}, {4, 8}, {8, 10}});
  CHECK(all[1] == all[0]);
  CHECK(all[2] == all[0]);
}

TEST_CASE("parallel_for: several threads do take part, and no more than allowed") {
  using Ids = std::set<std::thread::id>;
  const auto run = [](int threads) {
    const Threads scope(threads);
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    std::mutex mutex;
    Ids ids;
    parallel_for(60, 1, [&](int64_t, int64_t) {
      for (bool alone = true; alone && std::chrono::steady_clock::now() < deadline;) {
        std::lock_guard lock(mutex);
        ids.insert(std::this_thread::get_id());
        alone = threads > 1 && ids.size() == 1;  // waits for the others to come
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    });
    return ids;
  };
  CHECK(run(1) == Ids{std::this_thread::get_id()});
  for (int round = 0; round < 3; ++round) {
    const Ids ids = run(3);
    CHECK(ids.size() >= 2);
    CHECK(ids.size() <= 3);
  }
}

TEST_CASE("parallel_for: an exception in one block reaches the caller, and the pool works on") {
  for (int threads : {1, 4}) {
    const Threads scope(threads);
    for (int round = 0; round < 20; ++round) {
      std::atomic<int> running{0};
      const auto f = [&](int64_t begin, int64_t) {
        ++running;
        if (begin == round) {
          --running;
          throw ShapeError("block " + std::to_string(round));
        }
        std::this_thread::yield();
        --running;
      };
      CHECK_THROWS_WITH_AS(parallel_for(40, 1, f), ("block " + std::to_string(round)).c_str(),
                           ShapeError);
      CHECK(running == 0);  // nobody is still inside
    }
    CHECK(visits(100, 1) == std::vector<int>(100, 1));
  }
}

TEST_CASE("parallel_for: of many exceptions one reaches the caller") {
  const Threads scope(4);
  CHECK_THROWS_AS(parallel_for(50, 1, [](int64_t, int64_t) { throw std::runtime_error("each"); }),
                  std::runtime_error);
}

TEST_CASE("parallel_for: inside a block it runs on the calling thread alone") {
  const Threads scope(4);
  std::atomic<int> strangers{0}, inner{0};
  parallel_for(8, 1, [&](int64_t, int64_t) {
    const auto me = std::this_thread::get_id();
    parallel_for(16, 1, [&](int64_t, int64_t) {
      ++inner;
      if (std::this_thread::get_id() != me) ++strangers;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));  // time for others to come
    });
  });
  CHECK(inner == 8 * 16);
  CHECK(strangers == 0);
  CHECK_THROWS_AS(
      parallel_for(8, 1,
                   [](int64_t, int64_t) {
                     parallel_for(8, 1, [](int64_t, int64_t) { throw std::runtime_error("deep"); });
                   }),
      std::runtime_error);
  CHECK(visits(100, 1) == std::vector<int>(100, 1));
}

TEST_CASE("parallel_for: callers on several threads share the pool without mixing up their work") {
  std::vector<std::thread> callers;
  std::atomic<int> wrong{0};
  for (int c = 0; c < 6; ++c)
    callers.emplace_back([&, c] {
      set_num_threads(1 + c % 4);
      for (int round = 0; round < 100; ++round) {
        const int64_t n = 1 + (c * 37 + round) % 90;
        if (visits(n, 1 + round % 3) != std::vector<int>(static_cast<size_t>(n), 1)) ++wrong;
      }
    });
  for (std::thread& t : callers) t.join();
  CHECK(wrong == 0);
}

TEST_CASE("parallel_for: one caller's slow work does not hold up another's") {
  std::atomic<bool> release{false}, started{false};
  std::thread slow([&] {
    set_num_threads(3);
    parallel_for(3, 1, [&](int64_t, int64_t) {
      started = true;
      while (!release) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    });
  });
  while (!started) std::this_thread::yield();
  {
    const Threads scope(3);
    CHECK(visits(100, 1) == std::vector<int>(100, 1));  // would never return otherwise
  }
  release = true;
  slow.join();
}

TEST_CASE("set_num_threads: the number of threads is each thread's own, and at least one") {
  const Threads scope(3);
  CHECK(get_num_threads() == 3);
  int there = 0;
  std::thread([&] {
    set_num_threads(7);
    there = get_num_threads();
  }).join();
  CHECK(there == 7);
  CHECK(get_num_threads() == 3);
  CHECK_THROWS_AS(set_num_threads(0), ValueError);
  CHECK_THROWS_AS(set_num_threads(-2), ValueError);
  CHECK(get_num_threads() == 3);
}

TEST_CASE("quota: the smallest of a control group and its ancestors, rounded up") {
  const TemporaryFolder system;
  const auto quota = [&](const std::string& membership) {
    put_file(system / "membership", membership);
    return detail::cpu_quota(system / "membership", system.path());
  };
  const auto limit = [&](const std::string& file, const std::string& text) {
    std::filesystem::create_directories(std::filesystem::path(system / file).parent_path());
    put_file(system / file, text + "\n");
  };
  const std::string two = "0::/service/job\n";
  CHECK(quota(two) == INT_MAX);  // no files at all
  limit("service/job/cpu.max", "max 100000");
  CHECK(quota(two) == INT_MAX);
  limit("service/job/cpu.max", "400000 100000");
  CHECK(quota(two) == 4);
  limit("service/cpu.max", "250000 100000");
  CHECK(quota(two) == 3);
  CHECK(quota("0::/service\n") == 3);
  CHECK(quota("0::/elsewhere\n") == INT_MAX);
  limit("cpu.max", "1000 100000");  // as a container sees its own
  CHECK(quota(two) == 1);
  CHECK(quota("0::/\n") == 1);
  CHECK(quota("0::/../other\n") == 1);
  limit("cpu.max", "100000 0");
  CHECK(quota("0::/\n") == INT_MAX);
  limit("cpu.max", "9223372036854775807 1");
  CHECK(quota("0::/\n") == INT_MAX);

  // version 1, alone and beside version 2
  limit("cpu/docker/a1/cpu.cfs_quota_us", "150000");
  limit("cpu/docker/a1/cpu.cfs_period_us", "50000");
  CHECK(quota("5:memory:/docker/a1\n4:cpu,cpuacct:/docker/a1\n0::/\n") == 3);
  CHECK(quota("3:cpuset:/docker/a1\n2:cpuacct:/docker/a1\n") == INT_MAX);
  limit("cpu/docker/a1/cpu.cfs_quota_us", "-1");
  CHECK(quota("4:cpuacct,cpu:/docker/a1\n") == INT_MAX);
  CHECK(quota("no group\n:\n0::\n") == INT_MAX);
  CHECK(detail::cpu_quota(system / "absent", system.path()) == INT_MAX);
}
