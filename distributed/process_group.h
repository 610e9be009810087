// ProcessGroup: a fixed set of ranks that exchange tensors, and Work, one such exchange under way.
// A backend (shm, local, ...) implements it; DDP and users drive it without knowing which one they
// have.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <lockstep/tensor/tensor.h>

namespace lockstep::dist {

enum class ReduceOp : uint8_t { sum, avg, product, min, max, band, bor, bxor };
LOCKSTEP_API std::string_view name_of(ReduceOp op);

using Milliseconds = std::chrono::milliseconds;

struct CollectiveOptions {
  Milliseconds timeout{0};  // 0: the group's default (30 minutes)
  std::string label = {};  // what errors call this operation, e.g. "DDP bucket 2 (fc1.weight, ...)"
};

/// A collective under way. Its tensors are kept alive until it is complete; dropped unfinished it
/// is completed by the group's destruction.
class LOCKSTEP_API Work {
 public:
  virtual ~Work() = default;
  /// Blocks until complete. Throws DistError with op, shape, dtype, sequence number and the ranks
  /// that did not arrive when the deadline passes or a peer is lost.
  virtual void wait() = 0;
  /// Moves the rank's outstanding operations on, and says whether this one is complete (or failed).
  virtual bool is_completed() = 0;
  /// Set once the operation failed.
  virtual std::exception_ptr exception() const = 0;
  virtual uint64_t sequence_number() const = 0;
  /// Blocks the host until the result is there; the same as wait() on a CPU.
  void synchronize() { wait(); }
  /// Runs f once on the thread that finds this work complete, before its wait() returns.
  void then(std::function<void()> f) { then_.push_back(std::move(f)); }

 protected:
  void run_then() {
    for (auto& f : std::exchange(then_, {})) f();
  }

 private:
  std::vector<std::function<void()>> then_;
};
using WorkPtr = std::shared_ptr<Work>;

/// All ranks must call the same collectives in the same order. Results are bitwise equal on all
/// ranks and from run to run. Tensors may be strided, empty or 0-d; what a backend lacks throws on
/// the caller at once.
class LOCKSTEP_API ProcessGroup {
 public:
  virtual ~ProcessGroup() = default;
  virtual std::string_view backend() const = 0;  // "shm", "local", ...
  virtual int rank() const = 0;
  virtual int size() const = 0;

  /// In place. avg is the finished sum times 1/size; of integers it is an error.
  virtual WorkPtr all_reduce(Tensor t, ReduceOp op = ReduceOp::sum,
                             CollectiveOptions options = {}) = 0;
  /// In place: every rank's t becomes the root's.
  virtual WorkPtr broadcast(Tensor t, int root, CollectiveOptions options = {}) = 0;
  /// output: [size, ...input's shape], written in rank order.
  virtual WorkPtr all_gather(Tensor output, Tensor input, CollectiveOptions options = {}) = 0;
  virtual WorkPtr barrier(CollectiveOptions options = {}) = 0;

  // ---- what DDP asks beside collectives, and all it may ask; a group that wraps another forwards
  // these ----

  /// A group of the same ranks with a communicator of its own. A collective call.
  virtual std::shared_ptr<ProcessGroup> child() = 0;
  /// Memory that all_reduce works on in place without a copy. A collective call: equal bytes on
  /// every rank.
  virtual Ref<Storage> allocate(size_t bytes) = 0;
  /// Publishes this rank's record for `epoch` (epochs grow by one; at most 4096 bytes) ...
  virtual void post(uint64_t epoch, std::span<const std::byte> record) = 0;
  /// ... and returns all ranks' records of that epoch, by rank; waits for them under the group's
  /// deadline.
  virtual std::vector<std::vector<std::byte>> collect(uint64_t epoch) = 0;
  /// Moves outstanding operations on, without blocking.
  virtual void progress() = 0;
  /// Makes every operation of this group, on every rank, fail with `text`.
  virtual void abort(const std::string& text) = 0;
  /// Completes work in flight and says goodbye; later collectives that need this rank fail on the
  /// others with "rank r has left".
  virtual void destroy() = 0;
};

}  // namespace lockstep::dist
