// Loader: batches of a dataset, epoch by epoch, prepared ahead of time by worker threads. Batches
// depend on (seed, epoch) alone: not on the number of workers, and over all ranks not on their number
// either, except for the end of an epoch (see BatchPlan).
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
#include <span>
#include <typeinfo>
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
  uint64_t seed = 0;       // of the order and of augmentation, on every rank; not manual_seed's
  Shard shard = {};        // a group converts to it
  Sampler sampler = {};    // this rank's order, in place of shuffle and shard
};

/// Position in an epoch. Valid at any other batch size and number of workers and ranks, of which
/// there must not be more than samples left: these are divided anew. With a sampler that has no
/// shard() (see Sampler), at the same number of ranks only.
struct LoaderState {
  int64_t epoch = 0;
  int64_t samples = 0;  // handed out in this epoch, over all ranks; the first so many of the order
  bool operator==(const LoaderState&) const = default;
};

namespace detail {

/// Makes batch i of an epoch from its samples.
using MakeBatch =
    std::function<std::shared_ptr<void>(std::span<const int64_t>, const RandomSource&)>;

/// A loader's position, shared with its passes. The pass that began last updates it.
struct Position {
  LoaderState state = {};
  bool resuming = false;  // the next pass starts at `state`
  int64_t passes = 0;     // begun, or cut off by resume()
};

/// One pass over an epoch: its order, its workers and the queue that puts their results in order
/// again.
class LOCKSTEP_API EpochRun {
 public:
  /// `dataset` is its type, for errors.
  EpochRun(const LoaderOptions& options, int64_t samples, int64_t epoch,
           std::shared_ptr<Position> position, MakeBatch make, const std::type_info& dataset);
  ~EpochRun();  // stops and joins the workers
  EpochRun(const EpochRun&) = delete;
  EpochRun& operator=(const EpochRun&) = delete;

  int64_t batches() const;
  void start();
  /// The next batch, or null after the last. Rethrows what the dataset threw, the workers joined;
  /// later calls throw an Error.
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

/// How many batches this thread has taken from loaders with a shard, with grad mode on. The ranks of a
/// group take equally many; DistributedDataParallel finds a rank that left one out.
LOCKSTEP_API uint64_t sharded_batches_for_training() noexcept;

}  // namespace detail

/// The batches of one epoch, for one loop. Leaving the loop early stops the workers. After an
/// exception this pass is over; the loader's state is the position of the batch that failed, and
/// loader.resume(loader.state()) makes the next pass start there.
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
  /// or given as a shared_ptr. Throws ValueError for no samples, fewer samples than ranks, or
  /// options that contradict each other; warns when the only batch leaves a rank one sample.
  explicit Loader(D dataset, LoaderOptions options = {})
      : Loader(std::make_shared<const D>(std::move(dataset)), std::move(options)) {}
  explicit Loader(std::shared_ptr<const D> dataset, LoaderOptions options = {})
      : dataset_(std::move(dataset)), options_(std::move(options)) {
    batches_ = detail::check_options(options_, dataset_->size());
  }

  /// A copy has a position of its own. Moving keeps running passes.
  Loader(const Loader& other)
      : dataset_(other.dataset_),
        options_(other.options_),
        batches_(other.batches_),
        position_(std::make_shared<detail::Position>(*other.position_)) {}
  Loader(Loader&&) noexcept = default;
  Loader& operator=(Loader other) noexcept {
    std::swap(dataset_, other.dataset_);
    std::swap(options_, other.options_);
    std::swap(batches_, other.batches_);
    std::swap(position_, other.position_);
    return *this;
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
        options_, dataset_->size(), epoch, position_, std::move(make), typeid(D)));
  }

  /// The position of the pass that began last, after the current batch; after the last batch, the
  /// start of the next epoch.
  LoaderState state() const { return position_->state; }
  /// Makes the next pass, which must be epoch(state.epoch), start after state.samples. ValueError, and
  /// no change, for more samples than there are, and for fewer left than ranks.
  void resume(LoaderState state) {
    detail::check_resume(options_, dataset_->size(), state);
    *position_ = {state, state != LoaderState(), position_->passes + 1};
  }
  /// The state as tensors, with what decides the order: seed, shuffle (2: a sampler) and the number
  /// of samples.
  NamedTensors state_dict() const {
    return detail::state_dict_of(options_, dataset_->size(), position_->state);
  }
  /// resume(), once it is known that the order of samples is the same.
  void load_state_dict(const NamedTensors& state) {
    resume(detail::state_of(options_, dataset_->size(), state));
  }

 private:
  std::shared_ptr<const D> dataset_;
  LoaderOptions options_;
  int64_t batches_ = 0;
  std::shared_ptr<detail::Position> position_ = std::make_shared<detail::Position>();
};
template <class D>
Loader(std::shared_ptr<D>, LoaderOptions = {}) -> Loader<std::remove_const_t<D>>;

}  // namespace lockstep::data
