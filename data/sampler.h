// Samplers: the order of an epoch's samples and their division among ranks. The order is a
// permutation of the whole set that depends on (seed, epoch) alone; BatchPlan cuts it into global
// batches and each of these into one piece per rank, without repeating a sample. DistributedSampler
// is PyTorch's, for its rule.
#pragma once

#include <cstdint>
#include <functional>
#include <type_traits>
#include <utility>
#include <vector>

#include <lockstep/data/random_source.h>
#include <lockstep/data/shard.h>

namespace lockstep::data {

/// This rank's samples of an epoch, in order: any function f(epoch). If it has a member shard(), the
/// whole order is divided among that many ranks in turns, and if it can also be called as
/// f(epoch, done), that returns this rank's part of what follows the first `done` samples of the
/// whole order. With both, as in DistributedSampler, a loader's state is valid at any other number
/// of ranks.
class Sampler {
 public:
  using Order = std::vector<int64_t>;

  Sampler() = default;
  template <class F>
  requires(!std::is_same_v<F, Sampler> && std::is_invocable_r_v<Order, F&, int64_t>) Sampler(F f) {
    if constexpr (requires { Shard(f.shard()); }) shard_ = f.shard();
    if constexpr (std::is_invocable_r_v<Order, F&, int64_t, int64_t>)
      rest_ = std::move(f);
    else
      order_ = std::move(f);
  }

  explicit operator bool() const { return order_ || rest_; }
  /// What is left for this rank after `done` samples of all ranks. Where f takes the epoch alone,
  /// ValueError if that is not the same number on each rank, or more than f returns.
  LOCKSTEP_API Order operator()(int64_t epoch, int64_t done = 0) const;
  /// Of all ranks together where f has no shard().
  Shard shard() const { return shard_; }

 private:
  std::function<Order(int64_t)> order_;
  std::function<Order(int64_t, int64_t)> rest_;  // one of the two
  Shard shard_;
};

/// 0 .. samples-1, shuffled by (seed, epoch) or as they come. The same on every rank.
LOCKSTEP_API std::vector<int64_t> epoch_order(int64_t samples, const RandomSource& random,
                                              bool shuffle);

/// Positions [begin, end) in an epoch's order.
struct Range {
  int64_t begin = 0, end = 0;
  int64_t size() const { return end - begin; }
  bool operator==(const Range&) const = default;
};

/// How positions `start` .. `samples` are cut into global batches of batch_size * shard.size, and
/// these into the ranks' pieces: consecutive in rank order, sizes differing by at most one. Every
/// rank has the same number of batches. On several ranks the remainder is a batch of its own only if
/// each rank gets two samples of it (one, if batch_size is 1), since batch norm cannot train on one.
/// Else it joins the last full batch, which then has up to two samples more on each rank. On one rank
/// any remainder is a batch, as in PyTorch. With drop_last only full batches count.
class LOCKSTEP_API BatchPlan {
 public:
  /// ValueError when there are fewer samples than ranks (nothing left at all is fine when start >
  /// 0), for batch_size < 1 and for a rank outside its size.
  BatchPlan(int64_t samples, int64_t batch_size, bool drop_last, Shard shard, int64_t start = 0);

  int64_t batches() const { return batches_; }
  /// Whether some rank gets a batch of one sample although batch_size and ranks are more than one:
  /// too few samples are left for two each.
  bool has_single() const;
  /// The positions of batch i over all ranks.
  Range global(int64_t i) const;
  /// This rank's part of them.
  Range local(int64_t i) const;

 private:
  Shard shard_;
  int64_t batch_size_, start_, end_, batches_;
};

struct DistributedSamplerOptions {
  Shard shard = {};
  bool shuffle = true;
  uint64_t seed = 0;       // the same on every rank
  bool drop_last = false;  // cut the tail that does not divide, instead of repeating samples
};

/// torch.utils.data.DistributedSampler: rank r takes r, r + W, r + 2W, ... of the whole order,
/// padded by its own beginning so that all ranks have ceil(n / W), or cut to floor(n / W) with
/// drop_last. Padding counts samples twice: for evaluation use the loader's own sharding, which
/// does not.
///
///   data::DistributedSampler sampler{train.size(), {.shard = group}};
///   data::Loader loader{train, {.batch_size = 64, .sampler = sampler}};  // sets its epochs itself
class LOCKSTEP_API DistributedSampler {
 public:
  explicit DistributedSampler(int64_t samples, DistributedSamplerOptions options = {});

  Shard shard() const { return options_.shard; }
  /// Samples of one rank.
  int64_t size() const { return per_rank(samples_); }
  void set_epoch(int64_t epoch);
  /// This rank's samples in the order of the epoch that was set; without set_epoch always the same,
  /// of which the second call warns once.
  std::vector<int64_t> indices();
  /// The same for a given epoch, and of what follows the first `done` samples of the whole order,
  /// which any number of ranks may have done. Makes it a Sampler.
  std::vector<int64_t> operator()(int64_t epoch, int64_t done = 0) const;

 private:
  int64_t per_rank(int64_t samples) const;

  int64_t samples_;
  DistributedSamplerOptions options_;
  int64_t epoch_ = 0;
  int64_t passes_ = 0;
  bool epoch_was_set_ = false;
};

}  // namespace lockstep::data
