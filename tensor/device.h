// Device: where a tensor's bytes live. A device-free core: cuda exists as a name here, and its
// kernels come from a plug-in that fills the ops' function tables.
#pragma once

#include <cstdint>
#include <string>

#include <lockstep/tensor/error.h>

namespace lockstep {

enum class DeviceType : uint8_t { cpu, cuda };
inline constexpr int kDeviceTypes = 2;

struct Device {
  DeviceType type = DeviceType::cpu;
  int index = 0;

  bool operator==(const Device&) const = default;
  bool is_cpu() const { return type == DeviceType::cpu; }
  bool is_cuda() const { return type == DeviceType::cuda; }

  /// The device for a process with this index on its host: its GPU where there is one, else the
  /// CPU.
  static Device best([[maybe_unused]] int local_rank = 0) { return {}; }
};

inline void append(std::string& text, Device d) {
  text += d.is_cpu() ? "cpu" : "cuda:" + std::to_string(d.index);
}

/// One kernel per device, in the op's own struct: typed, no strings, no void*. A device whose
/// plug-in is not loaded answers with an error that says why.
template <class Signature>
class Kernel;
template <class R, class... Args>
class Kernel<R(Args...)> {
 public:
  using Function = R (*)(Args...);
  constexpr explicit Kernel(const char* op, Function cpu) : op_(op), functions_{cpu, nullptr} {}
  void set(DeviceType type, Function f) { functions_[static_cast<int>(type)] = f; }
  Function on(Device device) const {
    Function f = functions_[static_cast<int>(device.type)];
    LOCKSTEP_CHECK(f, DeviceError, op_, ": not available on ", device,
                   ", because no kernels are loaded for it; move the tensor with to(Device{})");
    return f;
  }

 private:
  const char* op_;
  Function functions_[kDeviceTypes];
};

}  // namespace lockstep
