// The caching allocator of CPU tensors: freed blocks are kept by size class and reused, so that a training
// step requests no memory from the operating system. Blocks are aligned to 64 bytes.
#pragma once

#include <cstddef>

#include <lockstep/tensor/device_backend.h>

namespace lockstep::cpu {

/// Throws OutOfMemory with the statistics when the system has no more.
void* allocate(size_t bytes);
void deallocate(void* block, size_t bytes) noexcept;
MemoryStats memory_stats();
void reset_peak_memory();
void empty_cache();

}  // namespace lockstep::cpu
