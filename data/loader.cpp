// The engine behind Loader. Workers claim batch numbers in order and put results into a ring of
// slots; the loop takes them out in order, so it never sees who was faster. A ring slot per batch
// bounds the memory.
#include <lockstep/data/loader.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include <lockstep/tensor/node.h>
#include <lockstep/tensor/parallel.h>
#include <lockstep/tensor/process.h>

namespace lockstep::data::detail {
namespace {

// Results of jobs 0 .. jobs-1, in order, computed by threads at most `ahead` jobs ahead of the
// taker.
class OrderedWorkers {
 public:
  using Job = std::function<std::shared_ptr<void>(int64_t)>;

  OrderedWorkers(int64_t jobs, int threads, int64_t ahead, Job job)
      : jobs_(jobs), job_(std::move(job)), slots_(static_cast<size_t>(ahead)) {
    try {
      for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { work(); });
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
    const LibraryThread counted;
    set_num_threads(1);  // the workers are the parallelism
    NoGradGuard no_grad;
    std::unique_lock lock(mutex_);
    for (;;) {
      emptied_.wait(
          lock, [&] { return closed_ || claimed_ - taken_ < static_cast<int64_t>(slots_.size()); });
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

}  // namespace

struct EpochRun::Body {
  LoaderOptions options;
  RandomSource random;
  LoaderState start;
  std::vector<int64_t> order;
  BatchPlan plan;
  std::shared_ptr<LoaderState> state;
  MakeBatch make;
  bool started = false;
  int64_t done = 0;
  std::unique_ptr<OrderedWorkers, OrderedWorkers::End> workers;  // last: it uses the others

  std::shared_ptr<void> batch(int64_t i) const {
    const Range part = plan.local(i);
    try {
      return make(std::span(order).subspan(static_cast<size_t>(part.begin),
                                           static_cast<size_t>(part.size())),
                  random);
    } catch (Error& e) {
      e.add_context(str_cat("in Loader: batch ", i, " of epoch ", random.epoch, ", samples ",
                            order[static_cast<size_t>(part.begin)], ", ... (", part.size(),
                            " of them)"));
      throw;
    }
  }
};

EpochRun::EpochRun(const LoaderOptions& options, int64_t samples, LoaderState start,
                   std::shared_ptr<LoaderState> state, MakeBatch make) {
  const RandomSource random{.seed = options.seed, .epoch = start.epoch};
  std::vector<int64_t> order = options.sampler ? options.sampler(start.epoch)
                                               : epoch_order(samples, random, options.shuffle);
  for (int64_t index : order)
    LOCKSTEP_CHECK(index >= 0 && index < samples, IndexError, "Loader: the sampler gave sample ",
                   index, " of ", samples);
  BatchPlan plan(static_cast<int64_t>(order.size()), options.batch_size, options.drop_last,
                 options.sampler ? Shard{} : options.shard, start.samples);
  body_ = std::make_unique<Body>(Body{.options = options,
                                      .random = random,
                                      .start = start,
                                      .order = std::move(order),
                                      .plan = plan,
                                      .state = std::move(state),
                                      .make = std::move(make),
                                      .workers = nullptr});
}

EpochRun::~EpochRun() = default;

int64_t EpochRun::batches() const { return body_->plan.batches(); }

void EpochRun::start() {
  Body& b = *body_;
  LOCKSTEP_CHECK(!b.started, Error,
                 "Loader: an epoch is walked once; call epoch() again for another pass");
  b.started = true;
  *b.state = b.start;
  if (b.options.workers == 0 || batches() == 0) return;
  const int threads = static_cast<int>(std::min<int64_t>(b.options.workers, batches()));
  const int64_t ahead = std::min(int64_t{b.options.workers} * b.options.prefetch, batches());
  b.workers.reset(new OrderedWorkers(batches(), threads, ahead,
                                     [&b](int64_t i) { return b.batch(i); }));
}

std::shared_ptr<void> EpochRun::next() {
  Body& b = *body_;
  if (b.done == batches()) {
    b.workers.reset();
    *b.state = {.epoch = b.random.epoch + 1, .samples = 0};
    return nullptr;
  }
  std::shared_ptr<void> batch;
  if (b.workers) {
    batch = b.workers->take();
  } else {
    NoGradGuard no_grad;
    batch = b.batch(b.done);
  }
  *b.state = {.epoch = b.random.epoch, .samples = b.plan.global(b.done).end};
  ++b.done;
  return batch;
}

namespace {
BatchPlan plan_of(const LoaderOptions& options, int64_t samples, LoaderState start) {
  if (!options.sampler)
    return BatchPlan(samples, options.batch_size, options.drop_last, options.shard, start.samples);
  return BatchPlan(static_cast<int64_t>(options.sampler(start.epoch).size()), options.batch_size,
                   options.drop_last, Shard{}, start.samples);
}
}  // namespace

int64_t check_options(const LoaderOptions& options, int64_t samples) {
  LOCKSTEP_CHECK(options.workers >= 0, ValueError, "Loader: workers must not be negative, got ",
                 options.workers);
  LOCKSTEP_CHECK(options.prefetch >= 1, ValueError, "Loader: prefetch must be at least 1, got ",
                 options.prefetch);
  LOCKSTEP_CHECK(
      !options.sampler || (!options.shuffle && options.shard.size == 1), ValueError,
      "Loader: a sampler decides the order and the rank's share; leave out shuffle and shard");
  return plan_of(options, samples, {}).batches();
}

void check_resume(const LoaderOptions& options, int64_t samples, LoaderState state) {
  LOCKSTEP_CHECK(state.epoch >= 0, ValueError, "Loader: epochs count from 0, got ", state.epoch);
  plan_of(options, samples, state);
}

NamedTensors state_dict_of(const LoaderOptions& options, int64_t samples, LoaderState state) {
  return {{"epoch", integer_entry(state.epoch)},
          {"samples", integer_entry(state.samples)},
          {"dataset_size", integer_entry(samples)},
          {"seed", integer_entry(static_cast<int64_t>(options.seed))},
          {"shuffle", integer_entry(options.shuffle)}};
}

LoaderState state_of(const LoaderOptions& options, int64_t samples, const NamedTensors& dict) {
  StateReader in("Loader", dict);
  const LoaderState state{.epoch = in.integer("epoch", 0), .samples = in.integer("samples", 0)};
  for (const auto& [name, here] : state_dict_of(options, samples, state)) {
    if (name == "epoch" || name == "samples") continue;
    const int64_t then = in.integer(name);
    LOCKSTEP_CHECK(then == here.item<int64_t>() || state.samples == 0, ValueError,
                   "Loader: the state was saved in the middle of an epoch with ", name, " ", then,
                   ", and here it is ", here.item<int64_t>(),
                   ", so the rest of the epoch would be other samples; make them equal, or resume "
                   "at the start of an epoch");
  }
  in.finish();
  return state;
}

LoaderState take_start(std::optional<LoaderState>& resume, int64_t epoch) {
  LOCKSTEP_CHECK(epoch >= 0, ValueError, "Loader: epochs count from 0, got ", epoch);
  if (!resume) return {.epoch = epoch, .samples = 0};
  LOCKSTEP_CHECK(resume->epoch == epoch, ValueError, "Loader: resume() asked for epoch ",
                 resume->epoch, " and epoch(", epoch,
                 ") was called; start the loop over epochs at state.epoch");
  return *std::exchange(resume, std::nullopt);
}

}  // namespace lockstep::data::detail
