// Device: where a tensor's memory is. The library has kernels for the CPU; those for cuda come from
// a plug-in that enters them in the ops' tables.
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

  /// The device for the process with this local rank: its GPU if there is one, else the CPU.
  static Device best([[maybe_unused]] int local_rank = 0) { return {}; }
};

inline void append(std::string& text, Device d) {
  text += d.is_cpu() ? "cpu" : "cuda:" + std::to_string(d.index);
}
/// Writes "cpu" or "cuda:0"; a template so that this header needs no <ostream>.
template <class Stream>
auto operator<<(Stream& out, Device d) -> decltype(out << std::string()) {
  return out << str_cat(d);
}

/// One typed kernel per device. on() throws DeviceError for a device whose kernels are not loaded.
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
