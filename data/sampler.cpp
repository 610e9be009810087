// Cutting an epoch into batches and dealing it to ranks.
#include <lockstep/data/sampler.h>

#include <algorithm>
#include <limits>
#include <numeric>

#include <lockstep/tensor/warning.h>

namespace lockstep::data {
namespace {

void check_shard(std::string_view op, Shard shard) {
  LOCKSTEP_CHECK(shard.size >= 1 && shard.rank >= 0 && shard.rank < shard.size, ValueError, op,
                 ": a shard's rank is in [0, size), got rank ", shard.rank, " of ", shard.size);
}

}  // namespace

std::vector<int64_t> epoch_order(int64_t samples, const RandomSource& random, bool shuffle) {
  if (shuffle) return random_permutation(samples, random.key(0, Purpose::shuffle));
  std::vector<int64_t> order(static_cast<size_t>(samples));
  std::iota(order.begin(), order.end(), int64_t{0});
  return order;
}

Sampler::Order Sampler::operator()(int64_t epoch, int64_t done) const {
  if (rest_) return rest_(epoch, done);
  Order order = order_(epoch);
  LOCKSTEP_CHECK(done % shard_.size == 0, ValueError, "Sampler: ", done,
                 " samples are done, which is not the same number on each of ", shard_.size,
                 " ranks; keep batch_size * ranks, or resume at the next epoch");
  const int64_t mine = done / shard_.size;
  LOCKSTEP_CHECK(mine <= static_cast<int64_t>(order.size()), ValueError, "Sampler: ", mine,
                 " samples are done, and it gives ", order.size(),
                 "; was the state saved with another one?");
  order.erase(order.begin(), order.begin() + mine);
  return order;
}

BatchPlan::BatchPlan(int64_t samples, int64_t batch_size, bool drop_last, Shard shard,
                     int64_t start)
    : shard_(shard), batch_size_(batch_size), start_(start), end_(samples) {
  check_shard("BatchPlan", shard);
  LOCKSTEP_CHECK(batch_size >= 1 && batch_size <= std::numeric_limits<int64_t>::max() / shard.size,
                 ValueError, "BatchPlan: batch_size must be at least 1, got ", batch_size);
  LOCKSTEP_CHECK(start >= 0 && start <= samples, ValueError, "BatchPlan: cannot start at sample ",
                 start, " of ", samples, "; was the state saved with another dataset?");
  const int64_t global_size = batch_size * shard.size, left = samples - start;
  const int64_t full = left / global_size, remainder = left % global_size;
  if (drop_last) {
    LOCKSTEP_CHECK(full > 0 || start > 0, ValueError, "BatchPlan: drop_last leaves no batch of ",
                   samples, " samples: a full one needs ", batch_size, " x ", shard.size,
                   " ranks; use a smaller batch_size");
    batches_ = full;
    end_ -= remainder;
    return;
  }
  LOCKSTEP_CHECK(samples > 0, ValueError, "BatchPlan: there are no samples");
  LOCKSTEP_CHECK(left >= shard.size || left == 0, ValueError, "BatchPlan: ", left,
                 start > 0 ? " samples are left in this epoch" : " samples", ", fewer than ",
                 shard.size, " ranks; use fewer ranks",
                 start > 0 ? ", or resume at the next epoch" : "");
  const int64_t own = shard.size > 1 ? shard.size * std::min<int64_t>(batch_size, 2) : 1;
  batches_ = full + (remainder >= own || (full == 0 && left > 0) ? 1 : 0);
}

bool BatchPlan::has_single() const {
  if (shard_.size == 1 || batch_size_ == 1 || batches_ == 0) return false;
  return global(batches_ - 1).size() < 2 * int64_t{shard_.size};
}

Range BatchPlan::global(int64_t i) const {
  LOCKSTEP_CHECK(i >= 0 && i < batches_, IndexError, "BatchPlan: batch ", i,
                 " is out of range for ", batches_);
  const int64_t size = batch_size_ * shard_.size, begin = start_ + i * size;
  return {begin, i == batches_ - 1 ? end_ : begin + size};
}

Range BatchPlan::local(int64_t i) const {
  const Range all = global(i);
  const int64_t each = all.size() / shard_.size, more = all.size() % shard_.size;
  const int64_t begin = all.begin + shard_.rank * each + std::min<int64_t>(shard_.rank, more);
  return {begin, begin + each + (shard_.rank < more ? 1 : 0)};
}

DistributedSampler::DistributedSampler(int64_t samples, DistributedSamplerOptions options)
    : samples_(samples), options_(std::move(options)) {
  check_shard("DistributedSampler", options_.shard);
  LOCKSTEP_CHECK(samples >= 1, ValueError, "DistributedSampler: needs at least one sample, got ",
                 samples);
}

int64_t DistributedSampler::per_rank(int64_t samples) const {
  const int64_t ranks = options_.shard.size;
  return samples / ranks + (!options_.drop_last && samples % ranks != 0 ? 1 : 0);
}

void DistributedSampler::set_epoch(int64_t epoch) {
  epoch_ = epoch;
  epoch_was_set_ = true;
}

std::vector<int64_t> DistributedSampler::indices() {
  if (++passes_ == 2 && options_.shuffle && !epoch_was_set_) {
    warn(
        "DistributedSampler: a second pass begins and set_epoch was never called, so it sees the "
        "same order; call "
        "sampler.set_epoch(epoch) before each epoch");
  }
  return (*this)(epoch_);
}

std::vector<int64_t> DistributedSampler::operator()(int64_t epoch, int64_t done) const {
  // More than there are may be done, by as many as some number of ranks repeats.
  LOCKSTEP_CHECK(done >= 0 && done - samples_ < std::numeric_limits<int>::max(), ValueError,
                 "DistributedSampler: cannot go on after ", done, " of ", samples_, " samples");
  const std::vector<int64_t> order =
      epoch_order(samples_, {.seed = options_.seed, .epoch = epoch}, options_.shuffle);
  std::vector<int64_t> mine(static_cast<size_t>(per_rank(std::max<int64_t>(samples_ - done, 0))));
  int64_t position = done + options_.shard.rank;
  for (int64_t& index : mine) {
    index = order[static_cast<size_t>(position % samples_)];
    position += options_.shard.size;
  }
  return mine;
}

}  // namespace lockstep::data
