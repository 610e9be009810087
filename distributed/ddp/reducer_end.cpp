// Reducer: the end of a round. Communication completes first, on every rank alike; only then are the
// records checked, so that a fault of one rank is an error on all and leaves the group usable.
#include <algorithm>

#include <lockstep/data/loader.h>
#include <lockstep/distributed/ddp/reducer.h>
#include <lockstep/tensor/warning.h>

namespace lockstep::dist {

void Reducer::finish_round() {
  try {
    complete_round();
    settle_gradients();
    take_buffers();
    end_counts();
    check_records();
  } catch (...) {
    remember_failure("backward");
    drop_gradients();
    end_counts();
    throw;
  }
  if (lowest_active() < 0) return;  // join's last round: no rank contributed
  last_active_ = lowest_active();
  remember_graph();
  choose_compared();
  if (!std::exchange(rebuilt_, true)) rebuild_buckets();
  note_standing();
  forget_failure();
}

/// What a static graph repeats: of each rank its first record with inputs, inside join or not.
void Reducer::remember_graph() {
  if (first_.empty()) first_ = records_;
  for (size_t r = 0; r < first_.size(); ++r) {
    if (first_[r].is_finished() && !records_[r].is_finished()) first_[r] = records_[r];
    if (!first_[r].is_finished()) first_[r].join = ControlRecord::Join::none;
    first_[r].since = {};
    first_[r].sample = {};
  }
}

void Reducer::complete_round() {
  advance();
  const double start = now();
  try {
    while (next_launch_ < buckets_.size()) launch(next_launch_++);
    for (size_t b = 0; b < works_.size(); ++b) {
      works_[b]->wait();
      if (stats_.buckets[b].completed_after < 0)
        stats_.buckets[b].seconds = now() - launched_at_[b];
    }
    records_.clear();
    if (posts_records()) collect_records();
    if (join_ && options_.broadcast_buffers && lowest_active() >= 0) exchange_buffers();
    if (buffer_work_) buffer_work_->wait();
  } catch (...) {
    abort_backward();  // where the group itself failed its other ranks know, and ignore it
    throw;
  }
  if (!posts_records()) records_ = first_;
  stats_.final_wait = now() - start;
  stats_.backward = now() - backward_started_;
  ++stats_.synchronised_backwards;
}

/// The lowest rank that gave gradients in this round; -1 when none did.
int Reducer::lowest_active() const {
  for (size_t r = 0; r < records_.size(); ++r)
    if (!records_[r].is_finished()) return static_cast<int>(r);
  return -1;
}

void Reducer::settle_gradients() {
  NoGradGuard guard;
  double scale = 1;
  if (join_ && !join_->divide_by_initial_world_size) {
    const auto active = std::count_if(records_.begin(), records_.end(),
                                      [](const auto& r) { return !r.is_finished(); });
    if (active > 0) scale = static_cast<double>(group_->size()) / static_cast<double>(active);
  }
  for (size_t i = 0; i < parameters_.size(); ++i) {
    Leaf& leaf = *parameters_[i].leaf;
    if (is_used(records_, i)) {
      if (scale != 1) slots_[i].mul_(scale);
      leaf.gradient = slots_[i];
      leaf.accumulated = false;
    } else if (kept_[i].defined()) {
      slots_[i].copy_(kept_[i]);  // unused on every rank: the gradient is as before
    }
  }
}

/// Without records nobody else can see that this rank leaves the static graph: thrown before it takes
/// part in the first bucket, it ends the backward on every rank.
void Reducer::check_graph() const {
  std::vector<ControlRecord> now = first_;
  ControlRecord& mine = now[static_cast<size_t>(group_->rank())] = mine_;
  mine.since = {};  // only all ranks together could compare it
  const std::string fault = find_fault(now, first_, names_, options_);
  if (!fault.empty()) lockstep::fail<DistError>(fault);
}

void Reducer::check_records() {
  // What the statistics say of unused parameters, and whether a static graph would do.
  stats_.unused.assign(records_.size(), {});
  bool unused = false;
  for (size_t r = 0; r < records_.size(); ++r)
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (!records_[r].used[i]) {
        stats_.unused[r].push_back(names_.parameters[i]);
        unused |= is_trained(records_, i);
      }
      if (!first_.empty() && !first_[r].is_finished() && !records_[r].is_finished())
        stats_.static_graph_is_safe &= records_[r].used[i] == first_[r].used[i];
    }
  const auto local = [&](size_t r) { return records_[r].since.local_backwards; };
  for (size_t r = 1; r < records_.size(); ++r)
    if (local(r) != local(0) && !exact_windows_ && !join_ && group_->rank() == 0 &&
        !std::exchange(warned_counts_, true))
      warn("DDP: rank 0 accumulated ", local(0), " local backwards before this reduction, rank ", r,
           " ", local(r), "; the average weighs them alike");
  if (!std::exchange(warned_unused_, true) && options_.find_unused_parameters && !unused &&
      group_->rank() == 0)
    warn(
        "DDP: find_unused_parameters is set and the first step used every parameter; leave it "
        "off unless later steps differ");

  std::string fault = find_fault(records_, first_, names_, options_);
  if (fault.empty() && join_ && join_->throw_on_early_termination && lowest_active() >= 0)
    for (size_t r = 0; r < records_.size() && fault.empty(); ++r)
      if (records_[r].is_finished())
        fault = str_cat("DDP: join: rank ", r,
                        " has no more inputs, and throw_on_early_termination is set");
  if (fault.empty() && posts_records()) fault = find_replica_fault();
  if (!fault.empty()) lockstep::fail<DistError>(fault);
}

void Reducer::end_counts() {
  local_backwards_ = 0;
  forwards_ = 0;
  versions_before_ = replica_versions();
  forward_log_.clear();
  first_batch_ = data::detail::sharded_batches_for_training();
}

/// Once, after the first reduction: buckets in the order in which rank 0's gradients arrived.
void Reducer::rebuild_buckets() {
  std::vector<int> order = arrival_order_;
  for (const Bucket& b : buckets_)
    for (int i : b.parameters)
      if (!arrived_[static_cast<size_t>(i)]) order.push_back(i);
  Tensor agreed = tensor(std::vector<int32_t>(order.begin(), order.end()));
  group_->broadcast(agreed, 0, {.label = "DDP's order of buckets"})->wait();
  auto planned = plan_buckets(parameters_, agreed.to_vector<int>(), caps_);
  const bool same =
      std::equal(planned.begin(), planned.end(), buckets_.begin(), buckets_.end(),
                 [](const Bucket& a, const Bucket& b) { return a.parameters == b.parameters; });
  if (same) return;
  NoGradGuard guard;
  try {
    place_buckets(*group_, parameters_, planned, slots_);
    buckets_ = std::move(planned);
    traces_fit_ = false;
  } catch (const OutOfMemory& e) {
    warn("DDP: keeps its first bucket layout, because the new one found no memory: ", e.what());
  }
}

void Reducer::scale_reduced(double factor) {
  NoGradGuard guard;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!is_used(records_, i)) continue;
    detach_holders(i);
    slots_[i].mul_(factor);
  }
}

void Reducer::drop_gradients() {
  for (Replicated& p : parameters_) p.leaf->zero_grad(true);
  end_counts();
}

// ---- rounds without a backward ----

void Reducer::reduce_now(bool counts_as_used) {
  LOCKSTEP_CHECK(phase_ == Phase::idle, DistError, "DDP: reduce_now inside a backward");
  phase_ = Phase::syncing;
  reset_round({});
  if (counts_as_used && !options_.find_unused_parameters && !options_.static_graph)
    for (size_t i = 0; i < reached_.size(); ++i)
      reached_[i] = parameters_[i].parameter.requires_grad();
  phase_ = Phase::idle;
  finish_round();
}

bool Reducer::shadow_round() {
  for (const Replicated& p : parameters_)
    if (p.parameter.requires_grad()) p.leaf->zero_grad(true);
  end_counts();
  shadowing_ = true;
  try {
    reduce_now();
  } catch (...) {
    shadowing_ = false;
    throw;
  }
  shadowing_ = false;
  return lowest_active() >= 0;
}

// ---- buffers ----

void Reducer::exchange_buffers() {
  const NamedTensors mine = buffers();
  if (mine.empty()) return;
  const int root = join_ ? lowest_active() : 0;
  buffer_bytes_ = pack(mine);
  buffer_work_ = group_->broadcast(
      buffer_bytes_, root, {.label = str_cat("DDP's broadcast of rank ", root, "'s buffers")});
}

void Reducer::take_buffers() {
  if (!buffer_work_) return;
  const int root = join_ ? lowest_active() : 0;
  if (group_->rank() != root) unpack_fresh(buffer_bytes_, buffers());
  buffer_work_ = nullptr;
  buffer_bytes_ = Tensor();
}

void Reducer::sync_buffers() {
  const NamedTensors mine = buffers();
  if (mine.empty()) return;
  Tensor bytes = pack(mine);
  group_->broadcast(bytes, 0, {.label = "DDP's sync_buffers"})->wait();
  if (group_->rank() != 0) unpack_fresh(bytes, mine);
}

DdpStats Reducer::stats() const {
  DdpStats s = stats_;
  for (int i : arrival_order_) s.arrival_order.push_back(names_.parameters[static_cast<size_t>(i)]);
  for (const Bucket& b : buckets_) s.gradient_bytes += b.bytes();
  return s;
}

}  // namespace lockstep::dist
