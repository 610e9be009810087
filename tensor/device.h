// Device: where a tensor's memory is. The CPU is always there; other types are registered by plug-ins,
// see device_backend.h.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include <lockstep/tensor/error.h>
#include <lockstep/tensor/export.h>

namespace lockstep {

/// Two types have fixed numbers; those of other backends are given out as they register.
enum class DeviceType : uint8_t { cpu, cuda };
inline constexpr int kDeviceTypes = 8;

/// "cpu", "cuda", or the name that a backend registered.
LOCKSTEP_API std::string name_of(DeviceType type);
inline void append(std::string& text, DeviceType type) { text += name_of(type); }

struct LOCKSTEP_API Device {
  DeviceType type = DeviceType::cpu;
  int index = 0;

  constexpr Device() = default;
  constexpr Device(DeviceType type, int index = 0) : type(type), index(index) {}
  /// From its text: "cpu", "cuda" or "cuda:1". ValueError for any other, or a type that is not
  /// registered.
  Device(std::string_view text);
  Device(const char* text) : Device(std::string_view(text)) {}

  bool operator==(const Device&) const = default;
  bool is_cpu() const { return type == DeviceType::cpu; }
  bool is_cuda() const { return type == DeviceType::cuda; }

  /// The device for the process with this local rank: its GPU if there is one, else the CPU.
  static Device best(int local_rank = 0);
};

inline void append(std::string& text, Device d) {
  append(text, d.type);
  if (!d.is_cpu()) append(text += ':', d.index);
}
/// Writes "cpu" or "cuda:0"; a template so that this header needs no <ostream>.
template <class Stream>
auto operator<<(Stream& out, Device d) -> decltype(out << std::string()) {
  return out << str_cat(d);
}

}  // namespace lockstep
