// A call queues a job and works on its blocks itself; idle pool threads take blocks of it too. So
// several callers (ranks as threads, loader workers) share the pool without waiting for one
// another.
#include <lockstep/tensor/parallel.h>

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include <lockstep/tensor/quota.h>
#include <lockstep/tensor/error.h>
#include <lockstep/tensor/process.h>

namespace lockstep {
namespace {

thread_local int threads_of_this_thread = 0;  // 0: the default, not read yet
thread_local bool inside = false;             // at work on a block

int default_threads() {
  for (const char* name : {"LOCKSTEP_NUM_THREADS", "OMP_NUM_THREADS"})
    if (const char* text = std::getenv(name))
      if (const int n = std::atoi(text); n >= 1) return n;
  cpu_set_t cpus;
  const int processors = sched_getaffinity(0, sizeof cpus, &cpus) == 0
                             ? CPU_COUNT(&cpus)
                             : static_cast<int>(std::thread::hardware_concurrency());
  static const int quota = detail::cpu_quota();  // reads files: once
  return std::max(1, std::min(processors, quota));
}

struct Job {
  int64_t n, block, blocks;
  const std::function<void(int64_t, int64_t)>& f;
  std::atomic<int64_t> next{0};
  int helpers_wanted;
  int helpers = 0;  // at work now; guarded by the pool's mutex
  std::exception_ptr error;
  std::mutex error_mutex;

  void work() {
    inside = true;
    for (int64_t i; (i = next.fetch_add(1)) < blocks;) {
      try {
        f(i * block, std::min(n, (i + 1) * block));
      } catch (...) {
        next = blocks;
        std::lock_guard lock(error_mutex);
        if (!error) error = std::current_exception();
      }
    }
    inside = false;
  }
};

class Pool {
 public:
  bool is_here() const { return origin_.is_here(); }

  void run(Job& job) {
    const int helpers = job.helpers_wanted;
    {
      std::lock_guard lock(mutex_);
      start_threads(helpers);
      jobs_.push_back(&job);
    }
    for (int i = 0; i < helpers; ++i) wake_.notify_one();
    job.work();
    std::unique_lock lock(mutex_);
    std::erase(jobs_, &job);
    done_.wait(lock, [&] { return job.helpers == 0; });
  }

 private:
  /// Where the system refuses more threads, those that were started do the work.
  void start_threads(int wanted) {
    try {
      with_signals_blocked([&] {
        while (static_cast<int>(threads_.size()) < wanted)
          threads_.emplace_back([this](std::stop_token stop) { serve(stop); });
      });
    } catch (const std::system_error&) {
    }
  }

  void serve(std::stop_token stop) {
    const LibraryThread counted;
    threads_of_this_thread = 1;
    std::unique_lock lock(mutex_);
    while (true) {
      if (!wake_.wait(lock, stop, [&] { return !jobs_.empty(); })) return;
      Job& job = *jobs_.front();
      ++job.helpers;
      if (--job.helpers_wanted <= 0) jobs_.pop_front();
      lock.unlock();
      job.work();
      lock.lock();
      if (--job.helpers == 0) done_.notify_all();
    }
  }

  const Origin origin_;
  std::mutex mutex_;
  std::condition_variable_any wake_;
  std::condition_variable done_;
  std::deque<Job*> jobs_;
  std::vector<std::jthread> threads_;  // last: joined before the other members are destroyed
};

// A forked child has none of its parent's threads: it leaks the parent's pool and makes its own.
struct CurrentPool {
  std::atomic<Pool*> pool{nullptr};
  ~CurrentPool() {
    if (Pool* last = pool.exchange(nullptr); last && last->is_here()) delete last;
  }
};

Pool& pool() {
  static CurrentPool current;
  Pool* known = current.pool.load();
  while (!known || !known->is_here()) {
    auto fresh = std::make_unique<Pool>();
    if (current.pool.compare_exchange_strong(known, fresh.get())) return *fresh.release();
  }
  return *known;
}

}  // namespace

int get_num_threads() {
  if (threads_of_this_thread == 0) threads_of_this_thread = default_threads();
  return threads_of_this_thread;
}

void set_num_threads(int n) {
  LOCKSTEP_CHECK(n >= 1, ValueError, "set_num_threads: at least 1, got ", n);
  threads_of_this_thread = n;
}

void parallel_for(int64_t n, int64_t block, const std::function<void(int64_t, int64_t)>& f) {
  if (n <= 0) return;
  const int64_t blocks = (n + block - 1) / block;
  const int threads = static_cast<int>(std::min<int64_t>(get_num_threads(), blocks));
  if (inside || threads == 1) {
    for (int64_t i = 0; i < blocks; ++i) f(i * block, std::min(n, (i + 1) * block));
    return;
  }
  Job job{.n = n,
          .block = block,
          .blocks = blocks,
          .f = f,
          .helpers_wanted = threads - 1,
          .error = {},
          .error_mutex = {}};
  pool().run(job);
  if (job.error) std::rethrow_exception(job.error);
}

}  // namespace lockstep
