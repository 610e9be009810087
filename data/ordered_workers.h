// OrderedWorkers: threads that compute numbered jobs ahead of a loop that takes the results in order.
// Workers claim job numbers in order and put results into a ring of slots; the loop takes them out
// in order, so it does not depend on the workers' speed. The number of slots bounds how many
// results exist at once.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include <lockstep/tensor/error.h>
#include <lockstep/tensor/node.h>
#include <lockstep/tensor/parallel.h>
#include <lockstep/tensor/process.h>
#include <lockstep/tensor/random.h>

namespace lockstep::data::detail {

// Results of jobs 0 .. jobs-1, in order, computed by threads at most `ahead` jobs ahead of the
// taker.
class OrderedWorkers {
 public:
  using Job = std::function<std::shared_ptr<void>(int64_t)>;

  OrderedWorkers(int64_t jobs, int threads, int64_t ahead, Job job)
      : jobs_(jobs), job_(std::move(job)), slots_(static_cast<size_t>(ahead)) {
    try {
      with_signals_blocked([&] {
        for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { work(); });
      });
    } catch (const std::exception& e) {
      stop();
      fail<Error>("Loader: cannot start worker thread ", threads_.size(), " of ", threads, ": ",
                  e.what(), "; use fewer workers, or raise the limit with ulimit -u");
    }
  }
  ~OrderedWorkers() { stop(); }
  OrderedWorkers(const OrderedWorkers&) = delete;
  OrderedWorkers& operator=(const OrderedWorkers&) = delete;

  /// Leaves them as they are in a forked child, which has none of the threads.
  struct End {
    void operator()(OrderedWorkers* workers) const {
      if (workers->origin_.is_here()) delete workers;
    }
  };

  /// The result of the next job; rethrows its exception once every thread is gone.
  std::shared_ptr<void> take() {
    LOCKSTEP_CHECK(origin_.is_here(), Error,
                   "Loader: its workers are threads of the parent of this process; a forked child "
                   "cannot go on with the epoch, it must begin one of its own");
    Slot result;
    {
      std::unique_lock lock(mutex_);
      Slot& slot = slots_[static_cast<size_t>(taken_) % slots_.size()];
      filled_.wait(lock, [&] { return slot.filled; });
      result = std::exchange(slot, {});
      ++taken_;
    }
    emptied_.notify_one();
    if (result.error) {
      stop();
      std::rethrow_exception(result.error);
    }
    return std::move(result.batch);
  }

 private:
  struct Slot {
    bool filled = false;
    std::shared_ptr<void> batch;
    std::exception_ptr error;
  };

  void work() {
    lockstep::detail::start_generator({});  // fetch() keys it for each sample
    set_num_threads(1);                     // the workers are the parallelism
    NoGradGuard no_grad;
    std::unique_lock lock(mutex_);
    for (;;) {
      {
        const LibraryThread idle;  // until a batch is taken; the job is the program's code
        emptied_.wait(lock, [&] {
          return closed_ || claimed_ - taken_ < static_cast<int64_t>(slots_.size());
        });
      }
      if (closed_ || claimed_ == jobs_) return;
      const int64_t mine = claimed_++;
      lock.unlock();
      Slot result{.filled = true, .batch = nullptr, .error = nullptr};
      try {
        result.batch = job_(mine);
      } catch (...) {
        result.error = std::current_exception();
      }
      lock.lock();
      if (result.error) {  // jobs before it still arrive, in order; none after it is begun
        closed_ = true;
        emptied_.notify_all();
      }
      slots_[static_cast<size_t>(mine) % slots_.size()] = std::move(result);
      filled_.notify_one();
    }
  }

  void stop() {
    {
      std::lock_guard lock(mutex_);
      closed_ = true;
    }
    emptied_.notify_all();
    for (std::thread& t : threads_) t.join();
    threads_.clear();
  }

  const Origin origin_;
  const int64_t jobs_;
  const Job job_;
  std::mutex mutex_;
  std::condition_variable filled_, emptied_;
  std::vector<Slot> slots_;
  int64_t claimed_ = 0, taken_ = 0;
  bool closed_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace lockstep::data::detail
