// Allocations that fail on demand: this binary's malloc and its relatives count every block of the
// process, those of the library, of the C++ runtime and of other libraries included, and return
// null where a FailingAllocations says so. To be included by one file of a test.
// Under sanitizers, which bring a malloc of their own, operator new alone is counted and fails.
#pragma once

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <new>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define LOCKSTEP_TEST_OWN_MALLOC 0
#else
#define LOCKSTEP_TEST_OWN_MALLOC 1
#endif

namespace failing_allocations {

inline std::atomic<bool> counting{false};
inline std::atomic<int64_t> counted{0};  // since counting began
inline std::atomic<int64_t> first_failure{0}, failures{0};
inline std::atomic<int64_t> live{0};  // blocks that were allocated and not freed

/// Whether the allocation that is being made fails.
inline bool fails() {
  if (!counting.load(std::memory_order_relaxed)) return false;
  const int64_t i = counted.fetch_add(1, std::memory_order_relaxed) - first_failure;
  return i >= 0 && i < failures;
}
inline void* count_live(void* block) {
  if (block) live.fetch_add(1, std::memory_order_relaxed);
  return block;
}
inline void count_freed(void* block) {
  if (block) live.fetch_sub(1, std::memory_order_relaxed);
}

}  // namespace failing_allocations

/// While one lives, `failures` allocations fail, after the first `successes`; of all threads.
class FailingAllocations {
 public:
  static constexpr int64_t kAll = std::numeric_limits<int64_t>::max();
  FailingAllocations(int64_t successes, int64_t failures) {
    failing_allocations::counted = 0;
    failing_allocations::first_failure = successes;
    failing_allocations::failures = failures;
    failing_allocations::counting = true;
  }
  ~FailingAllocations() { failing_allocations::counting = false; }
  FailingAllocations(const FailingAllocations&) = delete;
  static int64_t count() { return failing_allocations::counted; }
  static int64_t live() { return failing_allocations::live; }
};

#if LOCKSTEP_TEST_OWN_MALLOC

extern "C" {
void* __libc_malloc(size_t) noexcept;
void* __libc_calloc(size_t, size_t) noexcept;
void* __libc_realloc(void*, size_t) noexcept;
void* __libc_memalign(size_t, size_t) noexcept;
void __libc_free(void*) noexcept;

void* malloc(size_t n) noexcept {
  if (failing_allocations::fails()) return errno = ENOMEM, nullptr;
  return failing_allocations::count_live(__libc_malloc(n));
}
void* calloc(size_t n, size_t size) noexcept {
  if (failing_allocations::fails()) return errno = ENOMEM, nullptr;
  return failing_allocations::count_live(__libc_calloc(n, size));
}
void* realloc(void* block, size_t n) noexcept {
  if (failing_allocations::fails()) return errno = ENOMEM, nullptr;
  failing_allocations::count_freed(block);
  return failing_allocations::count_live(__libc_realloc(block, n));
}
void* memalign(size_t alignment, size_t n) noexcept {
  if (failing_allocations::fails()) return errno = ENOMEM, nullptr;
  return failing_allocations::count_live(__libc_memalign(alignment, n));
}
void* aligned_alloc(size_t alignment, size_t n) noexcept { return memalign(alignment, n); }
int posix_memalign(void** block, size_t alignment, size_t n) noexcept {
  *block = memalign(alignment, n);
  return *block ? 0 : ENOMEM;
}
void free(void* block) noexcept {
  failing_allocations::count_freed(block);
  __libc_free(block);
}
}

#else

void* operator new(size_t n) {
  if (failing_allocations::fails()) throw std::bad_alloc();
  if (void* block = failing_allocations::count_live(std::malloc(n ? n : 1))) return block;
  throw std::bad_alloc();
}
void* operator new(size_t n, const std::nothrow_t&) noexcept {
  if (failing_allocations::fails()) return nullptr;
  return failing_allocations::count_live(std::malloc(n ? n : 1));
}
void operator delete(void* block) noexcept {
  failing_allocations::count_freed(block);
  std::free(block);
}
void operator delete(void* block, size_t) noexcept { operator delete(block); }
void operator delete(void* block, const std::nothrow_t&) noexcept { operator delete(block); }

#endif
