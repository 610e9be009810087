// Reducer: construction, forwards, and the launches of a round.
#include <lockstep/distributed/ddp/reducer.h>

#include <algorithm>
#include <chrono>
#include <cstdio>

#include <lockstep/data/loader.h>
#include <lockstep/distributed/failure_note.h>
#include <lockstep/distributed/log.h>
#include <lockstep/tensor/warning.h>

namespace lockstep::dist {

namespace {

BucketCaps caps_of(const DistributedDataParallelOptions& o) {
  auto bytes = [](double mb) { return static_cast<size_t>(std::max(0.0, mb) * 1024 * 1024); };
  return {bytes(o.first_bucket_mb), bytes(o.bucket_cap_mb)};
}

NamedTensors without(const NamedTensors& all, const std::vector<std::string>& ignored) {
  NamedTensors rest;
  for (const auto& entry : all)
    if (std::find(ignored.begin(), ignored.end(), entry.first) == ignored.end())
      rest.push_back(entry);
  return rest;
}

/// Of the exception that is being handled.
std::string text_of_exception() {
  try {
    if (std::current_exception()) throw;
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "an exception that is no std::exception";
  }
  return "an exception";
}

}  // namespace

// ---- construction ----

Reducer::Reducer(std::shared_ptr<ProcessGroup> group,
                 std::function<NamedTensors()> current_parameters,
                 std::function<NamedTensors()> current_buffers,
                 DistributedDataParallelOptions options)
    : users_group_(std::move(group)),
      group_(users_group_->child()),
      replicated_(without(current_parameters(), options.ignored)),
      current_parameters_(std::move(current_parameters)),
      current_buffers_(std::move(current_buffers)),
      options_(std::move(options)),
      caps_(caps_of(options_)),
      flag_(users_group_->rank(), [this] { return parameter_versions(); }) {
  const NamedTensors parameters = current_parameters_(), all_buffers = current_buffers_();
  if (options_.init_sync) verify_same_module(*group_, parameters, all_buffers, options_);
  for (const std::string& name : options_.ignored) {
    const auto known = [&](const NamedTensors& list) {
      return std::any_of(list.begin(), list.end(), [&](const auto& e) { return e.first == name; });
    };
    LOCKSTEP_CHECK(known(parameters) || known(all_buffers), ValueError,
                   "DistributedDataParallel: ignored names \"", name,
                   "\", which is no parameter or buffer of the module");
  }
  for (const auto& [name, p] : replicated_) {
    if (!p.requires_grad()) {
      frozen_.emplace_back(name, p);
      names_.frozen.push_back(name);
      continue;
    }
    parameters_.push_back({name, p, Ref<Leaf>(p.leaf())});
    names_.parameters.push_back(name);
  }
  LOCKSTEP_CHECK(!parameters_.empty(), DistError,
                 "DistributedDataParallel: the module has no parameter that requires grad; use it "
                 "without the wrapper");
  // Faults that every rank detects alike are thrown before the next communication, so no rank waits.
  if (options_.init_sync) broadcast_module(0);
  for (const Replicated& p : parameters_)
    LOCKSTEP_CHECK(!p.leaf->watcher, DistError, "DistributedDataParallel: ", p.name,
                   " already belongs to another DistributedDataParallel; wrap a module once");

  const size_t n = parameters_.size();
  std::vector<int> order(n);
  for (size_t i = 0; i < n; ++i)
    order[i] = static_cast<int>(n - 1 - i);  // backward reaches the last first
  buckets_ = plan_buckets(parameters_, order, caps_);
  place_buckets(*group_, parameters_, buckets_, slots_);
  reached_.assign(n, 0);
  arrived_.assign(n, 0);
  for (size_t i = 0; i < n; ++i) watch(i);
  choose_compared();
  end_counts();
}

Reducer::~Reducer() {
  for (Replicated& p : parameters_) release(p);
  if (stats_.forwards > 0) log_info(str_cat("rank ", group_->rank(), ": ", stats().text()));
}

double Reducer::now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

NamedTensors Reducer::buffers() const { return without(current_buffers_(), options_.ignored); }

void Reducer::broadcast_module(int root) {
  NamedTensors everything = replicated_;
  const NamedTensors all_buffers = buffers();
  everything.insert(everything.end(), all_buffers.begin(), all_buffers.end());
  Tensor bytes = pack(everything);
  group_->broadcast(bytes, root, {.label = str_cat("DDP's broadcast of rank ", root, "'s module")})
      ->wait();
  if (group_->rank() != root) unpack(bytes, everything);
}

uint64_t Reducer::parameter_versions() const {
  uint64_t sum = 0;
  for (const Replicated& p : parameters_) sum += p.parameter.storage().version();
  return sum;
}

uint64_t Reducer::replica_versions() const {
  uint64_t sum = 0;
  for (const auto& [name, p] : replicated_) sum += p.storage().version();
  return sum;
}

// ---- forwards ----

void Reducer::forward_starts(bool training) {
  if (!is_grad_enabled()) return;
  check_parameters();
  check_slots();
  ++stats_.forwards;
  forwards_ += training;
  flag_.forward_starts();
  logs_forward_ = training && !flag_.inside_no_sync();
  if (logs_forward_) forward_log_.starts();
  note_standing();
  forward_started_ = now();
}

void Reducer::forward_ends() {
  if (!is_grad_enabled()) return;
  if (logs_forward_) forward_log_.ends();
  stats_.forward = now() - forward_started_;
}

void Reducer::remember_failure(std::string_view where) {
  const std::string text = str_cat("the last one its ", where, " threw: ", text_of_exception());
  for (const auto& group : {users_group_, group_}) group->remember_failure(text);
}

void Reducer::forget_failure() {
  for (const auto& group : {users_group_, group_}) group->remember_failure({});
}

/// What peers that wait for this rank can say of it.
void Reducer::note_standing() {
  char text[64];
  const int n = std::snprintf(text, sizeof text, "%lld forwards, %lld synchronised backwards%s",
                              static_cast<long long>(stats_.forwards),
                              static_cast<long long>(stats_.synchronised_backwards),
                              flag_.inside_no_sync() ? ", in no_sync" : "");
  group_->note({text, static_cast<size_t>(std::clamp(n, 0, 63))});
}

/// A parameter that replaced another has no slot, so its gradient would not be reduced.
void Reducer::check_parameters() const {
  const NamedTensors now = without(current_parameters_(), options_.ignored);
  for (size_t i = 0; i < std::max(now.size(), replicated_.size()); ++i) {
    if (i < now.size() && i < replicated_.size() && now[i].second.is_same(replicated_[i].second))
      continue;
    const std::string& name = i < now.size() ? now[i].first : replicated_[i].first;
    lockstep::fail<DistError>(
        "DDP: ", name,
        i < now.size() ? " is not the parameter that it was" : " is gone that was there",
        " when the module was wrapped on rank ", group_->rank(),
        ", and DDP averages the gradients of those alone; copy values into the old parameter under "
        "NoGradGuard, or wrap the module after the change");
  }
}

/// A parameter that changed its dtype, device or shape no longer fits its slot.
void Reducer::check_slots() const {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const Replicated& p = parameters_[i];
    LOCKSTEP_CHECK(p.parameter.shape() == slots_[i].shape(), DistError, "DDP: ", p.name,
                   " had shape ", slots_[i].shape(), " when it was wrapped and has ",
                   p.parameter.shape(), " now; change the module first, then wrap it");
    LOCKSTEP_CHECK(
        p.parameter.grad_dtype() == slots_[i].dtype() && p.parameter.device() == slots_[i].device(),
        DistError, "DDP: the gradient of ", p.name, " was ", slots_[i].dtype(), " on ",
        slots_[i].device(), " when it was wrapped and is ", p.parameter.grad_dtype(), " on ",
        p.parameter.device(), " now; move the module first, then wrap it");
  }
}

void Reducer::watch(size_t i) {
  Leaf& leaf = *parameters_[i].leaf;
  leaf.slot = slots_[i];
  leaf.watcher = this;
  leaf.watcher_index = static_cast<int>(i);
  leaf.accumulated = false;
}

void Reducer::release(Replicated& p) {
  // The gradient moves out of the group's memory, which goes with this object.
  if (p.leaf->gradient.defined() && p.leaf->gradient.is_same(p.leaf->slot))
    p.leaf->gradient = p.leaf->slot.clone();
  p.leaf->slot = Tensor();
  p.leaf->watcher = nullptr;
}

void Reducer::slot_changes(Leaf& leaf) { detach_holders(static_cast<size_t>(leaf.watcher_index)); }

/// Before a slot is written: whoever else holds it, because the program kept a gradient, or a view of
/// one, gets a copy of what it holds, in memory of its own.
void Reducer::detach_holders(size_t i) {
  Tensor& slot = slots_[i];
  Leaf& leaf = *parameters_[i].leaf;
  const bool is_gradient = leaf.gradient.defined() && leaf.gradient.is_same(slot);
  const int ours = is_gradient ? 3 : 2;  // with slots_ and leaf.slot
  if (slot.ref()->use_count() == ours && slot.storage().use_count() == 1) return;
  NoGradGuard guard;
  const Tensor fresh = slot.clone();
  slot.storage().swap_memory(fresh.storage());
  slot = leaf.slot = fresh;
  if (is_gradient) leaf.gradient = fresh;
}

// ---- one round ----

void Reducer::backward_starts(std::span<Leaf* const> reached) {
  LOCKSTEP_CHECK(
      phase_ == Phase::idle, DistError, "DDP: a backward that reaches ",
      parameters_[static_cast<size_t>(reached[0]->watcher_index)].name,
      " started inside a backward of the same module, in a hook or an op of its own; use "
      "autograd::grad there, or run it after the outer one");
  phase_ = flag_.decide(through_forward_) ? Phase::syncing : Phase::local;
  // The engine runs a backward with create_graph in grad mode.
  if (phase_ == Phase::syncing && group_->size() > 1 && is_grad_enabled() &&
      !std::exchange(warned_graph_, true))
    warn(
        "DDP: backward with create_graph: the gradients are averaged, and nothing differentiates "
        "through the all-reduce");
  reset_round(reached);
}

void Reducer::reset_round(std::span<Leaf* const> reached) {
  backward_started_ = now();
  std::fill(reached_.begin(), reached_.end(), 0);
  std::fill(arrived_.begin(), arrived_.end(), 0);
  for (const Leaf* leaf : reached) {
    reached_[static_cast<size_t>(leaf->watcher_index)] = 1;
    detach_holders(static_cast<size_t>(leaf->watcher_index));
  }
  pending_.assign(buckets_.size(), 0);
  bucket_of_.assign(parameters_.size(), 0);
  for (size_t b = 0; b < buckets_.size(); ++b)
    for (int i : buckets_[b].parameters) {
      bucket_of_[static_cast<size_t>(i)] = static_cast<int>(b);
      pending_[b] += reached_[static_cast<size_t>(i)];
    }
  arrival_order_.clear();
  kept_.assign(parameters_.size(), Tensor());
  works_.clear();
  buffer_work_ = nullptr;
  next_launch_ = 0;
  if (phase_ != Phase::syncing) return;
  stats_.arrivals = 0;
  if (!std::exchange(traces_fit_, true)) {
    stats_.buckets.assign(buckets_.size(), {});
    for (size_t b = 0; b < buckets_.size(); ++b) {
      stats_.buckets[b].bytes = buckets_[b].bytes();
      for (int i : buckets_[b].parameters)
        stats_.buckets[b].parameters.push_back(names_.parameters[static_cast<size_t>(i)]);
    }
  }
  next_completed_ = 0;
  launched_at_.assign(buckets_.size(), 0);
}

void Reducer::leaf_ready(Leaf& leaf) {
  const auto i = static_cast<size_t>(leaf.watcher_index);
  if (phase_ != Phase::syncing || arrived_[i]) return;
  advance();
  arrived_[i] = 1;
  arrival_order_.push_back(static_cast<int>(i));
  ++stats_.arrivals;
  --pending_[static_cast<size_t>(bucket_of_[i])];
  while (next_launch_ < buckets_.size() && pending_[next_launch_] == 0) launch(next_launch_++);
}

/// A parameter that this backward gave nothing goes into the reduction with the gradient it has, or
/// zero.
void Reducer::fill_without_arrival(int parameter) {
  const auto i = static_cast<size_t>(parameter);
  NoGradGuard guard;
  Leaf& leaf = *parameters_[i].leaf;
  if (!leaf.gradient.defined()) {
    slots_[i].zero_();
  } else {
    if (&leaf.gradient.storage() == &slots_[i].storage()) kept_[i] = slots_[i].clone();
    if (!leaf.gradient.is_same(slots_[i])) slots_[i].copy_(leaf.gradient);
  }
}

void Reducer::launch(size_t b) {
  const Bucket& bucket = buckets_[b];
  if (b == 0) {
    if (const auto f = std::exchange(before_first_launch_, nullptr)) f();
    mine_ = record_of_round();
    if (posts_records())
      post_record();
    else
      check_graph();
  }
  for (int i : bucket.parameters) {
    detach_holders(static_cast<size_t>(i));
    if (!arrived_[static_cast<size_t>(i)]) fill_without_arrival(i);
  }
  auto& trace = stats_.buckets[b];
  trace.launched_after = stats_.arrivals;
  trace.completed_after = -1;
  launched_at_[b] = now();
  works_.push_back(reduce(b));
  // Under join it is known only from the records whose buffers count.
  if (b + 1 == buckets_.size() && options_.broadcast_buffers && !join_) exchange_buffers();
}

WorkPtr Reducer::reduce(size_t b) {
  const Bucket& bucket = buckets_[b];
  if (!options_.comm_hook)
    return group_->all_reduce(bucket.flat, ReduceOp::avg, {.label = bucket.label});
  GradBucket seen{.index = static_cast<int>(b),
                  .is_last = b + 1 == buckets_.size(),
                  .buffer = bucket.flat,
                  .group = group_.get()};
  for (int i : bucket.parameters) {
    seen.gradients.push_back(slots_[static_cast<size_t>(i)]);
    seen.parameters.push_back(parameters_[static_cast<size_t>(i)].parameter);
  }
  NoGradGuard guard;
  WorkPtr work = options_.comm_hook(seen);
  LOCKSTEP_CHECK(work, ValueError, "DDP: the comm hook returned no work for ", bucket.label);
  return work;
}

/// Moves reductions on while backward runs, and notes which have completed.
void Reducer::advance() {
  group_->progress();
  while (next_completed_ < works_.size() && works_[next_completed_]->is_completed()) {
    auto& trace = stats_.buckets[next_completed_];
    trace.completed_after = stats_.arrivals;
    trace.seconds = now() - launched_at_[next_completed_++];
  }
}

void Reducer::backward_ends(bool failed) {
  const Phase phase = std::exchange(phase_, Phase::idle);
  if (failed) remember_failure("backward");
  if (phase == Phase::local) {
    ++local_backwards_;
    ++stats_.local_backwards;
    return;
  }
  if (!failed) return finish_round();
  // Nothing is posted before the first launch: the next synchronised backward takes this one's
  // place.
  if (next_launch_ == 0) return;
  abort_backward();
  drop_gradients();
}

/// While an exception is handled that this rank's peers would wait for in vain.
void Reducer::abort_backward() {
  suppress_failure_note();
  group_->abort(str_cat("rank ", group_->rank(), " failed inside DDP's backward: ",
                        text_of_exception(), "; to go on, wrap the module again on every rank"));
}

}  // namespace lockstep::dist
