// Storage: a block of memory shared by the tensors that view it. It comes from the allocator of its
// device, or from elsewhere (the user, a shared mapping) with a function that releases it.
#pragma once

#include <cstddef>
#include <functional>
#include <utility>

#include <lockstep/tensor/device.h>
#include <lockstep/tensor/ref.h>

namespace lockstep {

class LOCKSTEP_API Storage final : public RefCounted {
 public:
  /// Uninitialised memory from the device's allocator.
  static Ref<Storage> allocate(size_t bytes, Device device);
  /// External memory; `release` runs when the last tensor that views it is destroyed.
  Storage(void* data, size_t bytes, Device device, std::function<void()> release);

  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  Device device() const { return device_; }
  /// Whether the memory is the allocator's, so that only tensors refer to it.
  bool owns_bytes() const { return !release_; }
  /// Exchanges memory with another storage of the same device; the tensors that view them follow.
  void swap_memory(Storage& other) {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(release_, other.release_);
  }

  /// Counts in-place changes; a tensor saved for backward records the version it had.
  uint32_t version() const { return version_.load(std::memory_order_relaxed); }
  void bump_version() { version_.fetch_add(1, std::memory_order_relaxed); }

 private:
  Storage(void* data, size_t bytes, Device device) : data_(data), bytes_(bytes), device_(device) {}
  ~Storage() override;

  void* data_;
  size_t bytes_;
  Device device_;
  std::atomic<uint32_t> version_{0};
  std::function<void()> release_;  // empty for the allocator's memory
};

}  // namespace lockstep
