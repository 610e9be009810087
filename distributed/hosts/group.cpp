// HostGroup: each kind of collective as a plan of three stages.
#include <lockstep/distributed/hosts/group.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include <lockstep/distributed/hash.h>
#include <lockstep/distributed/log.h>
#include <lockstep/distributed/scale.h>
#include <lockstep/distributed/single_group.h>
#include <lockstep/distributed/store/notes.h>
#include <lockstep/distributed/strided.h>

namespace lockstep::dist {

namespace {

// The options of a later stage.
CollectiveOptions longer(CollectiveOptions options, Milliseconds group_timeout,
                         Milliseconds grace) {
  options.timeout = (options.timeout.count() > 0 ? options.timeout : group_timeout) + grace;
  return options;
}

uint64_t bytes_of(const Tensor& t) { return static_cast<uint64_t>(t.numel()) * size_of(t.dtype()); }

// Elements in row-major order between a tensor of any layout and a contiguous one.
void copy_to(const Tensor& t, std::byte* to) {
  if (t.numel() > 0) StridedBytes(t).read(0, t.numel(), to);
}
void copy_from(const Tensor& t, const std::byte* from) {
  if (t.numel() > 0) StridedBytes(t).write(0, t.numel(), from);
}
std::byte* data_of(const Tensor& t) { return static_cast<std::byte*>(t.data_ptr()); }

/// [count, ...shape] of zeros.
Tensor stack_like(int count, const Tensor& t) {
  Shape shape = t.shape();
  shape.insert(0, count);
  Tensor all = empty(shape, {.dtype = t.dtype()});
  if (all.numel() > 0) std::memset(all.data_ptr(), 0, bytes_of(all));
  return all;
}

void scale_tensor(const Tensor& t, double factor) {
  if (StridedBytes(t).dense())
    return scale(t.dtype(), data_of(t), static_cast<size_t>(t.numel()), factor);
  const Tensor row = empty({t.numel()}, {.dtype = t.dtype()});
  copy_to(t, data_of(row));
  scale(t.dtype(), data_of(row), static_cast<size_t>(t.numel()), factor);
  copy_from(t, data_of(row));
}

}  // namespace

HostGroup::HostGroup(HostParts parts) : parts_(std::move(parts)) {
  for (const auto& host : parts_.hosts) size_ += static_cast<int>(host.size());
  std::vector<int> all;
  for (int r = 0; r < size_; ++r) all.push_back(r);
  engine_ = HostEngine::make({.store = parts_.store,
                              .name = parts_.leaders_name,
                              .ranks = std::move(all),
                              .tell = [this](Ending why, bool within_host) {
                                return tell_everybody(std::move(why), within_host);
                              }});
}

HostGroup::~HostGroup() {
  if (!engine_->is_here()) return;
  try {
    if (std::uncaught_exceptions() > exceptions_at_birth_)
      abort("it was left by an exception" + failure_text());
    flush();  // the destructors of the parts tell the other ranks
  } catch (...) {
    // Without a store, or memory, there is no way to tell the other ranks.
  }
}

int HostGroup::rank() const { return here()[static_cast<size_t>(parts_.place)]; }

int HostGroup::host_of(int rank) const {
  for (size_t h = 0; h < parts_.hosts.size(); ++h)
    for (const int r : parts_.hosts[h])
      if (r == rank) return static_cast<int>(h);
  return -1;
}

void HostGroup::check_usable(std::string_view what) const {
  engine_->check_here(what);
  LOCKSTEP_CHECK(!destroyed_, DistError, what, ": the group was destroyed on this rank");
  const Ending end = engine_->end();
  if (!end.text.empty()) throw PeerError(end.cause, str_cat(what, ": ", end.text));
}

// ---- plans ----

CollectiveOptions HostGroup::to_cross(const CollectiveOptions& options) const {
  return longer(options, parts_.timeout, kCrossGrace);
}
CollectiveOptions HostGroup::to_spread(const CollectiveOptions& options) const {
  return longer(options, parts_.timeout, kSpreadGrace);
}

HostPlan HostGroup::plan_all_reduce(const Tensor& t, ReduceOp op,
                                    const CollectiveOptions& options) {
  // The two-byte floats have no room for a sum of many: each host averages its own, and its share
  // of the whole is weighed by how many ranks it has.
  const bool averages = op == ReduceOp::avg, small = averages && is_half(t.dtype());
  const ReduceOp within = averages && !small ? ReduceOp::sum : op;
  const ReduceOp between = averages ? ReduceOp::sum : op;
  HostPlan p;
  if (parts_.gather)
    p.gather = [=, this] {
      traffic_.shm += bytes_of(t);
      return parts_.gather->all_reduce(t, within, options);
    };
  if (leads())
    p.cross = [=, this] {
      if (small) scale_tensor(t, static_cast<double>(ranks_here()) / size_);
      traffic_.gloo += bytes_of(t);
      WorkPtr work = parts_.leaders->all_reduce(t, between, to_cross(options));
      if (averages && !small) work->then([=, this] { scale_tensor(t, 1.0 / size_); });
      return work;
    };
  if (parts_.spread)
    p.spread = [=, this] {
      traffic_.shm += bytes_of(t);
      return parts_.spread->broadcast(t, 0, to_spread(options));
    };
  return p;
}

HostPlan HostGroup::plan_broadcast(const Tensor& t, int root, const CollectiveOptions& options) {
  const int host = host_of(root);
  HostPlan p;
  if (host == parts_.host && parts_.gather) {
    const int place =
        static_cast<int>(std::find(here().begin(), here().end(), root) - here().begin());
    p.gather = [=, this] {
      traffic_.shm += bytes_of(t);
      return parts_.gather->broadcast(t, place, options);
    };
  }
  if (leads())
    p.cross = [=, this] {
      traffic_.gloo += bytes_of(t);
      return parts_.leaders->broadcast(t, host, to_cross(options));
    };
  if (host != parts_.host && parts_.spread)
    p.spread = [=, this] {
      traffic_.shm += bytes_of(t);
      return parts_.spread->broadcast(t, 0, to_spread(options));
    };
  return p;
}

HostPlan HostGroup::plan_all_gather(const Collective& call, bool write) {
  const Tensor input = call.inputs[0];
  const CollectiveOptions options = call.options;
  size_t most = 0;  // hosts with fewer ranks send rows that nobody reads
  for (const auto& host : parts_.hosts) most = std::max(most, host.size());
  const Tensor mine = stack_like(static_cast<int>(most), input);  // [most, ...shape]
  Shape shape = mine.shape();
  shape.insert(0, static_cast<int64_t>(parts_.hosts.size()));
  const Tensor all = empty(shape, {.dtype = input.dtype()});  // [hosts, most, ...shape]
  HostPlan p;
  if (parts_.gather)
    p.gather = [=, this] {
      traffic_.shm += bytes_of(input);
      std::vector<Tensor> rows;
      for (int i = 0; i < ranks_here(); ++i) rows.push_back(mine.select(0, i));
      return parts_.gather->all_gather(std::move(rows), input, options);
    };
  if (leads())
    p.cross = [=, this] {
      if (!parts_.gather) copy_to(input, data_of(mine));
      traffic_.gloo += bytes_of(mine);
      return parts_.leaders->all_gather(all, mine, to_cross(options));
    };
  if (parts_.spread)
    p.spread = [=, this] {
      traffic_.shm += bytes_of(all);
      return parts_.spread->broadcast(all, 0, to_spread(options));
    };
  if (write)
    p.finish = [this, all, most, outputs = call.outputs] {
      for (size_t h = 0; h < parts_.hosts.size(); ++h)
        for (size_t i = 0; i < parts_.hosts[h].size(); ++i) {
          const Tensor& to = outputs[static_cast<size_t>(parts_.hosts[h][i])];
          copy_from(to, data_of(all) + (h * most + i) * bytes_of(to));
        }
    };
  return p;
}

HostPlan HostGroup::plan_barrier(const CollectiveOptions& options) {
  HostPlan p;
  if (parts_.gather) p.gather = [=, this] { return parts_.gather->barrier(options); };
  if (leads()) p.cross = [=, this] { return parts_.leaders->barrier(to_cross(options)); };
  if (parts_.spread) p.spread = [=, this] { return parts_.spread->barrier(to_spread(options)); };
  return p;
}

HostPlan HostGroup::plan(const Collective& call) {
  CollectiveOptions options = call.options;
  const auto stand_in = [&] {  // what errors of the stages call an operation of another kind
    if (options.label.empty()) options.label = call.text();
  };
  switch (call.kind) {
    case CollectiveKind::barrier:
      return plan_barrier(options);
    case CollectiveKind::all_reduce:
      return plan_all_reduce(call.outputs[0], call.reduce, options);
    case CollectiveKind::broadcast:
      return plan_broadcast(call.model(), call.root, options);
    case CollectiveKind::all_gather:
      return plan_all_gather(call, true);
    case CollectiveKind::gather: {
      Collective labelled = call;
      stand_in();
      labelled.options = options;
      return plan_all_gather(labelled, rank() == call.root);
    }
    case CollectiveKind::reduce: {
      stand_in();
      const Tensor sum = empty(call.inputs[0].shape(), {.dtype = call.inputs[0].dtype()});
      copy_to(call.inputs[0], data_of(sum));  // inputs stay as they are
      HostPlan p = plan_all_reduce(sum, call.reduce, options);
      if (rank() == call.root)
        p.finish = [sum, to = call.outputs[0]] { copy_from(to, data_of(sum)); };
      return p;
    }
    case CollectiveKind::reduce_scatter: {
      stand_in();
      const Tensor sums = stacked_inputs(call);  // [size, ...shape]
      HostPlan p = plan_all_reduce(sums, call.reduce, options);
      return with_own_part(std::move(p), sums, call.outputs[0]);
    }
    case CollectiveKind::scatter: {
      stand_in();
      const Tensor all = stacked_inputs(call);  // [size, ...shape]
      HostPlan p = plan_broadcast(all, call.root, options);
      return with_own_part(std::move(p), all, call.outputs[0]);
    }
    default:
      fail<DistError>(name_of(call.kind), ": backend shm+gloo has no ", name_of(call.kind),
                      "; make a group over Gloo for it, by new_group or backend gloo");
  }
}

// One input per rank, side by side; of rooted calls the root's alone.
Tensor HostGroup::stacked_inputs(const Collective& call) const {
  const Tensor all = stack_like(size_, call.outputs[0]);  // [size, ...shape]
  const size_t part = bytes_of(call.outputs[0]);
  for (size_t r = 0; r < call.inputs.size(); ++r) copy_to(call.inputs[r], data_of(all) + r * part);
  return all;
}

// At its end the plan takes this rank's part of `all`.
HostPlan HostGroup::with_own_part(HostPlan plan, const Tensor& all, const Tensor& output) const {
  plan.finish = [all, output, at = static_cast<size_t>(rank()) * bytes_of(output)] {
    copy_from(output, data_of(all) + at);
  };
  return plan;
}

// Kinds that are made of others look like those to the transports. So the ranks compare what they
// were asked for first: the largest and the least hash are everybody's, or somebody's is another.
void HostGroup::compare(const Collective& call) {
  const auto mine = static_cast<int64_t>(hash_of(call.text()) >> 1);
  const Tensor both = empty({2}, {.dtype = DType::i64});
  both.data<int64_t>()[0] = mine;
  both.data<int64_t>()[1] = -mine;
  Collective asked{.kind = CollectiveKind::all_reduce,
                   .reduce = ReduceOp::max,
                   .inputs = {both},
                   .outputs = {both},
                   .options = call.options};
  asked.options.label = str_cat("comparison of ", call.text());
  HostPlan stages = plan_all_reduce(both, ReduceOp::max, asked.options);
  stages.finish = [both, mine, text = call.text(), rank = rank()] {
    const int64_t* seen = both.data<int64_t>();
    LOCKSTEP_CHECK(seen[0] == mine && seen[1] == -mine, DistError, "ranks disagree: rank ", rank,
                   " called ", text,
                   ", another rank something else; all ranks must call the same "
                   "collectives in the same order");
  };
  engine_->issue(std::make_shared<HostOperation>(engine_, std::move(stages), std::move(asked),
                                                 sequence_ + 1, timeout_of(call)));
}

Milliseconds HostGroup::timeout_of(const Collective& call) const {
  return call.options.timeout.count() > 0 ? call.options.timeout : parts_.timeout;
}

// ---- the group ----

WorkPtr HostGroup::start(Collective call) {
  const Tensor& model = call.model();
  LOCKSTEP_CHECK(!model.defined() || model.device().is_cpu(), DeviceError, name_of(call.kind),
                 ": this group works on CPU tensors, got one on ", model.device(),
                 "; move it with to(Device{})");
  if (call.kind == CollectiveKind::all_to_all) {
    check_usable("all_to_all");
    return flat()->start(std::move(call));
  }
  check_usable(call.text());
  std::lock_guard lock(calls_mutex_);
  HostPlan stages = plan(call);
  if (call.deliver)
    stages.finish = [finish = std::move(stages.finish), deliver = call.deliver] {
      if (finish) finish();
      deliver();
    };
  const bool composed = call.kind == CollectiveKind::reduce ||
                        call.kind == CollectiveKind::reduce_scatter ||
                        call.kind == CollectiveKind::gather || call.kind == CollectiveKind::scatter;
  const Milliseconds timeout = timeout_of(call);
  const Collective asked = call;
  auto operation = std::make_shared<HostOperation>(engine_, std::move(stages), std::move(call),
                                                   sequence_ + 1, timeout);
  if (composed) compare(asked);
  engine_->issue(operation);
  ++sequence_;  // at last: a call that failed before leaves this rank in step
  return operation;
}

GlooSetup HostGroup::gloo_setup(std::string name) const {
  GlooSetup setup{.store = parts_.store,
                  .name = std::move(name),
                  .ranks = {},
                  .rank = 0,
                  .address = parts_.address,
                  .timeout = parts_.timeout,
                  .join_timeout = parts_.join_timeout};
  return setup;
}

std::shared_ptr<ProcessGroup> HostGroup::flat() {
  std::lock_guard lock(flat_mutex_);
  if (flat_) return flat_;
  GlooSetup setup = gloo_setup(str_cat(parts_.leaders_name, "/flat"));
  for (int r = 0; r < size_; ++r) setup.ranks.push_back(r);
  setup.rank = rank();
  return flat_ = make_gloo_group(std::move(setup));
}

std::shared_ptr<ProcessGroup> HostGroup::new_group(const std::vector<int>& ranks) {
  check_usable("new_group");
  std::unique_lock lock(calls_mutex_);
  GlooSetup setup = gloo_setup(str_cat(parts_.leaders_name, "/group ", ++groups_));
  lock.unlock();
  int mine = -1;
  for (size_t i = 0; i < ranks.size(); ++i) {
    LOCKSTEP_CHECK(ranks[i] >= 0 && ranks[i] < size_, ValueError, "new_group: there is no rank ",
                   ranks[i], " among ", size_);
    LOCKSTEP_CHECK(std::count(ranks.begin(), ranks.end(), ranks[i]) == 1, ValueError,
                   "new_group: rank ", ranks[i], " is named twice");
    if (ranks[i] == rank()) mine = static_cast<int>(i);
  }
  setup.ranks = ranks;
  setup.rank = mine;
  return make_together(setup, mine >= 0, make_gloo_group);
}

std::shared_ptr<ProcessGroup> HostGroup::child() {
  check_usable("child");
  HostParts parts = parts_;
  if (parts.gather) parts.gather = parts_.gather->child();
  if (parts.spread) parts.spread = parts_.spread->child();
  if (parts.leaders) parts.leaders = parts_.leaders->child();
  std::unique_lock lock(calls_mutex_);
  parts.leaders_name += str_cat(".", ++child_count_);  // as a group over Gloo names its children
  lock.unlock();
  return children_.add(std::make_shared<HostGroup>(std::move(parts)));
}

Ref<Storage> HostGroup::allocate(size_t bytes) {
  check_usable("allocate");
  return parts_.gather ? parts_.gather->allocate(bytes) : ProcessGroup::allocate(bytes);
}

void HostGroup::note(std::string_view text) {
  if (engine_->is_here() && !destroyed_) leave_note(*parts_.store, notes_name(), rank(), text);
}

std::string HostGroup::notes() const {
  std::vector<int> all;
  for (int r = 0; r < size_; ++r) all.push_back(r);
  return read_notes(*parts_.store, notes_name(), all);
}

void HostGroup::progress() {
  engine_->check_here("progress");
  if (parts_.gather) parts_.gather->progress();
  engine_->advance();
}

// An end that this rank has found: the others of this host hear of it through shared memory, the
// other leaders through the store, which keeps the first reason. What died is named as the whole job
// counts.
Ending HostGroup::tell_everybody(Ending why, bool within_host) {
  // An abort is what another rank of this host has told, or what the user wanted: it is told as it
  // is.
  if (why.cause != Cause::aborted) complete_ending(why, within_host);
  try {
    why = Ending::unpacked(
        parts_.store->set_once(str_cat(parts_.leaders_name, "/end"), why.packed()));
  } catch (const DistError&) {
    // Without a store the other leaders see closed connections.
  }
  if (why.cause != Cause::aborted) add_notes(why);  // the first reason may be the leaders' group's
  parts_.store->expect_readers();
  for (const auto& group : {parts_.gather, parts_.spread, parts_.leaders, flat_})
    if (group) group->abort(why.text);
  return why;
}

// To an end that this rank has found: who died, as the job counts, and what the ranks' notes say.
void HostGroup::complete_ending(Ending& why, bool within_host) const {
  // The store may notice a death a moment later than a neighbour does.
  const Clock::time_point until = Clock::now() + Milliseconds(why.cause == Cause::died ? 500 : 0);
  bool known = false;
  do {
    for (const Store::Lost& lost : parts_.store->lost())
      if (!lost.left && lost.rank != rank()) {
        why.text = lost.text();
        known = true;
      }
    if (known) break;
    std::this_thread::sleep_for(Milliseconds(10));
  } while (Clock::now() < until);
  if (!known && within_host && here().back() >= ranks_here()) {
    why.text += " [counted within a host, where";
    for (int place = 0; place < ranks_here(); ++place)
      why.text += str_cat(place ? ", " : " ", "rank ", place, " is rank ",
                          here()[static_cast<size_t>(place)]);
    why.text += "]";
  }
  add_notes(why);
}

void HostGroup::add_notes(Ending& why) const {
  if (const std::string said = notes(); why.text.find(said) == std::string::npos) why.text += said;
}

void HostGroup::abort(const std::string& text) {
  if (!engine_->is_here() || left_) return;
  engine_->fail({Cause::aborted, str_cat("aborted by rank ", rank(), ": ", text)});
}

void HostGroup::destroy() {
  if (!engine_->is_here()) return;
  children_.destroy();
  flush();
  for (const auto& group : {parts_.gather, parts_.spread, parts_.leaders, flat_})
    if (group) group->destroy();
}

void HostGroup::flush() {
  if (destroyed_.exchange(true)) return;
  engine_->flush();
  left_ = true;
  log_info(str_cat("rank ", rank(), " sent ", traffic_.shm, " bytes by shm, ", traffic_.gloo,
                   " by gloo"));
}

}  // namespace lockstep::dist
