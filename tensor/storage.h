// Storage: a block of memory shared by the tensors that view it. It comes from the allocator of its
// device, or from elsewhere (the user, a shared mapping) with a function that releases it. Its bytes may
// go for a time, if someone can bring them back, and it may be read-only.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include <lockstep/tensor/device.h>
#include <lockstep/tensor/ref.h>

namespace lockstep {

class Storage;

/// Who can bring the bytes of a storage back after it let them go.
class LOCKSTEP_API BytesOwner {
 public:
  virtual ~BytesOwner();
  /// A storage that holds what `released` held, of as many bytes on the same device. It lives as long as
  /// `released` has these bytes, and may be used by others. Called by the first thread that reads;
  /// others wait. It must not read `released`.
  virtual Ref<Storage> restore(const Storage& released) = 0;
};

class LOCKSTEP_API Storage final : public RefCounted {
 public:
  /// Uninitialised memory from the device's allocator.
  static Ref<Storage> allocate(size_t bytes, Device device);
  /// External memory; `release` runs when the last tensor that views it is destroyed.
  Storage(void* data, size_t bytes, Device device, std::function<void()> release);

  void* data() const {
    if (released_.load(std::memory_order_acquire)) [[unlikely]]
      restore_bytes();
    return data_;
  }
  size_t bytes() const { return bytes_; }
  Device device() const { return device_; }
  /// Whether the memory is the allocator's, so that only tensors refer to it.
  bool owns_bytes() const { return !release_ && !extra_; }
  /// Exchanges memory with another storage of the same device, with what is known of it; the tensors
  /// that view them follow.
  void swap_memory(Storage& other);

  /// Who brings the bytes back after release_bytes(); null for nobody, after bytes that are gone came
  /// back.
  void set_owner(std::shared_ptr<BytesOwner> owner);
  /// Frees the bytes. The next data() gets them back from the owner, whatever was written here since;
  /// shape, version and all that refers to the storage stay. Nobody may be using data() meanwhile.
  /// Error: there is no owner.
  void release_bytes();
  bool has_bytes() const { return !released_.load(std::memory_order_acquire); }

  /// From now on every op, optimizer, load or collective that would write here throws a ValueError that
  /// gives the reason: "relu_: the tensor is read-only: REASON". Without a reason, writable again. Writes
  /// through data() are not noticed.
  void set_read_only(std::string reason);
  bool is_read_only() const;
  /// Called by whatever is about to write: throws if the storage is read-only.
  void check_writable(std::string_view op) const {
    if (extra_) [[unlikely]]
      fail_if_read_only(op);
  }

  /// Counts in-place changes; a tensor saved for backward records the version it had.
  uint32_t version() const { return version_.load(std::memory_order_relaxed); }
  void bump_version() { version_.fetch_add(1, std::memory_order_relaxed); }

 private:
  Storage(void* data, size_t bytes, Device device) : data_(data), bytes_(bytes), device_(device) {}
  ~Storage() override;
  void free_bytes();
  void restore_bytes() const;
  void fail_if_read_only(std::string_view op) const;
  struct Extra;  // what few storages have
  Extra& extra();

  void* data_;
  size_t bytes_;
  Device device_;
  std::atomic<uint32_t> version_{0};
  std::atomic<bool> released_{false};
  std::function<void()> release_;  // empty for the allocator's memory
  std::shared_ptr<Extra> extra_;   // null for most
};

}  // namespace lockstep
