// ProcessGroup's front: arguments are checked here, once for all backends, and become a Collective.
#include <lockstep/distributed/process_group.h>

#include <algorithm>
#include <cstring>

#include <lockstep/distributed/deadline.h>
#include <lockstep/distributed/overlap.h>
#include <lockstep/distributed/shm/reduce.h>
#include <lockstep/distributed/strided.h>
#include <lockstep/tensor/node.h>
#include <lockstep/tensor/ops/join.h>

namespace lockstep::dist {

std::string_view name_of(CollectiveKind kind) {
  constexpr std::string_view names[] = {"all_reduce",     "broadcast", "reduce",  "all_gather",
                                        "reduce_scatter", "gather",    "scatter", "all_to_all",
                                        "barrier",        "send",      "recv"};
  return names[static_cast<int>(kind)];
}

const Tensor& Collective::model() const {
  static const Tensor none;
  return !inputs.empty() ? inputs[0] : !outputs.empty() ? outputs[0] : none;
}

std::string Collective::text() const {
  const bool bare = !model().defined();
  return describe(kind, reduce, bare ? DType::u8 : model().dtype(),
                  bare ? Shape() : model().shape(), root);
}

std::string describe(CollectiveKind kind, ReduceOp reduce, DType dtype, const Shape& shape,
                     int root) {
  std::string text(name_of(kind));
  const bool reduces = kind == CollectiveKind::all_reduce || kind == CollectiveKind::reduce ||
                       kind == CollectiveKind::reduce_scatter;
  if (reduces) text += str_cat('(', name_of(reduce), ')');
  if (kind == CollectiveKind::barrier) return text;
  text += str_cat(" of ", dtype);
  if (kind != CollectiveKind::all_to_all) text += str_cat(' ', shape);
  if (kind == CollectiveKind::send) text += str_cat(" to rank ", root);
  if (kind == CollectiveKind::recv) text += str_cat(" from rank ", root);
  if (kind == CollectiveKind::broadcast || kind == CollectiveKind::reduce ||
      kind == CollectiveKind::gather || kind == CollectiveKind::scatter)
    text += str_cat(", root ", root);
  return text;
}

void Work::then(std::function<void()> f) {
  std::lock_guard lock(then_mutex_);
  then_.push_back(std::move(f));
  has_then_.store(true, std::memory_order_release);
}

void Work::run_then() {
  if (!has_then_.load(std::memory_order_acquire)) return;
  std::lock_guard lock(then_mutex_);
  while (!then_.empty()) {
    const auto f = std::move(then_.front());
    then_.pop_front();
    f();
  }
  has_then_.store(false, std::memory_order_release);
}

namespace {

void check_rank(CollectiveKind kind, std::string_view what, int rank, int size) {
  LOCKSTEP_CHECK(rank >= 0 && rank < size, ValueError, name_of(kind), ": the ", what,
                 " must be a rank of 0 .. ", size - 1, ", got ", rank);
}

void check_count(CollectiveKind kind, std::string_view what, const std::vector<Tensor>& tensors,
                 int size) {
  LOCKSTEP_CHECK(tensors.size() == static_cast<size_t>(size), ValueError, name_of(kind),
                 ": needs one ", what, " per rank, ", size, ", got ", tensors.size());
}

void check_writable(CollectiveKind kind, const Tensor& t) {
  t.storage().check_writable(name_of(kind));
  LOCKSTEP_CHECK(!has_overlap(t), ValueError, name_of(kind),
                 ": cannot write a tensor whose elements share memory, shape ", t.shape(),
                 ", strides ", t.strides(), "; pass contiguous() of it");
}

void check_alike(CollectiveKind kind, const Tensor& t, const Tensor& model, bool shapes) {
  LOCKSTEP_CHECK(t.dtype() == model.dtype(), DTypeError, name_of(kind),
                 ": inputs and outputs must have one dtype, got ", model.dtype(), " and ",
                 t.dtype());
  LOCKSTEP_CHECK(t.device() == model.device(), DeviceError, name_of(kind),
                 ": inputs and outputs must be on one device, got ", model.device(), " and ",
                 t.device());
  LOCKSTEP_CHECK(!shapes || t.shape() == model.shape(), ShapeError, name_of(kind),
                 ": inputs and outputs must have one shape, got ", model.shape(), " and ",
                 t.shape());
}

void check_apart(std::string_view call, std::string_view what, const std::vector<Tensor>& tensors) {
  LOCKSTEP_CHECK(tensors.size() < 2 || !share_elements(tensors), ValueError, call, ": two ", what,
                 " share memory, so one result would overwrite the other; pass tensors that do not "
                 "overlap");
}

/// What every start() may rely on.
void check(const Collective& call) {
  const bool shapes = call.kind != CollectiveKind::all_to_all;
  for (const Tensor& t : call.inputs) check_alike(call.kind, t, call.model(), shapes);
  for (const Tensor& t : call.outputs) check_alike(call.kind, t, call.model(), shapes);
  for (const Tensor& t : call.outputs) check_writable(call.kind, t);
  check_apart(name_of(call.kind), "outputs", call.outputs);
  for (const Tensor& t : call.outputs) t.storage().bump_version();  // saved copies notice
}

/// Whether input i and output o are the part that this rank gives to itself.
bool is_own_part(CollectiveKind kind, size_t i, size_t o, size_t rank) {
  const bool one_input = kind == CollectiveKind::all_gather || kind == CollectiveKind::gather;
  const bool one_output = kind == CollectiveKind::reduce_scatter || kind == CollectiveKind::scatter;
  return (one_input || i == rank) && (one_output || o == rank);
}

/// Backends write outputs while they still read inputs, so an input that an output overlaps is
/// copied first. This rank's own part may stay in place: what is written there is what was read.
void separate_inputs(Collective& call, int rank) {
  if (call.kind == CollectiveKind::all_reduce || call.kind == CollectiveKind::reduce) return;
  const NoGradGuard no_grad;
  for (size_t i = 0; i < call.inputs.size(); ++i)
    for (size_t o = 0; o < call.outputs.size(); ++o) {
      Tensor& input = call.inputs[i];
      if (!may_overlap(input, call.outputs[o])) continue;
      if (is_own_part(call.kind, i, o, static_cast<size_t>(rank)) &&
          is_same_view(input, call.outputs[o]))
        continue;
      Tensor copy = empty(input.shape(), {.dtype = input.dtype(), .device = input.device()});
      copy.copy_(input.detach());
      input = std::move(copy);
      break;
    }
}

/// `whole` as one part per rank: [size, ...part], or size times as many rows as a part has.
std::vector<Tensor> parts_of(CollectiveKind kind, std::string_view what, const Tensor& whole,
                             const Tensor& part, int size) {
  Shape stacked = part.shape();
  stacked.insert(0, size);
  Shape rows = part.shape();
  if (part.dim() > 0) rows[0] *= size;
  const bool is_stacked = whole.shape() == stacked;
  LOCKSTEP_CHECK(is_stacked || (part.dim() > 0 && whole.shape() == rows), ShapeError, name_of(kind),
                 ": the ", what, " must be ", stacked,
                 " (the number of ranks, then one rank's shape)",
                 part.dim() > 0 ? str_cat(" or ", rows) : std::string(), ", got ", whole.shape());
  std::vector<Tensor> parts;
  const Tensor bare = whole.detach();
  for (int r = 0; r < size; ++r)
    parts.push_back(is_stacked ? bare.select(0, r)
                               : bare.narrow(0, r * part.shape()[0], part.shape()[0]));
  return parts;
}

/// Rows of `whole`, split by `splits` or evenly.
std::vector<Tensor> split_rows(std::string_view what, const Tensor& whole,
                               std::vector<int64_t> splits, int size) {
  LOCKSTEP_CHECK(whole.dim() > 0, ShapeError, "all_to_all: the ", what,
                 " must have rows to split, got a 0-d tensor");
  const int64_t rows = whole.shape()[0];
  if (splits.empty()) {
    LOCKSTEP_CHECK(rows % size == 0, ShapeError, "all_to_all: the ", what, "'s ", rows,
                   " rows cannot be split evenly over ", size, " ranks; pass splits");
    splits.assign(static_cast<size_t>(size), rows / size);
  }
  int64_t sum = 0;
  for (const int64_t n : splits) {
    LOCKSTEP_CHECK(n >= 0, ValueError, "all_to_all: the ", what, " has a negative split, ", n);
    sum += n;
  }
  LOCKSTEP_CHECK(splits.size() == static_cast<size_t>(size) && sum == rows, ShapeError,
                 "all_to_all: the ", what, " needs ", size, " splits that sum to its ", rows,
                 " rows, got ", splits.size(), " that sum to ", sum);
  std::vector<Tensor> parts;
  int64_t at = 0;
  for (const int64_t n : splits) {
    parts.push_back(whole.detach().narrow(0, at, n));
    at += n;
  }
  return parts;
}

}  // namespace

WorkPtr ProcessGroup::begin(Collective call) {
  LOCKSTEP_CHECK(forbidden_.empty(), DistError, call.text(), ": ", forbidden_);
  check(call);
  separate_inputs(call, rank());
  call.options.timeout = bounded(call.options.timeout);
  return start(std::move(call));
}

WorkPtr ProcessGroup::all_reduce(Tensor t, ReduceOp op, CollectiveOptions options) {
  check_reducible("all_reduce", op, t.dtype());
  return begin({CollectiveKind::all_reduce, op, 0, {t}, {t}, std::move(options)});
}

WorkPtr ProcessGroup::broadcast(Tensor t, int root, CollectiveOptions options) {
  check_rank(CollectiveKind::broadcast, "root", root, size());
  Collective call{CollectiveKind::broadcast, ReduceOp::sum, root, {}, {}, std::move(options)};
  (rank() == root ? call.inputs : call.outputs) = {std::move(t)};
  return begin(std::move(call));
}

WorkPtr ProcessGroup::reduce(Tensor t, int root, ReduceOp op, CollectiveOptions options) {
  check_rank(CollectiveKind::reduce, "root", root, size());
  check_reducible("reduce", op, t.dtype());
  Collective call{CollectiveKind::reduce, op, root, {t}, {}, std::move(options)};
  if (rank() == root) call.outputs = {std::move(t)};
  return begin(std::move(call));
}

WorkPtr ProcessGroup::all_gather(std::vector<Tensor> outputs, Tensor input,
                                 CollectiveOptions options) {
  check_count(CollectiveKind::all_gather, "output", outputs, size());
  return begin({CollectiveKind::all_gather,
                ReduceOp::sum,
                0,
                {std::move(input)},
                std::move(outputs),
                std::move(options)});
}

WorkPtr ProcessGroup::all_gather(Tensor output, Tensor input, CollectiveOptions options) {
  check_writable(CollectiveKind::all_gather, output);
  auto parts = parts_of(CollectiveKind::all_gather, "output", output, input, size());
  return all_gather(std::move(parts), std::move(input), std::move(options));
}

WorkPtr ProcessGroup::reduce_scatter(Tensor output, std::vector<Tensor> inputs, ReduceOp op,
                                     CollectiveOptions options) {
  check_count(CollectiveKind::reduce_scatter, "input", inputs, size());
  check_reducible("reduce_scatter", op, output.dtype());
  return begin({CollectiveKind::reduce_scatter,
                op,
                0,
                std::move(inputs),
                {std::move(output)},
                std::move(options)});
}

WorkPtr ProcessGroup::reduce_scatter(Tensor output, Tensor input, ReduceOp op,
                                     CollectiveOptions options) {
  auto parts = parts_of(CollectiveKind::reduce_scatter, "input", input, output, size());
  return reduce_scatter(std::move(output), std::move(parts), op, std::move(options));
}

WorkPtr ProcessGroup::gather(std::vector<Tensor> outputs, Tensor input, int root,
                             CollectiveOptions options) {
  check_rank(CollectiveKind::gather, "root", root, size());
  check_count(CollectiveKind::gather, rank() == root ? "output" : "output on the root, none here",
              outputs, rank() == root ? size() : 0);
  return begin({CollectiveKind::gather,
                ReduceOp::sum,
                root,
                {std::move(input)},
                std::move(outputs),
                std::move(options)});
}

WorkPtr ProcessGroup::scatter(Tensor output, std::vector<Tensor> inputs, int root,
                              CollectiveOptions options) {
  check_rank(CollectiveKind::scatter, "root", root, size());
  check_count(CollectiveKind::scatter, rank() == root ? "input" : "input on the root, none here",
              inputs, rank() == root ? size() : 0);
  return begin({CollectiveKind::scatter,
                ReduceOp::sum,
                root,
                std::move(inputs),
                {std::move(output)},
                std::move(options)});
}

WorkPtr ProcessGroup::all_to_all(std::vector<Tensor> outputs, std::vector<Tensor> inputs,
                                 CollectiveOptions options) {
  check_count(CollectiveKind::all_to_all, "output", outputs, size());
  check_count(CollectiveKind::all_to_all, "input", inputs, size());
  const auto r = static_cast<size_t>(rank());
  LOCKSTEP_CHECK(inputs[r].numel() == outputs[r].numel(), ShapeError, "all_to_all: what rank ",
                 rank(), " keeps has ", inputs[r].numel(), " elements as input and ",
                 outputs[r].numel(), " as output");
  return begin({CollectiveKind::all_to_all, ReduceOp::sum, 0, std::move(inputs), std::move(outputs),
                std::move(options)});
}

WorkPtr ProcessGroup::all_to_all(Tensor output, Tensor input, std::vector<int64_t> output_splits,
                                 std::vector<int64_t> input_splits, CollectiveOptions options) {
  check_writable(CollectiveKind::all_to_all, output);
  auto outputs = split_rows("output", output, std::move(output_splits), size());
  auto inputs = split_rows("input", input, std::move(input_splits), size());
  return all_to_all(std::move(outputs), std::move(inputs), std::move(options));
}

WorkPtr ProcessGroup::send(Tensor t, int to, CollectiveOptions options) {
  check_rank(CollectiveKind::send, "receiver", to, size());
  LOCKSTEP_CHECK(to != rank(), ValueError, "send: rank ", to, " cannot send to itself");
  return begin({CollectiveKind::send, ReduceOp::sum, to, {std::move(t)}, {}, std::move(options)});
}

WorkPtr ProcessGroup::recv(Tensor t, int from, CollectiveOptions options) {
  check_rank(CollectiveKind::recv, "sender", from, size());
  LOCKSTEP_CHECK(from != rank(), ValueError, "recv: rank ", from, " cannot receive from itself");
  return begin({CollectiveKind::recv, ReduceOp::sum, from, {}, {std::move(t)}, std::move(options)});
}

WorkPtr ProcessGroup::barrier(CollectiveOptions options) {
  return begin({.kind = CollectiveKind::barrier, .options = std::move(options)});
}

// ---- what DDP asks, for backends that have nothing better ----

Ref<Storage> ProcessGroup::allocate(size_t bytes) { return Storage::allocate(bytes, Device{}); }

void ProcessGroup::note(std::string_view) {}

void ProcessGroup::post(uint64_t epoch, std::span<const std::byte> record) {
  LOCKSTEP_CHECK(record.size() <= kRecordBytes, ValueError, "post: a record has at most ",
                 kRecordBytes, " bytes, this one has ", record.size());
  Tensor mine = empty({static_cast<int64_t>(record.size())}, {.dtype = DType::u8});
  if (!record.empty()) std::memcpy(mine.data_ptr(), record.data(), record.size());
  Tensor all = empty({size(), mine.shape()[0]}, {.dtype = DType::u8});  // [size, bytes]
  posted_ = {epoch, all, all_gather(all, mine, {.label = str_cat("records of epoch ", epoch)})};
}

std::vector<std::vector<std::byte>> ProcessGroup::collect(uint64_t epoch) {
  LOCKSTEP_CHECK(posted_.work && posted_.epoch == epoch, ValueError, "collect: epoch ", epoch,
                 " was not posted here before");
  std::exchange(posted_.work, nullptr)->wait();
  std::vector<std::vector<std::byte>> records;
  const auto bytes = static_cast<size_t>(posted_.records.shape()[1]);
  const auto* at = static_cast<const std::byte*>(posted_.records.data_ptr());
  for (int r = 0; r < size(); ++r, at += bytes) records.emplace_back(at, at + bytes);
  return records;
}

// ---- many tensors as one ----

namespace {

/// Tensors of one dtype side by side.
struct Packed {
  explicit Packed(std::vector<Tensor> tensors) : parts(std::move(tensors)) {
    std::vector<Tensor> flat;
    for (Tensor& t : parts) {
      t = t.detach();
      flat.push_back(t.reshape({-1}));
    }
    whole = cat(flat);
  }
  /// Once, whoever calls it.
  void deliver() {
    std::call_once(delivered, [this] {
      const NoGradGuard no_grad;
      int64_t at = 0;
      for (Tensor& t : parts) {
        t.copy_(whole.narrow(0, at, t.numel()).reshape(t.shape()));
        at += t.numel();
      }
    });
  }

  std::vector<Tensor> parts;
  Tensor whole;  // [all elements]
  std::once_flag delivered;
};

/// The works of several collectives as one.
class ManyWorks final : public Work {
 public:
  ManyWorks(std::vector<WorkPtr> works, std::vector<std::shared_ptr<Packed>> packs,
            std::vector<Tensor> tensors)
      : works_(std::move(works)), packs_(std::move(packs)), tensors_(std::move(tensors)) {}
  void wait(Milliseconds timeout) override {
    for (const WorkPtr& w : works_) w->wait(timeout);
    deliver();
    run_then();
  }
  bool is_completed() override {
    for (const WorkPtr& w : works_)
      if (!w->is_completed()) return false;
    if (!exception()) deliver();
    return true;
  }
  std::exception_ptr exception() const override {
    for (const WorkPtr& w : works_)
      if (auto e = w->exception()) return e;
    return nullptr;
  }
  uint64_t sequence_number() const override {
    return works_.empty() ? 0 : works_.back()->sequence_number();
  }
  std::vector<Tensor> result() const override { return tensors_; }

 private:
  // For a program's own backend that leaves Collective::deliver out.
  void deliver() {
    for (const auto& p : packs_) p->deliver();
  }

  std::vector<WorkPtr> works_;
  std::vector<std::shared_ptr<Packed>> packs_;
  std::vector<Tensor> tensors_;
};

/// One collective per dtype, started by `start` with the packed tensor and what delivers it.
template <class Start>
WorkPtr coalesced(std::vector<Tensor> tensors, Start start) {
  const NoGradGuard no_grad;
  std::vector<std::shared_ptr<Packed>> packs;
  std::vector<WorkPtr> works;
  std::vector<bool> taken(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (taken[i]) continue;
    std::vector<Tensor> alike;
    for (size_t j = i; j < tensors.size(); ++j)
      if (tensors[j].dtype() == tensors[i].dtype()) {
        taken[j] = true;
        alike.push_back(tensors[j]);
      }
    const auto pack = std::make_shared<Packed>(std::move(alike));
    packs.push_back(pack);
    works.push_back(start(pack->whole, [pack] { pack->deliver(); }));
  }
  for (const Tensor& t : tensors) t.storage().bump_version();  // saved copies notice
  return std::make_shared<ManyWorks>(std::move(works), std::move(packs), std::move(tensors));
}

}  // namespace

WorkPtr all_reduce_coalesced(ProcessGroup& group, std::vector<Tensor> tensors, ReduceOp op,
                             CollectiveOptions options) {
  for (const Tensor& t : tensors) {
    check_writable(CollectiveKind::all_reduce, t);
    check_reducible("all_reduce", op, t.dtype());
  }
  check_apart("all_reduce_coalesced", "tensors", tensors);
  return coalesced(std::move(tensors), [&](const Tensor& packed, std::function<void()> deliver) {
    return group.begin(
        {CollectiveKind::all_reduce, op, 0, {packed}, {packed}, options, std::move(deliver)});
  });
}

WorkPtr broadcast_coalesced(ProcessGroup& group, std::vector<Tensor> tensors, int root,
                            CollectiveOptions options) {
  for (const Tensor& t : tensors) check_writable(CollectiveKind::broadcast, t);
  check_rank(CollectiveKind::broadcast, "root", root, group.size());
  check_apart("broadcast_coalesced", "tensors", tensors);
  return coalesced(std::move(tensors), [&](const Tensor& packed, std::function<void()> deliver) {
    Collective call{CollectiveKind::broadcast, ReduceOp::sum, root, {}, {}, options,
                    std::move(deliver)};
    (group.rank() == root ? call.inputs : call.outputs) = {packed};
    return group.begin(std::move(call));
  });
}

}  // namespace lockstep::dist
