// The caching CPU allocator: freed blocks are kept by size class and reused, so that a training
// step requests no memory from the operating system. Blocks are aligned to 64 bytes.
#pragma once

#include <cstddef>
#include <cstdint>

#include <lockstep/tensor/export.h>

namespace lockstep {

struct MemoryStats {
  int64_t active_bytes = 0;     // in live tensors
  int64_t peak_bytes = 0;       // the most that was ever active at once
  int64_t cached_bytes = 0;     // freed, and kept for reuse
  int64_t system_requests = 0;  // blocks requested from the operating system
};

/// What the allocator of CPU tensors holds now.
LOCKSTEP_API MemoryStats memory_stats();
/// Starts a new measurement of peak_bytes.
LOCKSTEP_API void reset_peak_memory();
/// Gives cached blocks back to the operating system.
LOCKSTEP_API void empty_cache();

namespace cpu {
/// Throws OutOfMemory with the statistics when the system has no more.
void* allocate(size_t bytes);
void deallocate(void* block, size_t bytes) noexcept;
}  // namespace cpu

}  // namespace lockstep
