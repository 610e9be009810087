// The type-erased part of Loader: the plan of a pass, and the pass itself, with its batches made by
// the loop or by workers (ordered_workers.h).
#include <lockstep/data/loader.h>

#include <algorithm>
#include <vector>

#include <lockstep/data/ordered_workers.h>
#include <lockstep/tensor/error_context.h>
#include <lockstep/tensor/node.h>
#include <lockstep/tensor/warning.h>

namespace lockstep::data::detail {
namespace {

/// What the sampler has left for this rank when a pass starts at `start`.
std::vector<int64_t> sampled(const LoaderOptions& options, LoaderState start) {
  std::vector<int64_t> order;
  try {
    order = options.sampler(start.epoch, start.samples);
  } catch (...) {
    lockstep::detail::rethrow_with_context(
        str_cat("in Loader: the sampler, for epoch ", start.epoch));
  }
  return order;
}

/// Of a pass that starts at `start`. With a sampler, which has `left` samples for this rank, it cuts
/// these alone, and positions count from start.samples.
BatchPlan plan_of(const LoaderOptions& options, int64_t samples, int64_t left, LoaderState start) {
  if (options.sampler)
    return {start.samples + left, options.batch_size, options.drop_last, Shard{}, start.samples};
  return {samples, options.batch_size, options.drop_last, options.shard, start.samples};
}

/// The plan of a pass that has not begun; warns of what it cannot do well.
BatchPlan checked_plan(const LoaderOptions& options, int64_t samples, LoaderState start) {
  LOCKSTEP_CHECK(samples >= 0, ValueError, "Loader: the dataset's size() is ", samples);
  const int64_t left = options.sampler ? static_cast<int64_t>(sampled(options, start).size())
                                       : samples - start.samples;
  const BatchPlan plan = plan_of(options, samples, left, start);
  const Shard shard = options.sampler ? options.sampler.shard() : options.shard;
  if (shard.rank > 0) return plan;
  if (plan.has_single())
    warn(
        "Loader: ", left, " samples for ", shard.size,
        " ranks leave some rank a batch of one, on which batch norm cannot train; use fewer ranks");
  if (options.sampler && shard.size > 1 && options.batch_size > 1 && plan.batches() > 0 &&
      plan.global(plan.batches() - 1).size() == 1)
    warn("Loader: the sampler gives each of ", shard.size, " ranks ", left,
         " samples, so batches of ", options.batch_size,
         " end with a batch of one, on which batch norm cannot train; use shard in place of the "
         "sampler, another batch_size, or drop_last");
  return plan;
}

std::string listed(std::span<const int64_t> indices) {
  constexpr size_t kMost = 8;
  std::string text;
  for (size_t i = 0; i < indices.size() && i < kMost; ++i)
    text += str_cat(i ? ", " : "", indices[i]);
  return indices.size() > kMost ? str_cat(text, ", ... (", indices.size(), " of them)") : text;
}

}  // namespace

struct EpochRun::Body {
  LoaderOptions options;
  RandomSource random;
  LoaderState start;
  std::vector<int64_t> order;
  int64_t first = 0;  // the position that order begins at
  BatchPlan plan;
  std::shared_ptr<Position> position;
  MakeBatch make;
  std::string dataset;
  int64_t pass = 0;  // 0: not begun
  bool failed = false;
  int64_t done = 0;
  std::unique_ptr<OrderedWorkers, OrderedWorkers::End> workers;  // last: it uses the others

  std::shared_ptr<void> batch(int64_t i) const {
    const Range part = plan.local(i);
    const auto indices = std::span(order).subspan(static_cast<size_t>(part.begin - first),
                                                  static_cast<size_t>(part.size()));
    try {
      return make(indices, random);
    } catch (...) {
      lockstep::detail::rethrow_with_context(str_cat("in Loader: batch ", i, " of epoch ",
                                                     random.epoch, ", samples ", listed(indices),
                                                     ", of ", dataset));
    }
  }
  void move_to(LoaderState state) {
    if (position->passes == pass) position->state = state;
  }
};

EpochRun::EpochRun(const LoaderOptions& options, int64_t samples, int64_t epoch,
                   std::shared_ptr<Position> position, MakeBatch make,
                   const std::type_info& dataset) {
  LOCKSTEP_CHECK(epoch >= 0, ValueError, "Loader: epochs count from 0, got ", epoch);
  const LoaderState start =
      position->resuming ? position->state : LoaderState{.epoch = epoch, .samples = 0};
  LOCKSTEP_CHECK(start.epoch == epoch, ValueError, "Loader: resume() asked for epoch ", start.epoch,
                 " and epoch(", epoch, ") was called; start the loop over epochs at state.epoch");
  const RandomSource random{.seed = options.seed, .epoch = epoch};
  std::vector<int64_t> order =
      options.sampler ? sampled(options, start) : epoch_order(samples, random, options.shuffle);
  for (int64_t index : order)
    LOCKSTEP_CHECK(index >= 0 && index < samples, IndexError, "Loader: the sampler gave sample ",
                   index, " of ", samples);
  const BatchPlan plan = plan_of(options, samples, static_cast<int64_t>(order.size()), start);
  body_ = std::make_unique<Body>(Body{.options = options,
                                      .random = random,
                                      .start = start,
                                      .order = std::move(order),
                                      .first = options.sampler ? start.samples : 0,
                                      .plan = plan,
                                      .position = std::move(position),
                                      .make = std::move(make),
                                      .dataset = lockstep::detail::type_name(dataset),
                                      .workers = nullptr});
}

EpochRun::~EpochRun() = default;

int64_t EpochRun::batches() const { return body_->plan.batches(); }

void EpochRun::start() {
  Body& b = *body_;
  LOCKSTEP_CHECK(b.pass == 0, Error,
                 "Loader: an epoch serves one loop; call epoch() again for another pass");
  if (b.options.workers > 0 && batches() > 0) {
    const int threads = static_cast<int>(std::min<int64_t>(b.options.workers, batches()));
    const int64_t ahead = std::min(int64_t{b.options.workers} * b.options.prefetch, batches());
    b.workers.reset(
        new OrderedWorkers(batches(), threads, ahead, [&b](int64_t i) { return b.batch(i); }));
  }
  b.pass = ++b.position->passes;
  b.position->state = b.start;
  b.position->resuming = false;
}

namespace {
thread_local uint64_t batches_for_training = 0;
}

uint64_t sharded_batches_for_training() noexcept { return batches_for_training; }

std::shared_ptr<void> EpochRun::next() {
  Body& b = *body_;
  LOCKSTEP_CHECK(!b.failed, Error,
                 "Loader: this pass ended with an error; call epoch() for another, after "
                 "loader.resume(loader.state()) to go on where it stopped");
  if (b.done == batches()) {
    b.workers.reset();
    b.move_to({.epoch = b.random.epoch + 1, .samples = 0});
    return nullptr;
  }
  std::shared_ptr<void> batch;
  b.failed = true;  // unless it succeeds
  if (b.workers) {
    batch = b.workers->take();
  } else {
    NoGradGuard no_grad;
    batch = b.batch(b.done);
  }
  b.failed = false;
  // With a sampler the plan is this rank's alone.
  const int ranks = b.options.sampler ? b.options.sampler.shard().size : 1;
  const int64_t handed_out = (b.plan.global(b.done).end - b.start.samples) * ranks;
  b.move_to({.epoch = b.random.epoch, .samples = b.start.samples + handed_out});
  ++b.done;
  if (b.options.shard.size > 1 && is_grad_enabled()) ++batches_for_training;
  return batch;
}

int64_t check_options(const LoaderOptions& options, int64_t samples) {
  LOCKSTEP_CHECK(options.workers >= 0, ValueError, "Loader: workers must not be negative, got ",
                 options.workers);
  LOCKSTEP_CHECK(options.prefetch >= 1, ValueError, "Loader: prefetch must be at least 1, got ",
                 options.prefetch);
  LOCKSTEP_CHECK(
      !options.sampler || (!options.shuffle && options.shard.size == 1), ValueError,
      "Loader: a sampler decides the order and the rank's share; leave out shuffle and shard");
  return checked_plan(options, samples, {}).batches();
}

void check_resume(const LoaderOptions& options, int64_t samples, LoaderState state) {
  LOCKSTEP_CHECK(state.epoch >= 0, ValueError, "Loader: epochs count from 0, got ", state.epoch);
  LOCKSTEP_CHECK(state.samples >= 0, ValueError, "Loader: cannot resume after ", state.samples,
                 " samples");
  checked_plan(options, samples, state);
}

NamedTensors state_dict_of(const LoaderOptions& options, int64_t samples, LoaderState state) {
  return {{"epoch", integer_entry(state.epoch)},
          {"samples", integer_entry(state.samples)},
          {"dataset_size", integer_entry(samples)},
          {"seed", integer_entry(static_cast<int64_t>(options.seed))},
          {"shuffle", integer_entry(options.sampler ? 2 : options.shuffle)}};
}

LoaderState state_of(const LoaderOptions& options, int64_t samples, const NamedTensors& dict) {
  StateReader in("Loader", dict);
  const LoaderState state{.epoch = in.integer("epoch", 0), .samples = in.integer("samples", 0)};
  for (const auto& [name, here] : state_dict_of(options, samples, state)) {
    if (name == "epoch" || name == "samples") continue;
    const int64_t then = in.integer(name);
    LOCKSTEP_CHECK(
        then == here.item<int64_t>() || state.samples == 0, ValueError,
        "Loader: the state was saved in the middle of an epoch with ", name, " ", then,
        ", and here it is ", here.item<int64_t>(),
        ", so the remaining samples of the epoch would be others; make them equal, or resume "
        "at the start of an epoch");
  }
  in.finish();
  return state;
}

}  // namespace lockstep::data::detail
