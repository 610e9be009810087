// OpHook: code around every op of a thread, for profiling, anomaly detection, selective
// checkpointing and capture. Hooks stack: the innermost is called first and, by run(), calls the
// next outer one; the outermost runs the op.
//
//   struct Timer : OpHook {
//     std::map<std::string, double> seconds;
//     std::vector<Tensor> around(const OpInfo& op, std::span<const Tensor>, const Run& run) override {
//       const double start = now();
//       std::vector<Tensor> results = run();
//       seconds[op.name] += now() - start;
//       return results;
//     }
//   };
//   Timer timer;
//   { const OpHookGuard guard(timer); y = net(x); }
#pragma once

#include <functional>
#include <span>
#include <vector>

#include <lockstep/tensor/op_info.h>
#include <lockstep/tensor/tensor.h>

namespace lockstep {

class LOCKSTEP_API OpHook {
 public:
  using Run = std::function<std::vector<Tensor>()>;
  virtual ~OpHook() = default;
  /// Called in place of each op that runs while the hook's guard is the innermost of this thread.
  /// Calls run(), once, for the op's results, and returns them, or returns as many others without
  /// running it. An absent input is undefined. An op in place writes to input 0 and results in that
  /// tensor; whoever does not run it must write the values himself, and nothing is recorded. While
  /// hooks hold an input, no op takes over its memory.
  ///
  /// Ops that `around` itself uses are seen by the outer hooks alone, and those of which an op's
  /// forward is made by none: they are part of that op.
  virtual std::vector<Tensor> around(const OpInfo& op, std::span<const Tensor> inputs,
                                     const Run& run) = 0;
};

/// Puts a hook around the ops of this thread, for the guard's lifetime, which lies within the hook's.
class LOCKSTEP_API OpHookGuard {
 public:
  explicit OpHookGuard(OpHook& hook) noexcept;
  ~OpHookGuard();
  OpHookGuard(const OpHookGuard&) = delete;
  OpHookGuard& operator=(const OpHookGuard&) = delete;

  OpHook& hook() const noexcept { return hook_; }
  OpHookGuard* outer() const noexcept { return outer_; }

 private:
  OpHook& hook_;
  OpHookGuard* outer_;
};

namespace detail {

/// The innermost guard of this thread, or null.
LOCKSTEP_API OpHookGuard* op_hooks() noexcept;

/// Calls the thread's hooks around `op`. `count` is how many results the op has; -1: any number.
LOCKSTEP_API std::vector<Tensor> call_op_hooks(const OpInfo& info, std::span<const Tensor> inputs,
                                               int count, const OpHook::Run& op);

}  // namespace detail
}  // namespace lockstep
