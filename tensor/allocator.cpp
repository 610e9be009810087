// Two kinds of blocks. Small ones come from malloc, whose per-thread cache is fast. Large ones,
// which malloc would return to the system and page in again each step, are kept in one free list
// per size class (four classes per power of two, so at most a quarter of a block is unused).
#include <lockstep/tensor/allocator.h>

#include <pthread.h>

#include <atomic>
#include <bit>
#include <cstdlib>
#include <mutex>
#include <new>
#include <utility>

#include <lockstep/tensor/error.h>
#include <lockstep/tensor/storage.h>

namespace lockstep {
namespace {

constexpr size_t kAlign = 64;
constexpr size_t kSmall = 32 * 1024;

std::atomic<int64_t> active{0}, peak{0}, cached{0}, system_requests{0};

constexpr size_t kMost = SIZE_MAX / 4;  // more than any machine has; sizes stay clear of overflow

/// Rounds up to the next of {4, 5, 6, 7} x a power of two.
size_t class_size(size_t bytes) {
  const size_t step = std::bit_floor(bytes) / 4;
  return (bytes + step - 1) / step * step;
}
size_t class_index(size_t size) {
  const size_t power = static_cast<size_t>(std::bit_width(size) - 1);
  return power * 4 + (size >> (power - 2)) % 4;
}

/// A free block holds the link to the next one of its class, so that freeing needs no memory.
struct FreeBlock {
  FreeBlock* next;
};
struct Cache {
  std::mutex mutex;
  FreeBlock* free[64 * 4] = {};
};
/// Never destroyed: tensors in static variables may be freed after everything else.
Cache& cache() {
  static Cache* c = [] {
    auto* made = new Cache;
    // A child forked while another thread holds the mutex would deadlock.
    pthread_atfork([] { cache().mutex.lock(); }, [] { cache().mutex.unlock(); },
                   [] { cache().mutex.unlock(); });
    return made;
  }();
  return *c;
}

void count_active(int64_t by) {
  const int64_t now = active.fetch_add(by, std::memory_order_relaxed) + by;
  if (by > 0) {
    int64_t before = peak.load(std::memory_order_relaxed);
    while (now > before && !peak.compare_exchange_weak(before, now, std::memory_order_relaxed)) {
    }
  }
}

}  // namespace

namespace cpu {

void* allocate(size_t bytes) {
  void* block = nullptr;
  if (bytes <= kSmall) {
    // malloc aligns to 16 bytes; the word before the aligned block holds malloc's pointer.
    char* raw = static_cast<char*>(std::malloc(bytes + kAlign));
    if (raw) {
      char* aligned = raw + kAlign - reinterpret_cast<uintptr_t>(raw) % kAlign;
      reinterpret_cast<void**>(aligned)[-1] = raw;
      block = aligned;
    }
  } else if (bytes <= kMost) {
    const size_t size = class_size(bytes);
    auto& list = cache().free[class_index(size)];
    {
      std::lock_guard lock(cache().mutex);
      if (list) {
        block = std::exchange(list, list->next);
        cached.fetch_sub(static_cast<int64_t>(size), std::memory_order_relaxed);
      }
    }
    if (!block) {
      system_requests.fetch_add(1, std::memory_order_relaxed);
      block = std::aligned_alloc(kAlign, size);
      if (!block) {
        empty_cache();
        block = std::aligned_alloc(kAlign, size);
      }
    }
  }
  if (!block) {
    const MemoryStats s = memory_stats();
    fail<OutOfMemory>("allocate: the system has no ", bytes, " bytes more; ", s.active_bytes,
                      " bytes are in live tensors (", s.peak_bytes,
                      " at the peak); use a smaller batch");
  }
  count_active(static_cast<int64_t>(bytes));
  return block;
}

void deallocate(void* block, size_t bytes) noexcept {
  count_active(-static_cast<int64_t>(bytes));
  if (bytes <= kSmall) {
    std::free(static_cast<void**>(block)[-1]);
    return;
  }
  const size_t size = class_size(bytes);
  std::lock_guard lock(cache().mutex);
  cached.fetch_add(static_cast<int64_t>(size), std::memory_order_relaxed);
  FreeBlock*& list = cache().free[class_index(size)];
  list = new (block) FreeBlock{list};
}

}  // namespace cpu

MemoryStats memory_stats() { return {active, peak, cached, system_requests}; }
void reset_peak_memory() { peak = active.load(); }
void empty_cache() {
  std::lock_guard lock(cache().mutex);
  for (auto& list : cache().free) {
    while (list) std::free(std::exchange(list, list->next));
  }
  cached = 0;
}

Ref<Storage> Storage::allocate(size_t bytes, Device device) {
  LOCKSTEP_CHECK(device.is_cpu(), DeviceError, "allocate: no allocator is loaded for ", device);
  return Ref<Storage>(new Storage(cpu::allocate(bytes), bytes, device));
}
Storage::Storage(void* data, size_t bytes, Device device, std::function<void()> release)
    : data_(data), bytes_(bytes), device_(device), release_(release ? std::move(release) : [] {}) {}
void Storage::free_bytes() {
  if (release_)
    release_();
  else
    cpu::deallocate(data_, bytes_);
}

}  // namespace lockstep
