#include <lockstep/tensor/kernel.h>

#include <algorithm>
#include <mutex>
#include <utility>

namespace lockstep {
namespace {

// Entered while the library or a plug-in is loaded.
constinit std::mutex mutex;
constinit KernelEntry* first = nullptr;

}  // namespace

LOCKSTEP_THREAD_LOCAL KernelRecorder* detail::kernel_recorder = nullptr;

bool KernelEntry::enter(DeviceType type, AnyFunction f, DTypes dtypes) {
  const std::lock_guard lock(mutex);
  dtypes_[static_cast<size_t>(type)] = dtypes;
  functions_[static_cast<size_t>(type)].store(f, std::memory_order_release);
  if (!std::exchange(listed_, true)) next_ = std::exchange(first, this);
  return true;
}

void KernelEntry::fail_missing(Device device) const {
  fail<DeviceError>(op_, ": not available on ", device,
                    ", because no kernels are loaded for it; move the tensor with to(Device{})");
}
void KernelEntry::fail_devices(Device a, Device b) const {
  fail<DeviceError>(op_, ": tensors are on ", a, " and ", b, "; move one with to()");
}

std::vector<const KernelEntry*> all_kernels() {
  std::vector<const KernelEntry*> all;
  {
    const std::lock_guard lock(mutex);
    for (const KernelEntry* k = first; k; k = k->next_) all.push_back(k);
  }
  std::sort(all.begin(), all.end(), [](auto* a, auto* b) { return a->name() < b->name(); });
  return all;
}

std::string kernel_table() {
  std::string text;
  for (const KernelEntry* kernel : all_kernels()) {
    text += kernel->name();
    for (int type = 0; type < kDeviceTypes; ++type) {
      const DTypes dtypes = kernel->dtypes(static_cast<DeviceType>(type));
      if (!dtypes) continue;
      text += str_cat("  ", static_cast<DeviceType>(type), ":");
      for (int t = 0; dtypes >> t; ++t)
        if (dtypes >> t & 1) text += str_cat(" ", static_cast<DType>(t));
    }
    text += '\n';
  }
  return text;
}

KernelRecorder::KernelRecorder() : outer_(std::exchange(detail::kernel_recorder, this)) {}
KernelRecorder::~KernelRecorder() { detail::kernel_recorder = outer_; }

}  // namespace lockstep
