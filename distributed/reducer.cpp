#include <lockstep/distributed/reducer.h>

#include <algorithm>
#include <chrono>

#include <lockstep/tensor/warning.h>

namespace lockstep::dist {

double DdpStats::overlap() const {
  size_t all = 0, early = 0;
  for (const BucketTrace& b : buckets) {
    all += b.bytes;
    if (b.completed_after >= 0 && b.completed_after < arrivals) early += b.bytes;
  }
  return all ? static_cast<double>(early) / static_cast<double>(all) : 0;
}

// ---- construction ----

namespace {
BucketCaps caps_of(const DistributedDataParallelOptions& o) {
  auto bytes = [](double mb) { return static_cast<size_t>(std::max(0.0, mb) * 1024 * 1024); };
  return {bytes(o.first_bucket_mb), bytes(o.bucket_cap_mb)};
}
}  // namespace

Reducer::Reducer(std::shared_ptr<ProcessGroup> group, NamedTensors parameters,
                 std::function<NamedTensors()> current_buffers,
                 DistributedDataParallelOptions options)
    : group_(group->child()), current_buffers_(std::move(current_buffers)), options_(options) {
  const NamedTensors buffers = current_buffers_();
  if (options_.init_sync) {
    verify_same_module(*group_, parameters, buffers);
    NamedTensors everything = parameters;
    everything.insert(everything.end(), buffers.begin(), buffers.end());
    Tensor bytes = pack(everything);
    group_->broadcast(bytes, 0, {.label = "DDP's broadcast of rank 0's module"})->wait();
    if (group_->rank() != 0) unpack(bytes, everything);
  }
  for (auto& [name, p] : parameters)
    if (p.requires_grad()) parameters_.push_back({name, p, Ref<Leaf>(p.leaf())});
  LOCKSTEP_CHECK(!parameters_.empty(), DistError,
                 "DistributedDataParallel: the module has no parameter that requires grad; use it "
                 "without the wrapper");
  for (const Replicated& p : parameters_)
    LOCKSTEP_CHECK(!p.leaf->watcher, DistError, "DistributedDataParallel: ", p.name,
                   " already belongs to another DistributedDataParallel; wrap a module once");

  const size_t n = parameters_.size();
  std::vector<int> order(n);
  for (size_t i = 0; i < n; ++i)
    order[i] = static_cast<int>(n - 1 - i);  // backward reaches the last first
  buckets_ = plan_buckets(parameters_, order, caps_of(options_));
  place_buckets(*group_, parameters_, buckets_, slots_);
  for (std::vector<char>* flags : {&reached_, &arrived_, &unreduced_}) flags->assign(n, 0);
  for (size_t i = 0; i < n; ++i) watch(i);
}

Reducer::~Reducer() {
  for (Replicated& p : parameters_) release(p);
}

// ---- which backward is synchronised ----

uint64_t Reducer::parameter_versions() const {
  uint64_t sum = 0;
  for (const Replicated& p : parameters_) sum += p.parameter.storage().version();
  return sum;
}

void Reducer::forward_starts() {
  if (!is_grad_enabled()) return;
  follow_changes();
  ++forwards_;
  flag_ = no_sync_depth_ > 0 ? Flag::local : Flag::sync;
  flag_versions_ = parameter_versions();
}

/// A parameter that was frozen and trains again has a new leaf: it is watched like the old one. One that
/// changed its dtype or device no longer fits its slot.
void Reducer::follow_changes() {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    Replicated& p = parameters_[i];
    LOCKSTEP_CHECK(
        p.parameter.dtype() == slots_[i].dtype() && p.parameter.device() == slots_[i].device(),
        DistError, "DDP: ", p.name, " was ", slots_[i].dtype(), " on ", slots_[i].device(),
        " when it was wrapped and is ", p.parameter.dtype(), " on ", p.parameter.device(),
        " now; move the module first, then wrap it");
    Leaf* leaf = p.parameter.leaf();
    if (!leaf || leaf == p.leaf.get()) continue;
    release(p);
    p.leaf = Ref<Leaf>(leaf);
    watch(i);
  }
}

void Reducer::watch(size_t i) {
  Leaf& leaf = *parameters_[i].leaf;
  leaf.slot = slots_[i];
  leaf.watcher = this;
  leaf.watcher_index = static_cast<int>(i);
}

void Reducer::release(Replicated& p) {
  // The gradient moves out of the group's memory, which goes with this object.
  if (p.leaf->gradient.defined() && p.leaf->gradient.is_same(p.leaf->slot))
    p.leaf->gradient = p.leaf->slot.clone();
  p.leaf->slot = Tensor();
  p.leaf->watcher = nullptr;
}

void Reducer::decide_phase() {
  if (flag_ != Flag::unset && flag_versions_ != parameter_versions()) flag_ = Flag::unset;
  if (flag_ == Flag::unset) {
    if (!std::exchange(warned_bypass_, true))
      warn(
          "DDP: a backward reached the module's parameters without a forward through "
          "DistributedDataParallel since they last "
          "changed; its gradients stay on rank ",
          group_->rank(), "; call the wrapper, not the inner module");
    phase_ = Phase::local;
    return;
  }
  phase_ = flag_ == Flag::sync ? Phase::syncing : Phase::local;
  if ((no_sync_depth_ > 0) != (flag_ == Flag::local) && !std::exchange(warned_scope_, true))
    warn("DDP: forward ran ", flag_ == Flag::local ? "inside" : "outside", " no_sync and backward ",
         flag_ == Flag::local ? "outside" : "inside",
         "; the forward decides, so the gradients are ",
         flag_ == Flag::local ? "not reduced" : "reduced");
}

// ---- one backward ----

void Reducer::backward_starts(std::span<Leaf* const> reached) {
  LOCKSTEP_CHECK(phase_ == Phase::idle, DistError,
                 "DDP: a backward started inside a backward of the same module");
  decide_phase();
  reset_round(reached);
}

void Reducer::reset_round(std::span<Leaf* const> reached) {
  std::fill(reached_.begin(), reached_.end(), 0);
  std::fill(arrived_.begin(), arrived_.end(), 0);
  for (const Leaf* leaf : reached) reached_[static_cast<size_t>(leaf->watcher_index)] = 1;
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
  stats_.buckets.assign(buckets_.size(), {});
}

void Reducer::leaf_ready(Leaf& leaf) {
  const auto i = static_cast<size_t>(leaf.watcher_index);
  if (phase_ == Phase::local) {
    unreduced_[i] = 1;
    return;
  }
  if (phase_ != Phase::syncing || arrived_[i]) return;
  group_->progress();
  note_completed();
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
    kept_[i] = leaf.gradient.is_same(slots_[i]) ? slots_[i].clone() : leaf.gradient;
    if (!leaf.gradient.is_same(slots_[i])) slots_[i].copy_(leaf.gradient);
  }
}

void Reducer::launch(size_t b) {
  Bucket& bucket = buckets_[b];
  for (int i : bucket.parameters)
    if (!arrived_[static_cast<size_t>(i)]) fill_without_arrival(i);
  if (b == 0) {
    ControlRecord record{
        .forwards = forwards_, .local_backwards = local_backwards_, .used = reached_};
    // zero_grad and assignment since a local backward have taken its contributions away.
    for (size_t i = 0; i < record.used.size(); ++i)
      record.used[i] |= unreduced_[i] && parameters_[i].leaf->gradient.defined() &&
                        parameters_[i].leaf->gradient.is_same(slots_[i]);
    group_->post(++epoch_, record.encode());
  }
  auto& trace = stats_.buckets[b];
  trace.bytes = bucket.bytes();
  trace.launched_after = stats_.arrivals;
  for (int i : bucket.parameters)
    trace.parameters.push_back(parameters_[static_cast<size_t>(i)].name);
  works_.push_back(group_->all_reduce(bucket.flat, ReduceOp::avg, {.label = bucket.label}));
  if (b + 1 == buckets_.size()) send_buffers();
}

void Reducer::note_completed() {
  for (size_t b = 0; b < works_.size(); ++b)
    if (stats_.buckets[b].completed_after < 0 && works_[b]->is_completed())
      stats_.buckets[b].completed_after = stats_.arrivals;
}

void Reducer::backward_ends(bool failed) {
  const Phase phase = std::exchange(phase_, Phase::idle);
  if (phase == Phase::local) {
    ++local_backwards_;
    ++stats_.local_backwards;
    return;
  }
  if (!failed) {
    try {
      finish_round();
    } catch (...) {
      drop_gradients();
      throw;
    }
    return;
  }
  // Nothing is posted before the first launch: the next synchronised backward takes this one's
  // place.
  if (works_.empty()) return;
  std::string reason = "an exception";
  try {
    if (std::current_exception()) std::rethrow_exception(std::current_exception());
  } catch (const std::exception& e) {
    reason = e.what();
  } catch (...) {
  }
  group_->abort(str_cat("rank ", group_->rank(), " failed inside DDP's backward: ", reason));
  drop_gradients();
}

// ---- the end of a synchronised backward ----

void Reducer::finish_round() {
  note_completed();
  const auto start = std::chrono::steady_clock::now();
  while (next_launch_ < buckets_.size()) launch(next_launch_++);
  for (const WorkPtr& work : works_) work->wait();
  if (buffer_work_) buffer_work_->wait();
  std::vector<ControlRecord> records;
  for (const auto& bytes : group_->collect(epoch_))
    records.push_back(ControlRecord::decode(bytes, parameters_.size()));
  stats_.final_wait =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  ++stats_.synchronised_backwards;
  settle_gradients(records);
  if (buffer_work_) take_buffers();
  std::fill(unreduced_.begin(), unreduced_.end(), 0);
  forwards_ = local_backwards_ = 0;
  check_records(records);
  if (!std::exchange(rebuilt_, true)) rebuild_buckets();
  stats_.gradient_bytes = 0;
  for (const Bucket& b : buckets_) stats_.gradient_bytes += b.bytes();
}

void Reducer::settle_gradients(const std::vector<ControlRecord>& records) {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    Leaf& leaf = *parameters_[i].leaf;
    if (std::any_of(records.begin(), records.end(),
                    [&](const ControlRecord& r) { return r.used[i]; })) {
      leaf.gradient = slots_[i];
    } else if (kept_[i].defined() && leaf.gradient.is_same(slots_[i])) {
      slots_[i].copy_(kept_[i]);  // used by nobody: as if this backward had not been
    }
  }
}

void Reducer::check_records(const std::vector<ControlRecord>& records) {
  for (size_t r = 1; r < records.size(); ++r)
    if (records[r].local_backwards != records[0].local_backwards && group_->rank() == 0 &&
        !std::exchange(warned_counts_, true))
      warn("DDP: rank 0 accumulated ", records[0].local_backwards,
           " local backwards before this reduction, rank ", r, " ", records[r].local_backwards,
           "; the average weighs them alike");
  if (options_.find_unused_parameters) return;
  std::string missing;
  for (size_t r = 0; r < records.size(); ++r) {
    std::string names;
    for (size_t i = 0; i < parameters_.size(); ++i)
      if (!records[r].used[i]) names += (names.empty() ? "" : ", ") + parameters_[i].name;
    if (!names.empty())
      missing += str_cat(missing.empty() ? "" : "; ", names, " received no gradient on rank ", r);
  }
  LOCKSTEP_CHECK(missing.empty(), DistError, "DDP: ", missing,
                 "; set find_unused_parameters or use every output of forward in the loss");
}

/// Once, after the first reduction: buckets in the order in which rank 0's gradients arrived.
void Reducer::rebuild_buckets() {
  std::vector<int> order = arrival_order_;
  for (const Bucket& b : buckets_)
    for (int i : b.parameters)
      if (std::find(order.begin(), order.end(), i) == order.end()) order.push_back(i);
  Tensor agreed = tensor(std::vector<int32_t>(order.begin(), order.end()));
  group_->broadcast(agreed, 0, {.label = "DDP's order of buckets"})->wait();
  const auto order0 = agreed.to_vector<int>();
  auto planned = plan_buckets(parameters_, order0, caps_of(options_));
  const bool same =
      std::equal(planned.begin(), planned.end(), buckets_.begin(), buckets_.end(),
                 [](const Bucket& a, const Bucket& b) { return a.parameters == b.parameters; });
  if (same) return;
  NoGradGuard guard;
  try {
    place_buckets(*group_, parameters_, planned, slots_);
    buckets_ = std::move(planned);
  } catch (const OutOfMemory& e) {
    warn("DDP: keeps its first bucket layout, because the new one found no memory: ", e.what());
  }
}

// ---- buffers ----

void Reducer::send_buffers() {
  if (!options_.broadcast_buffers) return;
  const NamedTensors buffers = current_buffers_();
  if (buffers.empty()) return;
  buffer_bytes_ = pack(buffers);
  buffer_work_ =
      group_->broadcast(buffer_bytes_, 0, {.label = "DDP's broadcast of rank 0's buffers"});
}
void Reducer::take_buffers() {
  if (group_->rank() != 0) unpack_fresh(buffer_bytes_, current_buffers_());
  buffer_bytes_ = Tensor();
}
void Reducer::sync_buffers() {
  const NamedTensors buffers = current_buffers_();
  if (buffers.empty()) return;
  Tensor bytes = pack(buffers);
  group_->broadcast(bytes, 0, {.label = "DDP's sync_buffers"})->wait();
  if (group_->rank() != 0) unpack_fresh(bytes, buffers);
}

void Reducer::drop_gradients() {
  for (Replicated& p : parameters_) p.leaf->gradient = Tensor();
  std::fill(unreduced_.begin(), unreduced_.end(), 0);
  forwards_ = local_backwards_ = 0;
}

}  // namespace lockstep::dist
