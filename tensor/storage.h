// Storage: a block of memory with an owner, shared by the tensors that view it. Its memory comes from
// the caching allocator, from the user or from a shared mapping, and is freed the way its source says.
#pragma once

#include <cstddef>
#include <functional>
#include <utility>

#include <lockstep/tensor/device.h>
#include <lockstep/tensor/ref.h>

namespace lockstep {

class LOCKSTEP_API Storage final : public RefCounted {
 public:
  /// Fresh uninitialised bytes from the device's caching allocator.
  static Ref<Storage> allocate(size_t bytes, Device device);
  /// Somebody else's bytes; `release` runs when the last tensor that views them is gone.
  Storage(void* data, size_t bytes, Device device, std::function<void()> release);

  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  Device device() const { return device_; }
  /// Whether the caching allocator gave these bytes, so that nobody outside the library can see
  /// them.
  bool owns_bytes() const { return !release_; }
  /// Exchanges memory with another storage of the same device; the tensors that view them follow.
  void swap_memory(Storage& other) {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(release_, other.release_);
  }

  /// Counts in-place changes; a tensor saved for backward remembers the number it saw.
  uint32_t version() const { return version_.load(std::memory_order_relaxed); }
  void bump_version() { version_.fetch_add(1, std::memory_order_relaxed); }

 private:
  Storage(void* data, size_t bytes, Device device) : data_(data), bytes_(bytes), device_(device) {}
  ~Storage() override;

  void* data_;
  size_t bytes_;
  Device device_;
  std::atomic<uint32_t> version_{0};
  std::function<void()> release_;  // empty: the caching allocator's
};

}  // namespace lockstep
