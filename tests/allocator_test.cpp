// The caching allocator, seen through tensors: alignment, reuse, statistics, threads and the end of
// memory.
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include <lockstep/tensor/device_backend.h>
#include <lockstep/tensor/tensor.h>

using namespace lockstep;
using doctest::Contains;

// Sanitizers abort at absurd sizes unless told to answer as the system does.
extern "C" const char* __asan_default_options() { return "allocator_may_return_null=1"; }
extern "C" const char* __tsan_default_options() { return "allocator_may_return_null=1"; }

namespace {

constexpr int64_t kLarge = 1 << 20;
Tensor bytes(int64_t n) { return empty({n}, {.dtype = DType::u8}); }

}  // namespace

TEST_CASE("every block is aligned to 64 bytes and can be written to its end") {
  std::vector<Tensor> kept;
  for (int64_t n : {0, 1, 63, 64, 65, 4095, 32767, 32768, 32769, 40000, 65536, 1000003}) {
    kept.push_back(bytes(n));
    const Tensor& t = kept.back();
    CHECK(reinterpret_cast<uintptr_t>(t.data_ptr()) % 64 == 0);
    if (n > 0) std::memset(t.data_ptr(), static_cast<int>(kept.size()), static_cast<size_t>(n));
  }
  for (size_t i = 0; i < kept.size(); ++i) {  // no block overlaps another
    const auto* p = static_cast<const uint8_t*>(kept[i].data_ptr());
    CHECK(std::count(p, p + kept[i].numel(), static_cast<uint8_t>(i + 1)) == kept[i].numel());
  }
}

TEST_CASE("a freed block is handed out again, without asking the system") {
  const void* first = nullptr;
  {
    const Tensor t = bytes(kLarge);
    first = t.data_ptr();
  }
  const int64_t requests = memory_stats().system_requests;
  for (int i = 0; i < 10; ++i) CHECK(bytes(kLarge).data_ptr() == first);
  CHECK(memory_stats().system_requests == requests);
  const Tensor a = bytes(kLarge), b = bytes(kLarge);
  CHECK(a.data_ptr() != b.data_ptr());
}

TEST_CASE("a training step's worth of blocks asks the system for nothing the second time") {
  const auto step = [] {
    std::vector<Tensor> activations;
    for (int64_t i = 1; i <= 20; ++i) activations.push_back(bytes(i * 50001));
  };
  step();
  const int64_t requests = memory_stats().system_requests;
  for (int i = 0; i < 5; ++i) step();
  CHECK(memory_stats().system_requests == requests);
}

TEST_CASE("active bytes follow live tensors, views included once") {
  const int64_t before = memory_stats().active_bytes;
  {
    const Tensor t = bytes(kLarge);
    CHECK(memory_stats().active_bytes == before + kLarge);
    const Tensor view = t.narrow(0, 10, 100), alias = t;
    CHECK(memory_stats().active_bytes == before + kLarge);
    const Tensor small = bytes(100);
    CHECK(memory_stats().active_bytes == before + kLarge + 100);
  }
  CHECK(memory_stats().active_bytes == before);
  static char mine[100];
  const Tensor blob = from_blob(mine, {100}, {.dtype = DType::u8});
  CHECK(memory_stats().active_bytes == before);
}

TEST_CASE("the peak is the most that was active at once since it was reset") {
  const int64_t before = memory_stats().active_bytes;
  { const Tensor a = bytes(kLarge), b = bytes(kLarge); }
  CHECK(memory_stats().peak_bytes >= before + 2 * kLarge);
  reset_peak_memory();
  CHECK(memory_stats().peak_bytes == before);
  { const Tensor a = bytes(kLarge); }
  { const Tensor b = bytes(kLarge); }
  CHECK(memory_stats().peak_bytes == before + kLarge);
}

TEST_CASE("freed blocks are cached until the cache is emptied") {
  empty_cache();
  CHECK(memory_stats().cached_bytes == 0);
  { const Tensor t = bytes(kLarge); }
  const int64_t cached = memory_stats().cached_bytes;
  CHECK(cached >= kLarge);
  CHECK(cached <= kLarge * 5 / 4);  // at most a quarter of a block is waste
  {
    const Tensor t = bytes(kLarge);
    CHECK(memory_stats().cached_bytes == 0);
  }
  CHECK(memory_stats().cached_bytes == cached);
  empty_cache();
  CHECK(memory_stats().cached_bytes == 0);
  const int64_t requests = memory_stats().system_requests;
  const Tensor t = bytes(kLarge);
  CHECK(memory_stats().system_requests == requests + 1);
}

TEST_CASE("threads allocate, write and free each other's blocks") {
  const int64_t before = memory_stats().active_bytes;
  std::atomic<int> wrong{0}, negative{0};
  std::atomic<bool> stop{false};
  std::thread emptier([&] {
    while (!stop) {
      empty_cache();
      if (memory_stats().cached_bytes < 0) ++negative;
      std::this_thread::yield();
    }
  });
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      for (int i = 0; i < 300; ++i) {
        const int64_t n = 1000 * (1 + (i * 7 + t) % 90);
        const Tensor block = bytes(n);
        std::memset(block.data_ptr(), t, static_cast<size_t>(n));
        std::this_thread::yield();
        const auto* p = static_cast<const uint8_t*>(block.data_ptr());
        if (p[0] != t || p[n / 2] != t || p[n - 1] != t) ++wrong;
      }
    });
  for (std::thread& t : threads) t.join();
  stop = true;
  emptier.join();
  CHECK(wrong == 0);
  CHECK(negative == 0);
  CHECK(memory_stats().active_bytes == before);
  Tensor handed = bytes(kLarge);
  std::thread([moved = std::move(handed)]() mutable { moved = Tensor(); }).join();
  CHECK(memory_stats().active_bytes == before);
}

TEST_CASE("when the system has no more, OutOfMemory says how much was asked and how much is live") {
  const Tensor live = bytes(kLarge);
  const MemoryStats before = memory_stats();
  const int64_t absurd = int64_t{1} << 50;
  CHECK_THROWS_WITH_AS(bytes(absurd), Contains("1125899906842624 bytes"), OutOfMemory);
  CHECK_THROWS_WITH_AS(bytes(absurd), Contains(std::to_string(before.active_bytes).c_str()),
                       OutOfMemory);
  CHECK(memory_stats().active_bytes == before.active_bytes);
  CHECK(memory_stats().peak_bytes == before.peak_bytes);
  CHECK_NOTHROW(bytes(kLarge));  // and life goes on
  CHECK_THROWS_AS(empty({1}, {.device = {DeviceType::cuda, 0}}), DeviceError);
}

TEST_CASE("empty: sizes that no machine has are OutOfMemory") {
  for (const int64_t n : {int64_t{1} << 60, (int64_t{1} << 62) - 1, int64_t{7} << 59})
    for (DType t : {DType::f32, DType::u8}) CHECK_THROWS_AS(empty({n}, {.dtype = t}), OutOfMemory);
}
