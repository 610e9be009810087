// DeviceBackend: what the library asks of a type of device beside its kernels: memory, and the order of
// work. A plug-in derives from it, registers it under a name, and enters its kernels with
// Kernel::set(). The CPU's is in tensor/cpu/backend.cpp.
//
// A device runs kernels in streams: those of one stream in the order of their calls, those of several
// in any order but for events. A kernel's call may return before it has run. Memory that is freed may
// be used again by the same stream at once, by others after the work that was queued then.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include <lockstep/tensor/device.h>
#include <lockstep/tensor/ref.h>

namespace lockstep {

struct MemoryStats {
  int64_t active_bytes = 0;     // in live tensors
  int64_t peak_bytes = 0;       // the most that was ever active at once
  int64_t cached_bytes = 0;     // freed, and kept for reuse
  int64_t system_requests = 0;  // blocks requested from the operating system or the driver
};

/// A queue of work on a device; 0 is the default one of each device.
struct Stream {
  Device device;
  uint64_t id = 0;
  bool operator==(const Stream&) const = default;
};

class LOCKSTEP_API DeviceBackend {
 public:
  virtual ~DeviceBackend() = default;

  /// How many devices of the type this process can use.
  virtual int count() const = 0;
  /// As in "NVIDIA H200".
  virtual std::string description(int index) const = 0;

  /// Memory aligned to 64 bytes or more, for the current stream. Throws OutOfMemory with the
  /// statistics.
  virtual void* allocate(size_t bytes, int index) = 0;
  virtual void deallocate(void* block, size_t bytes, int index) noexcept = 0;
  virtual MemoryStats memory_stats(int index) const = 0;
  /// Starts a new measurement of peak_bytes.
  virtual void reset_peak_memory(int index) = 0;
  /// Gives cached blocks back.
  virtual void empty_cache(int index) = 0;

  /// The stream that this thread's calls go to.
  virtual Stream current_stream(int index) const = 0;
  virtual void set_current_stream(Stream stream) = 0;
  virtual Stream new_stream(int index) = 0;
  /// A mark behind what the stream holds now.
  virtual Ref<RefCounted> record(Stream stream) = 0;
  /// What the stream is given from now on runs after the event.
  virtual void wait(Stream stream, const Ref<RefCounted>& event) = 0;
  /// The calling thread waits until all work of the device is done. Throws what a kernel failed with.
  virtual void synchronize(int index) = 0;
};

/// Makes a type of device known under its name (letters and digits), for the life of the process: "cuda"
/// is DeviceType::cuda, others get the next free number. Throws ValueError for a name that is taken,
/// or the ninth type.
LOCKSTEP_API DeviceType register_device(const std::string& name,
                                        std::unique_ptr<DeviceBackend> backend);
/// Throws DeviceError where no backend is registered, or it has no device of this index.
LOCKSTEP_API DeviceBackend& backend_of(Device device);

/// What the device's allocator holds now.
LOCKSTEP_API MemoryStats memory_stats(Device device = {});
/// Starts a new measurement of peak_bytes.
LOCKSTEP_API void reset_peak_memory(Device device = {});
/// Gives cached blocks back to the system.
LOCKSTEP_API void empty_cache(Device device = {});
/// Waits until all work of the device is done. Throws what a kernel failed with.
LOCKSTEP_API void synchronize(Device device);

}  // namespace lockstep
