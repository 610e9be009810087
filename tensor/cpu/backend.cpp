// The CPU as a device: kernels run when they are called, so that streams and events have nothing to
// order.
#include <lockstep/tensor/cpu/allocator.h>

namespace lockstep::cpu {
namespace {

class CpuBackend final : public DeviceBackend {
 public:
  int count() const override { return 1; }
  std::string description(int) const override { return "CPU"; }

  void* allocate(size_t bytes, int) override { return cpu::allocate(bytes); }
  void deallocate(void* block, size_t bytes, int) noexcept override {
    cpu::deallocate(block, bytes);
  }
  MemoryStats memory_stats(int) const override { return cpu::memory_stats(); }
  void reset_peak_memory(int) override { cpu::reset_peak_memory(); }
  void empty_cache(int) override { cpu::empty_cache(); }

  Stream current_stream(int) const override { return {}; }
  void set_current_stream(Stream) override {}
  Stream new_stream(int) override { return {}; }
  Ref<RefCounted> record(Stream) override { return {}; }
  void wait(Stream, const Ref<RefCounted>&) override {}
  void synchronize(int) override {}
};

const DeviceType entered = register_device("cpu", std::make_unique<CpuBackend>());

}  // namespace
}  // namespace lockstep::cpu
