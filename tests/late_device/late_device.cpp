// Memory, streams and events of the device "late".
#include "late_device.h"

#include <sys/mman.h>
#include <unistd.h>

#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <vector>

using namespace lockstep;

namespace late {
namespace {

constexpr int kDevices = 2;
constexpr size_t kBytes = size_t{1} << 32;  // of address space for each

/// One memory, mapped twice: for the host without access, and for kernels.
class Memory {
 public:
  Memory() {
    const int file = ::memfd_create("late device", MFD_CLOEXEC);
    LOCKSTEP_CHECK(file >= 0 && ::ftruncate(file, kBytes) == 0, Error, "late: no memory");
    host_ = map(file, PROT_NONE);
    kernel_ = map(file, PROT_READ | PROT_WRITE);
    ::close(file);
  }

  void* allocate(size_t bytes) {
    const std::lock_guard lock(mutex_);
    const size_t size = std::max<size_t>(64, (bytes + 63) / 64 * 64);
    char* block;
    if (auto& list = free_[size]; !list.empty()) {
      block = list.back();
      list.pop_back();
      stats_.cached_bytes -= static_cast<int64_t>(size);
    } else {
      if (used_ + size > kBytes)
        fail<OutOfMemory>("late: no room for ", bytes, " bytes more; ", stats_.active_bytes,
                          " are in live tensors");
      block = host_ + used_;
      used_ += size;
      ++stats_.system_requests;
    }
    stats_.active_bytes += static_cast<int64_t>(bytes);
    stats_.peak_bytes = std::max(stats_.peak_bytes, stats_.active_bytes);
    return block;
  }
  void deallocate(void* block, size_t bytes) noexcept {
    const std::lock_guard lock(mutex_);
    const size_t size = std::max<size_t>(64, (bytes + 63) / 64 * 64);
    free_[size].push_back(static_cast<char*>(block));
    stats_.active_bytes -= static_cast<int64_t>(bytes);
    stats_.cached_bytes += static_cast<int64_t>(size);
  }
  void* mapped(const void* p) const { return kernel_ + (static_cast<const char*>(p) - host_); }
  MemoryStats stats() const {
    const std::lock_guard lock(mutex_);
    return stats_;
  }
  void reset_peak() {
    const std::lock_guard lock(mutex_);
    stats_.peak_bytes = stats_.active_bytes;
  }

 private:
  static char* map(int file, int access) {
    void* p = ::mmap(nullptr, kBytes, access, MAP_SHARED | MAP_NORESERVE, file, 0);
    LOCKSTEP_CHECK(p != MAP_FAILED, Error, "late: no address space");
    return static_cast<char*>(p);
  }
  mutable std::mutex mutex_;
  char *host_, *kernel_;
  size_t used_ = 0;
  std::map<size_t, std::vector<char*>> free_;
  MemoryStats stats_;
};

struct Event final : RefCounted {
  bool happened = false;
};

/// What one device has to do, by stream.
class Queue {
 public:
  struct Task {
    std::function<void()> work;
    Ref<Event> after;  // runs once this has happened
  };

  void push(uint64_t stream, Task task) {
    const std::lock_guard lock(mutex_);
    streams_[stream].push_back(std::move(task));
    ++pending_;
    // Now and then something runs before anybody waits.
    if (random_() % 8 == 0) run_one();
  }
  /// Runs everything; then throws what the first kernel that failed threw.
  void drain() {
    const std::lock_guard lock(mutex_);
    while (pending_ > 0) run_one();
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  }
  int64_t pending() const {
    const std::lock_guard lock(mutex_);
    return pending_;
  }
  void set_order(uint64_t seed) { random_.seed(seed); }

 private:
  /// The first task of a random stream that need not wait for another's event.
  void run_one() {
    std::vector<uint64_t> ready;
    for (auto& [id, tasks] : streams_)
      if (!tasks.empty() && (!tasks.front().after || tasks.front().after->happened))
        ready.push_back(id);
    if (ready.empty()) return;  // events of streams that another device's work waits for
    auto& tasks = streams_[ready[random_() % ready.size()]];
    Task task = std::move(tasks.front());
    tasks.pop_front();
    --pending_;
    try {
      if (!error_) task.work();
    } catch (...) {
      error_ = std::current_exception();
    }
  }
  mutable std::recursive_mutex mutex_;
  std::map<uint64_t, std::deque<Task>> streams_;
  int64_t pending_ = 0;
  std::exception_ptr error_;
  std::mt19937_64 random_{1};
};

struct State {
  Memory memory[kDevices];
  Queue queue[kDevices];
  std::atomic<uint64_t> streams{0};
  std::atomic<int64_t> waits{0};
};
State& state() {
  static State* s = new State;  // tensors in static variables may be freed after everything else
  return *s;
}
thread_local uint64_t current[kDevices] = {};

class LateBackend final : public DeviceBackend {
 public:
  int count() const override { return kDevices; }
  std::string description(int) const override { return "late device of the tests"; }
  void* allocate(size_t bytes, int i) override { return state().memory[i].allocate(bytes); }
  void deallocate(void* block, size_t bytes, int i) noexcept override {
    state().memory[i].deallocate(block, bytes);
  }
  MemoryStats memory_stats(int i) const override { return state().memory[i].stats(); }
  void reset_peak_memory(int i) override { state().memory[i].reset_peak(); }
  void empty_cache(int) override {}

  Stream current_stream(int i) const override { return {device(i), current[i]}; }
  void set_current_stream(Stream s) override { current[s.device.index] = s.id; }
  Stream new_stream(int i) override { return {device(i), ++state().streams}; }
  Ref<RefCounted> record(Stream s) override {
    auto event = make_ref<Event>();
    state().queue[s.device.index].push(s.id, {[event] { event->happened = true; }, {}});
    return event;
  }
  void wait(Stream s, const Ref<RefCounted>& event) override {
    state().queue[s.device.index].push(s.id,
                                       {[] {}, Ref<Event>(static_cast<Event*>(event.get()))});
  }
  void synchronize(int i) override { wait_for(i); }
};

}  // namespace

DeviceType type() {
  static const DeviceType t = [] {
    const DeviceType made = register_device("late", std::make_unique<LateBackend>());
    enter_kernels(made);
    return made;
  }();
  return t;
}
int64_t synchronizations() { return state().waits; }
void set_order(uint64_t seed) {
  for (Queue& q : state().queue) q.set_order(seed);
}
int64_t pending() { return state().queue[0].pending() + state().queue[1].pending(); }
void enqueue(int index, std::function<void()> work) {
  state().queue[index].push(current[index], {std::move(work), {}});
}
void wait_for(int index) {
  ++state().waits;
  state().queue[index].drain();
}
void* mapped(const void* p, int index) { return state().memory[index].mapped(p); }

}  // namespace late
