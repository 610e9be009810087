// One function per kind of collective.
#include <lockstep/distributed/gloo/exchange.h>
#include <lockstep/distributed/hash.h>

#include <gloo/allgather.h>
#include <gloo/allreduce.h>
#include <gloo/barrier.h>
#include <gloo/broadcast.h>
#include <gloo/gather.h>
#include <gloo/reduce.h>
#include <gloo/scatter.h>

#include <cstring>

#include <lockstep/distributed/gloo/arithmetic.h>
#include <lockstep/distributed/scale.h>
#include <lockstep/distributed/strided.h>

namespace lockstep::dist::gloo_backend {

namespace {

using Bytes = std::unique_ptr<std::byte[]>;
Bytes bytes_of(size_t n) { return std::make_unique_for_overwrite<std::byte[]>(n); }

size_t size_in_bytes(const Tensor& t) {
  return static_cast<size_t>(t.numel()) * size_of(t.dtype());
}

// A tensor's elements in a row: the tensor's own memory where they lie so, else a copy.
class Row {
 public:
  explicit Row(const Tensor& t, bool own = false)
      : strided_(t), elements_(t.numel()), bytes_(size_in_bytes(t)) {
    if (strided_.dense() && !own) return;
    copy_ = bytes_of(bytes_);
  }
  std::byte* data() const { return copy_ ? copy_.get() : strided_.data(); }
  size_t bytes() const { return bytes_; }
  /// Fetches the tensor's elements into the row ...
  const Row& read() const {
    if (copy_ && elements_ > 0) strided_.read(0, elements_, copy_.get());
    return *this;
  }
  /// ... and puts them back.
  void write() const {
    if (copy_ && elements_ > 0) strided_.write(0, elements_, copy_.get());
  }

 private:
  StridedBytes strided_;
  int64_t elements_;
  size_t bytes_;
  Bytes copy_;
};

class Exchange {
 public:
  Exchange(const std::shared_ptr<gloo::Context>& context, const Collective& call, uint32_t tag,
           Milliseconds timeout)
      : context_(context),
        call_(call),
        tag_(tag),
        timeout_(timeout),
        rank_(context->rank),
        size_(static_cast<size_t>(context->size)) {}

  void run() {
    const bool empty = call_.kind == CollectiveKind::barrier ||
                       (call_.kind != CollectiveKind::all_to_all && call_.model().numel() == 0 &&
                        call_.kind != CollectiveKind::send && call_.kind != CollectiveKind::recv);
    if (empty) return meet_all(context_, tag_, timeout_);
    switch (call_.kind) {
      case CollectiveKind::all_reduce:
        return all_reduce();
      case CollectiveKind::reduce:
        return reduce();
      case CollectiveKind::broadcast:
        return broadcast();
      case CollectiveKind::all_gather:
        return all_gather();
      case CollectiveKind::gather:
        return gather();
      case CollectiveKind::scatter:
        return scatter();
      case CollectiveKind::reduce_scatter:
        return reduce_scatter();
      case CollectiveKind::all_to_all:
        return all_to_all();
      case CollectiveKind::send:
      case CollectiveKind::recv:
        return send_or_receive();
      case CollectiveKind::barrier:
        return;
    }
  }

 private:
  template <class Options>
  Options options() const {
    Options o(context_);
    o.setTag(tag_);
    o.setTimeout(timeout_);
    return o;
  }

  // A reduction's elements as Gloo adds them up.
  struct Reducing {
    DType wire;
    size_t elements;
    Bytes copy;       // bf16 as f32
    std::byte* data;  // the elements: the copy, or the row's
  };

  // bf16 is promoted, and the two-byte floats are scaled before they are added: a sum of W large
  // values has no room in them.
  Reducing prepare(const Row& row) const {
    const DType dtype = call_.model().dtype();
    Reducing r{dtype, row.bytes() / size_of(dtype), nullptr, row.data()};
    if (dtype == DType::bf16) {
      r.wire = DType::f32;
      r.copy = bytes_of(r.elements * sizeof(float));
      r.data = r.copy.get();
      widen(dtype, row.data(), reinterpret_cast<float*>(r.data), r.elements);
    }
    if (averages() && is_half(dtype)) scale(r.wire, r.data, r.elements, share());
    return r;
  }
  void finish(const Reducing& r, const Row& row) const {
    const DType dtype = call_.model().dtype();
    if (averages() && !is_half(dtype)) scale(r.wire, r.data, r.elements, share());
    if (r.copy) narrow(dtype, reinterpret_cast<const float*>(r.data), row.data(), r.elements);
    row.write();
  }
  bool averages() const { return call_.reduce == ReduceOp::avg; }
  double share() const { return 1.0 / static_cast<double>(size_); }

  // Gloo's options know an element by a C++ type of its width.
  template <class Options>
  static void set_output(Options& o, const Reducing& r) {
    switch (size_of(r.wire)) {
      case 1:
        return o.setOutput(reinterpret_cast<uint8_t*>(r.data), r.elements);
      case 2:
        return o.setOutput(reinterpret_cast<uint16_t*>(r.data), r.elements);
      case 4:
        return o.setOutput(reinterpret_cast<uint32_t*>(r.data), r.elements);
      default:
        return o.setOutput(reinterpret_cast<uint64_t*>(r.data), r.elements);
    }
  }

  void all_reduce() {
    const Row row(call_.outputs[0]);
    row.read();
    const Reducing r = prepare(row);
    auto o = options<gloo::AllreduceOptions>();
    // In a ring every chunk is added up in one order, and all ranks get the same bits of it.
    o.setAlgorithm(gloo::AllreduceOptions::Algorithm::RING);
    o.setReduceFunction(combine_function(r.wire, call_.reduce));
    set_output(o, r);
    gloo::allreduce(o);
    finish(r, row);
  }

  void reduce() {
    const Row row(call_.inputs[0], true);  // inputs stay as they are
    row.read();
    const Reducing r = prepare(row);
    auto o = options<gloo::ReduceOptions>();
    o.setRoot(call_.root);
    o.setReduceFunction(combine_function(r.wire, call_.reduce));
    set_output(o, r);
    gloo::reduce(o);
    if (rank_ == call_.root) finish(r, row);  // in place there
  }

  void broadcast() {
    const bool root = rank_ == call_.root;
    const Row row(root ? call_.inputs[0] : call_.outputs[0]);
    if (root) row.read();
    auto o = options<gloo::BroadcastOptions>();
    o.setRoot(call_.root);
    o.setOutput(reinterpret_cast<uint8_t*>(row.data()), row.bytes());
    gloo::broadcast(o);
    if (!root) row.write();
  }

  // Writes the parts of `all`, which lie side by side, into the outputs.
  void write_outputs(const std::byte* all) const {
    for (const Tensor& t : call_.outputs) {
      StridedBytes(t).write(0, t.numel(), all);
      all += size_in_bytes(t);
    }
  }

  void all_gather() {
    const Row mine(call_.inputs[0]);
    const Bytes all = bytes_of(mine.bytes() * size_);
    auto o = options<gloo::AllgatherOptions>();
    o.setInput(reinterpret_cast<uint8_t*>(mine.read().data()), mine.bytes());
    o.setOutput(reinterpret_cast<uint8_t*>(all.get()), mine.bytes() * size_);
    gloo::allgather(o);
    write_outputs(all.get());
  }

  void gather() {
    const Row mine(call_.inputs[0]);
    const bool root = rank_ == call_.root;
    const Bytes all = root ? bytes_of(mine.bytes() * size_) : nullptr;
    auto o = options<gloo::GatherOptions>();
    o.setRoot(call_.root);
    o.setInput(reinterpret_cast<uint8_t*>(mine.read().data()), mine.bytes());
    if (root) o.setOutput(reinterpret_cast<uint8_t*>(all.get()), mine.bytes() * size_);
    gloo::gather(o);
    if (root) write_outputs(all.get());
  }

  void scatter() {
    std::vector<Row> rows;
    std::vector<uint8_t*> places;
    for (const Tensor& t : call_.inputs) {
      rows.emplace_back(t).read();
      places.push_back(reinterpret_cast<uint8_t*>(rows.back().data()));
    }
    const Row mine(call_.outputs[0], true);
    auto o = options<gloo::ScatterOptions>();
    o.setRoot(call_.root);
    if (rank_ == call_.root) o.setInputs(places, mine.bytes());
    o.setOutput(reinterpret_cast<uint8_t*>(mine.data()), mine.bytes());
    gloo::scatter(o);
    mine.write();
  }

  // Everybody sends everybody else a piece. A pair's slot tells the number of bytes as well: pieces
  // of unequal sizes never meet.
  void swap_pieces(const std::vector<std::byte*>& out, const std::vector<size_t>& out_bytes,
                   const std::vector<std::byte*>& in, const std::vector<size_t>& in_bytes) const {
    std::vector<std::unique_ptr<gloo::transport::UnboundBuffer>> sent, received;
    const auto here = static_cast<size_t>(rank_);
    for (size_t step = 1; step < size_; ++step) {
      const size_t to = (here + step) % size_, from = (here + size_ - step) % size_;
      sent.push_back(context_->createUnboundBuffer(out[to], out_bytes[to]));
      received.push_back(context_->createUnboundBuffer(in[from], in_bytes[from]));
      received.back()->recv(static_cast<int>(from), slot(in_bytes[from]));
      sent.back()->send(static_cast<int>(to), slot(out_bytes[to]));
    }
    for (const auto& buffer : received) buffer->waitRecv(timeout_);
    for (const auto& buffer : sent) buffer->waitSend(timeout_);
    if (in_bytes[here] > 0) std::memcpy(in[here], out[here], in_bytes[here]);
  }
  // Apart from the slots of Gloo's own collectives, whose upper byte is below 16.
  uint64_t slot(size_t bytes) const {
    const uint64_t hash = (bytes + 1) * 0x9E3779B97F4A7C15u;
    return uint64_t{0x40} << 56 | uint64_t{tag_} << 24 | hash >> 40;
  }

  void all_to_all() {
    std::vector<Row> out, in;
    std::vector<std::byte*> from, to;
    std::vector<size_t> from_bytes, to_bytes;
    for (const Tensor& t : call_.inputs) {
      from.push_back(out.emplace_back(t).read().data());
      from_bytes.push_back(out.back().bytes());
    }
    for (const Tensor& t : call_.outputs) {
      to.push_back(in.emplace_back(t, true).data());  // an output may overlap an input
      to_bytes.push_back(in.back().bytes());
    }
    swap_pieces(from, from_bytes, to, to_bytes);
    for (const Row& row : in) row.write();
  }

  // The pieces for this rank come together here and are added up in rank order.
  void reduce_scatter() {
    const size_t bytes = size_in_bytes(call_.outputs[0]);
    const Bytes all = bytes_of(bytes * size_);
    std::vector<Row> rows;
    std::vector<std::byte*> from, to;
    for (size_t r = 0; r < size_; ++r) {
      from.push_back(rows.emplace_back(call_.inputs[r]).read().data());
      to.push_back(all.get() + r * bytes);
    }
    const std::vector<size_t> sizes(size_, bytes);
    swap_pieces(from, sizes, to, sizes);

    const DType dtype = call_.outputs[0].dtype();
    const size_t n = bytes / size_of(dtype);
    const bool half = is_half(dtype);
    const DType wire = half ? DType::f32 : dtype;
    const size_t width = size_of(wire) * n;
    const Bytes wide = half ? bytes_of(width * size_) : nullptr;
    if (half) widen(dtype, all.get(), reinterpret_cast<float*>(wide.get()), n * size_);
    std::byte* sum = half ? wide.get() : all.get();
    const Combine combine = combine_function(wire, call_.reduce);
    for (size_t r = 1; r < size_; ++r) combine(sum, sum, sum + r * width, n);
    if (averages()) scale(wire, sum, n, share());
    if (half) narrow(dtype, reinterpret_cast<const float*>(sum), all.get(), n);
    StridedBytes(call_.outputs[0]).write(0, call_.outputs[0].numel(), all.get());
  }

  void send_or_receive() {
    const bool sends = call_.kind == CollectiveKind::send;
    const Row row(sends ? call_.inputs[0] : call_.outputs[0], true);
    if (sends) row.read();
    const auto buffer = context_->createUnboundBuffer(row.data(), row.bytes());
    if (sends) {
      buffer->send(call_.root, slot(row.bytes()));
      buffer->waitSend(timeout_);
    } else {
      buffer->recv(call_.root, slot(row.bytes()));
      buffer->waitRecv(timeout_);
      row.write();
    }
  }

  const std::shared_ptr<gloo::Context>& context_;
  const Collective& call_;
  uint32_t tag_;
  Milliseconds timeout_;
  int rank_;
  size_t size_;
};

}  // namespace

void exchange(const std::shared_ptr<gloo::Context>& context, const Collective& call, uint32_t tag,
              Milliseconds timeout) {
  Exchange(context, call, tag, timeout).run();
}

void meet_all(const std::shared_ptr<gloo::Context>& context, uint32_t tag, Milliseconds timeout) {
  gloo::BarrierOptions o(context);
  o.setTag(tag);
  o.setTimeout(timeout);
  gloo::barrier(o);
}

uint32_t tag_of(std::string_view text) {
  const uint64_t hash = hash_of(text);
  return static_cast<uint32_t>(hash ^ hash >> 32);
}

}  // namespace lockstep::dist::gloo_backend
