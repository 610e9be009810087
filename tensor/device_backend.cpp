#include <lockstep/tensor/device_backend.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cctype>
#include <charconv>
#include <mutex>

namespace lockstep {
namespace {

/// By type; never destroyed, since tensors in static variables may be freed after everything else.
struct Registered {
  std::string name;
  std::unique_ptr<DeviceBackend> backend;
};
constinit std::array<std::atomic<Registered*>, kDeviceTypes> registered{};

Registered* at(DeviceType type) {
  return registered[static_cast<size_t>(type)].load(std::memory_order_acquire);
}

}  // namespace

DeviceType register_device(const std::string& name, std::unique_ptr<DeviceBackend> backend) {
  static constinit std::mutex mutex;
  const std::lock_guard lock(mutex);
  LOCKSTEP_CHECK(!name.empty() && std::all_of(name.begin(), name.end(),
                                              [](unsigned char c) { return std::isalnum(c) != 0; }),
                 ValueError, "register_device: a name has letters and digits only, got \"", name,
                 "\"");
  size_t slot = name == "cpu" ? 0 : name == "cuda" ? 1 : 2;
  for (const auto& r : registered)
    LOCKSTEP_CHECK(!r.load() || r.load()->name != name, ValueError, "register_device: ", name,
                   " is registered already");
  while (slot >= 2 && slot < registered.size() && registered[slot].load()) ++slot;
  LOCKSTEP_CHECK(slot < registered.size(), ValueError, "register_device: there are ", kDeviceTypes,
                 " types of devices already, no room for ", name);
  registered[slot].store(new Registered{name, std::move(backend)}, std::memory_order_release);
  return static_cast<DeviceType>(slot);
}

DeviceBackend& backend_of(Device device) {
  const Registered* r = at(device.type);
  if (r && device.index == 0) [[likely]]  // one that is not there shows when it is used
    return *r->backend;
  LOCKSTEP_CHECK(r, DeviceError, "device: no kernels are loaded for ", device);
  LOCKSTEP_CHECK(device.index >= 0 && device.index < r->backend->count(), DeviceError,
                 "device: there is no ", device, "; this process can use ", r->backend->count(),
                 " of type ", device.type);
  return *r->backend;
}

std::string name_of(DeviceType type) {
  if (const Registered* r = at(type)) return r->name;
  return type == DeviceType::cuda ? "cuda" : str_cat("device", static_cast<int>(type));
}

Device::Device(std::string_view text) {
  const std::string_view name = text.substr(0, text.find(':'));
  bool known = false;
  for (int t = 0; t < kDeviceTypes && !known; ++t) {
    type = static_cast<DeviceType>(t);
    known = (at(type) || t == 1) && name_of(type) == name;
  }
  LOCKSTEP_CHECK(known, ValueError, "Device: there is no device type \"", name, "\" in \"", text,
                 "\"; \"cpu\", \"cuda\" and \"cuda:0\" are devices");
  if (name.size() == text.size()) return;
  const std::string_view number = text.substr(name.size() + 1);
  const auto [end, error] =
      std::from_chars(number.data(), number.data() + number.size(), index);
  LOCKSTEP_CHECK(error == std::errc() && end == number.data() + number.size() && index >= 0,
                 ValueError, "Device: \"", number, "\" in \"", text,
                 "\" is not the number of a device");
  LOCKSTEP_CHECK(!is_cpu() || index == 0, ValueError, "Device: there is one cpu, got \"", text,
                 "\"");
}

Device Device::best(int local_rank) {
  for (int t = 1; t < kDeviceTypes; ++t) {
    const Registered* r = at(static_cast<DeviceType>(t));
    const int count = r ? r->backend->count() : 0;
    if (count > 0) return {static_cast<DeviceType>(t), local_rank % count};
  }
  return {};
}

MemoryStats memory_stats(Device device) { return backend_of(device).memory_stats(device.index); }
void reset_peak_memory(Device device) { backend_of(device).reset_peak_memory(device.index); }
void empty_cache(Device device) { backend_of(device).empty_cache(device.index); }
void synchronize(Device device) { backend_of(device).synchronize(device.index); }

}  // namespace lockstep
