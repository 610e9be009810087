// ProcessGroup: a fixed set of ranks that exchange tensors, and Work, one such exchange under way.
// The calls here check their arguments and describe what is asked as a Collective; a backend (shm,
// local, gloo, ...) implements start() and little else, so DDP and users never know which one they
// drive, and whoever wraps a group wraps one function.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <lockstep/tensor/tensor.h>

namespace lockstep::dist {

enum class ReduceOp : uint8_t { sum, avg, product, min, max, band, bor, bxor };
LOCKSTEP_API std::string_view name_of(ReduceOp op);

enum class CollectiveKind : uint8_t {
  all_reduce,
  broadcast,
  reduce,
  all_gather,
  reduce_scatter,
  gather,
  scatter,
  all_to_all,
  barrier,
  send,
  recv
};
LOCKSTEP_API std::string_view name_of(CollectiveKind kind);
/// A call for messages: "all_reduce(sum) of f32 [10]", "broadcast of f32 [10], root 1".
LOCKSTEP_API std::string describe(CollectiveKind kind, ReduceOp reduce, DType dtype,
                                  const Shape& shape, int root);

using Milliseconds = std::chrono::milliseconds;
inline constexpr size_t kRecordBytes = 64 << 10;  // of post()
inline constexpr size_t kNoteBytes = 63;          // of note()

struct CollectiveOptions {
  Milliseconds timeout{0};  // 0: the group's default (30 minutes)
  std::string label = {};   // what errors call this operation: "DDP bucket 2 (fc1.weight, ...)"
};

/// A collective as this rank calls it. What stands where, by kind:
///
///   all_reduce       inputs {t}        outputs {t}, the same tensor
///   broadcast        root: inputs {t}; the others: outputs {t}
///   reduce           inputs {t}        root: outputs {t}
///   all_gather       inputs {t}        outputs one per rank, of t's shape
///   reduce_scatter   inputs one per rank, all of one shape      outputs {t} of it
///   gather           inputs {t}        root: outputs one per rank, of t's shape
///   scatter          root: inputs one per rank, of one shape    outputs {t} of it
///   all_to_all       inputs one per rank, outputs one per rank, of any shapes; input r goes to
///                    rank r, and its numel is that of the output there
///   send, recv       inputs {t}; outputs {t}. They match by pair of ranks, in order
///   barrier          nothing
///
/// Tensors may be strided, empty or 0-d. All have one dtype. Outputs overlap neither themselves nor
/// each other, and inputs in one case only: this rank's own part, which an all_to_all, all_gather,
/// reduce_scatter, gather or scatter moves from an input to an output, may be one view for both.
struct LOCKSTEP_API Collective {
  CollectiveKind kind = CollectiveKind::barrier;
  ReduceOp reduce = ReduceOp::sum;
  int root = 0;  // of broadcast, reduce, gather and scatter; for send and recv the other rank
  std::vector<Tensor> inputs = {};
  std::vector<Tensor> outputs = {};
  CollectiveOptions options = {};
  /// Where it is set the backend calls it once, when the outputs have their values and before the
  /// Work says so, on any thread, whether or not the program still holds the Work; not after a
  /// failure. It throws nothing and uses no group.
  std::function<void()> deliver = {};

  /// The tensor whose dtype and shape all ranks must agree on (all_to_all: its dtype alone);
  /// undefined for barrier.
  const Tensor& model() const;
  /// "all_reduce(sum) of f32 [10]", for messages.
  std::string text() const;
};

/// A collective under way. Its tensors are kept alive until it is complete. Every kind alike: dropped
/// unfinished it is completed, and its outputs are written, by the group's destruction at the latest.
class LOCKSTEP_API Work {
 public:
  virtual ~Work() = default;
  /// Blocks until complete, at most for `timeout` if one is given, else until the operation's own
  /// deadline. Throws DistError with op, shape, dtype, sequence number and the ranks that did not
  /// arrive when the time is over or a peer is lost.
  virtual void wait(Milliseconds timeout = Milliseconds(0)) = 0;
  /// Moves the rank's outstanding operations on, and says whether this one is complete (or failed).
  /// Runs nothing that then() left.
  virtual bool is_completed() = 0;
  /// Set once the operation failed.
  virtual std::exception_ptr exception() const = 0;
  virtual uint64_t sequence_number() const = 0;
  /// What it writes: the outputs of its Collective.
  virtual std::vector<Tensor> result() const = 0;
  /// Blocks the host until the result is there; the same as wait() on a CPU.
  void synchronize() { wait(); }
  /// Runs f once, in the next wait() for this work, on the thread that waits, after the operation
  /// is complete and in the order of these calls; not when it failed. It runs nowhere else, so that
  /// what f starts is started in the order in which the program waits, on every rank alike. What f
  /// throws is thrown by that wait(), and what is left runs in the next one.
  void then(std::function<void()> f);

 protected:
  /// What then() left; for wait() alone. Returns when all has run, here or on another thread.
  void run_then();

 private:
  std::atomic<bool> has_then_{false};
  std::recursive_mutex then_mutex_;  // held while they run: f may ask its own work something
  std::deque<std::function<void()>> then_;
};
using WorkPtr = std::shared_ptr<Work>;

/// All ranks must call the same collectives in the same order. Results are bitwise equal on all
/// ranks and from run to run. Arguments that make no sense throw ShapeError, DTypeError,
/// DeviceError or ValueError on the caller, at once; so does what a backend lacks (DistError).
/// Outputs may overlap inputs in any way, and not each other (ValueError). In a forked child every
/// call but those of a group of one is a DistError, and nothing that the child does reaches the
/// other ranks.
class LOCKSTEP_API ProcessGroup {
 public:
  virtual ~ProcessGroup() = default;
  virtual std::string_view backend() const = 0;  // "shm", "local", ...
  virtual int rank() const = 0;
  virtual int size() const = 0;

  /// In place. avg is the finished sum times 1/size; of integers it is an error.
  WorkPtr all_reduce(Tensor t, ReduceOp op = ReduceOp::sum, CollectiveOptions options = {});
  /// In place: every rank's t becomes the root's.
  WorkPtr broadcast(Tensor t, int root, CollectiveOptions options = {});
  /// Into the root's t; the others' stay as they are.
  WorkPtr reduce(Tensor t, int root, ReduceOp op = ReduceOp::sum, CollectiveOptions options = {});
  /// outputs: one per rank, of input's shape.
  WorkPtr all_gather(std::vector<Tensor> outputs, Tensor input, CollectiveOptions options = {});
  /// output: [size, ...input's shape], or input's shape with size times as many rows; in rank
  /// order.
  WorkPtr all_gather(Tensor output, Tensor input, CollectiveOptions options = {});
  /// output becomes the reduction of what all ranks give as inputs[this rank].
  WorkPtr reduce_scatter(Tensor output, std::vector<Tensor> inputs, ReduceOp op = ReduceOp::sum,
                         CollectiveOptions options = {});
  /// input: [size, ...output's shape], or output's shape with size times as many rows.
  WorkPtr reduce_scatter(Tensor output, Tensor input, ReduceOp op = ReduceOp::sum,
                         CollectiveOptions options = {});
  /// On the root one output per rank; empty elsewhere.
  WorkPtr gather(std::vector<Tensor> outputs, Tensor input, int root,
                 CollectiveOptions options = {});
  /// On the root one input per rank; empty elsewhere.
  WorkPtr scatter(Tensor output, std::vector<Tensor> inputs, int root,
                  CollectiveOptions options = {});
  /// inputs[r] goes to rank r; outputs[r] comes from rank r. Shapes may differ by pair.
  WorkPtr all_to_all(std::vector<Tensor> outputs, std::vector<Tensor> inputs,
                     CollectiveOptions options = {});
  /// Rows of input, split evenly or by input_splits, to the ranks; rows of output from them.
  WorkPtr all_to_all(Tensor output, Tensor input, std::vector<int64_t> output_splits = {},
                     std::vector<int64_t> input_splits = {}, CollectiveOptions options = {});
  /// To and from another rank. What has been sent is taken in the order in which it was sent.
  WorkPtr send(Tensor t, int to, CollectiveOptions options = {});
  WorkPtr recv(Tensor t, int from, CollectiveOptions options = {});
  WorkPtr barrier(CollectiveOptions options = {});

  /// Starts a checked collective: what the calls above end in, and all that a backend implements of
  /// them.
  virtual WorkPtr start(Collective call) = 0;

  /// A group of some of these ranks, in the given order; null on the others. A collective call of
  /// all ranks.
  virtual std::shared_ptr<ProcessGroup> new_group(const std::vector<int>& ranks) = 0;

  // ---- what DDP asks beside collectives, and all it may ask; a group that wraps another forwards
  // these ----

  /// A group of the same ranks with a communicator of its own. A collective call.
  virtual std::shared_ptr<ProcessGroup> child() = 0;
  /// Memory that all_reduce works on in place without a copy, where the backend has such. A
  /// collective call: equal bytes on every rank.
  virtual Ref<Storage> allocate(size_t bytes);
  /// Publishes this rank's record for `epoch` (epochs grow by one; at most kRecordBytes, equally
  /// many on every rank) ... Here by an all_gather.
  virtual void post(uint64_t epoch, std::span<const std::byte> record);
  /// ... and returns all ranks' records of that epoch, by rank; waits for them under the group's
  /// deadline.
  virtual std::vector<std::vector<std::byte>> collect(uint64_t epoch);
  /// Whether post and collect cost no message.
  virtual bool records_are_free() const { return false; }
  /// What errors on other ranks say of this one when they wait for it; at most kNoteBytes, and
  /// cheap.
  virtual void note(std::string_view text);
  /// Moves outstanding operations on, without blocking.
  virtual void progress() {}
  /// Makes every operation of this group, on every rank, fail with `text`.
  virtual void abort(const std::string& text) = 0;
  /// Completes work in flight and says goodbye, for the children that still live too; later
  /// collectives that need this rank fail on the others with "rank r has left".
  virtual void destroy() = 0;

  /// From now on every call above but those that DDP asks throws a DistError with `why`; empty: no
  /// more. This rank's matter alone.
  void forbid(std::string why) { forbidden_ = std::move(why); }

  /// An exception that may go on to end this group: the abort quotes it. Empty: it was dealt with.
  void remember_failure(std::string text) { failure_ = std::move(text); }
  /// "; the last one its forward threw: ..."; empty when none is remembered.
  std::string failure_text() const { return failure_.empty() ? failure_ : "; " + failure_; }

 private:
  friend LOCKSTEP_API WorkPtr all_reduce_coalesced(ProcessGroup&, std::vector<Tensor>, ReduceOp,
                                                   CollectiveOptions);
  friend LOCKSTEP_API WorkPtr broadcast_coalesced(ProcessGroup&, std::vector<Tensor>, int,
                                                  CollectiveOptions);
  WorkPtr begin(Collective call);

  struct Posted {
    uint64_t epoch = 0;
    Tensor records;  // u8 [size, bytes]
    WorkPtr work;
  };
  Posted posted_;
  std::string forbidden_;
  std::string failure_;
};

/// One collective over many tensors of any dtypes: one per dtype, packed side by side.
LOCKSTEP_API WorkPtr all_reduce_coalesced(ProcessGroup& group, std::vector<Tensor> tensors,
                                          ReduceOp op = ReduceOp::sum,
                                          CollectiveOptions options = {});
LOCKSTEP_API WorkPtr broadcast_coalesced(ProcessGroup& group, std::vector<Tensor> tensors, int root,
                                         CollectiveOptions options = {});

}  // namespace lockstep::dist
