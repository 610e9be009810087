// Loader: batches of a dataset, epoch by epoch, made ahead of time by worker threads. What comes
// out depends on (seed, epoch) alone: not on the number of workers, and over all ranks not on their
// number either.
//
//   data::Loader loader{train, {.batch_size = 64, .shuffle = true, .workers = 2, .shard = group}};
//   for (int epoch = 0; epoch < 3; ++epoch)
//     for (auto [x, y] : loader.epoch(epoch)) ...
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <span>
#include <utility>

#include <lockstep/data/dataset.h>
#include <lockstep/data/sampler.h>
#include <lockstep/data/shard.h>
#include <lockstep/tensor/state_reader.h>

namespace lockstep::data {

struct LoaderOptions {
  int64_t batch_size = 1;  // samples a batch on this rank; over all ranks batch_size * shard.size
  bool shuffle = false;    // a new order each epoch
  int workers = 0;         // threads; 0 makes each batch in the loop itself
  int prefetch = 2;        // batches each worker may be ahead of the loop
  bool drop_last = false;  // leave out what does not fill a batch
  uint64_t seed = 0;       // of the order and of augmentation; the same on every rank
  Shard shard = {};        // a group converts to it
  Sampler sampler = {};    // this rank's order, in place of shuffle and shard
};

/// Where a loop stands. Valid at another number of ranks or workers while batch_size * ranks stays
/// the same.
struct LoaderState {
  int64_t epoch = 0;
  int64_t samples = 0;  // handed out in this epoch, over all ranks
  bool operator==(const LoaderState&) const = default;
};

namespace detail {

/// Makes batch i of an epoch from its samples.
using MakeBatch =
    std::function<std::shared_ptr<void>(std::span<const int64_t>, const RandomSource&)>;

/// One pass over an epoch: its order, its workers and the queue that puts their results in order
/// again.
class LOCKSTEP_API EpochRun {
 public:
  /// `state` is kept up to date: it counts a batch from the moment it is handed out.
  EpochRun(const LoaderOptions& options, int64_t samples, LoaderState start,
           std::shared_ptr<LoaderState> state, MakeBatch make);
  ~EpochRun();  // stops and joins the workers
  EpochRun(const EpochRun&) = delete;
  EpochRun& operator=(const EpochRun&) = delete;

  int64_t batches() const;
  void start();
  /// The next batch, or null after the last. Rethrows what the dataset threw, the workers joined.
  std::shared_ptr<void> next();

 private:
  struct Body;
  std::unique_ptr<Body> body_;
};

/// ValueError for options that make no sense together; the number of batches of a whole epoch.
LOCKSTEP_API int64_t check_options(const LoaderOptions& options, int64_t samples);
/// ValueError for a state from which these options and samples cannot go on.
LOCKSTEP_API void check_resume(const LoaderOptions& options, int64_t samples, LoaderState state);
LOCKSTEP_API NamedTensors state_dict_of(const LoaderOptions& options, int64_t samples,
                                        LoaderState state);
/// The inverse; ValueError when the dict, made in mid-epoch, is of another order of samples.
LOCKSTEP_API LoaderState state_of(const LoaderOptions& options, int64_t samples,
                                  const NamedTensors& dict);
/// Where `epoch` starts: at the state to resume, once, or at its beginning.
LOCKSTEP_API LoaderState take_start(std::optional<LoaderState>& resume, int64_t epoch);

/// How many batches this thread has taken from loaders with a shard, with grad mode on. The ranks of a
/// group take equally many; DistributedDataParallel finds a rank that left one out.
LOCKSTEP_API uint64_t sharded_batches_for_training() noexcept;

}  // namespace detail

/// The batches of one epoch, to be walked once. Leaving the loop early stops the workers.
template <class Batch>
class Epoch {
 public:
  class Iterator {
   public:
    using iterator_concept = std::input_iterator_tag;
    using difference_type = std::ptrdiff_t;
    using value_type = Batch;

    Iterator() = default;
    explicit Iterator(detail::EpochRun* run) : run_(run), batch_(run->next()) {}
    Batch& operator*() const { return *static_cast<Batch*>(batch_.get()); }
    Iterator& operator++() {
      batch_.reset();  // its memory serves the next one
      batch_ = run_->next();
      return *this;
    }
    void operator++(int) { ++*this; }
    bool operator==(std::default_sentinel_t) const { return !batch_; }

   private:
    detail::EpochRun* run_ = nullptr;
    std::shared_ptr<void> batch_;
  };

  explicit Epoch(std::unique_ptr<detail::EpochRun> run) : run_(std::move(run)) {}
  /// Starts the workers; once only.
  Iterator begin() {
    run_->start();
    return Iterator(run_.get());
  }
  std::default_sentinel_t end() const { return {}; }
  /// Batches of this pass: the same on every rank.
  int64_t size() const { return run_->batches(); }

 private:
  std::unique_ptr<detail::EpochRun> run_;
};

template <Dataset D>
class Loader {
 public:
  using Batch = BatchOf<D>;

  /// The dataset is copied in (tensors inside are shared); one that cannot be copied is moved in,
  /// or given as a shared_ptr. Throws ValueError for fewer samples than ranks, or options that make
  /// no sense.
  explicit Loader(D dataset, LoaderOptions options = {})
      : Loader(std::make_shared<const D>(std::move(dataset)), std::move(options)) {}
  explicit Loader(std::shared_ptr<const D> dataset, LoaderOptions options = {})
      : dataset_(std::move(dataset)), options_(std::move(options)) {
    batches_ = detail::check_options(options_, dataset_->size());
  }

  const D& dataset() const { return *dataset_; }
  const LoaderOptions& options() const { return options_; }
  /// Batches of a whole epoch: the same on every rank.
  int64_t size() const { return batches_; }

  /// A pass over epoch `epoch` (from 0), from its beginning unless resume() said otherwise.
  data::Epoch<Batch> epoch(int64_t epoch) {
    auto make = [dataset = dataset_](std::span<const int64_t> indices, const RandomSource& random) {
      return std::static_pointer_cast<void>(
          std::make_shared<Batch>(fetch(*dataset, indices, random)));
    };
    return data::Epoch<Batch>(std::make_unique<detail::EpochRun>(
        options_, dataset_->size(), detail::take_start(resume_, epoch), state_, std::move(make)));
  }

  /// Where the loop stands, the batch in hand counted as done; after the last one, the start of the
  /// next epoch.
  LoaderState state() const { return *state_; }
  /// Makes epoch(state.epoch) go on after state.samples; the loop over epochs starts there.
  /// ValueError, and no change, when there is nothing to go on with: more samples than there are.
  void resume(LoaderState state) {
    detail::check_resume(options_, dataset_->size(), state);
    resume_ = state;
    if (state == LoaderState()) resume_.reset();
    *state_ = state;
  }
  /// The state as tensors, with what decides the order: seed, shuffle and the number of samples.
  NamedTensors state_dict() const {
    return detail::state_dict_of(options_, dataset_->size(), *state_);
  }
  /// resume(), once it is known that the order of samples is the same.
  void load_state_dict(const NamedTensors& state) {
    resume(detail::state_of(options_, dataset_->size(), state));
  }

 private:
  std::shared_ptr<const D> dataset_;
  LoaderOptions options_;
  int64_t batches_ = 0;
  std::shared_ptr<LoaderState> state_ = std::make_shared<LoaderState>();
  std::optional<LoaderState> resume_;
};
template <class D>
Loader(std::shared_ptr<D>, LoaderOptions = {}) -> Loader<std::remove_const_t<D>>;

}  // namespace lockstep::data
