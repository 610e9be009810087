#include <lockstep/tensor/op_hook.h>

#include <utility>

namespace lockstep {
namespace {

LOCKSTEP_THREAD_LOCAL OpHookGuard* innermost = nullptr;

/// Which hooks are around ops, for a scope.
class Active {
 public:
  explicit Active(OpHookGuard* guard) : before_(std::exchange(innermost, guard)) {}
  ~Active() { innermost = before_; }
  Active(const Active&) = delete;

 private:
  OpHookGuard* before_;
};

void check_results(const OpInfo& info, std::span<const Tensor> inputs,
                   const std::vector<Tensor>& results, int count) {
  LOCKSTEP_CHECK(count < 0 || results.size() == static_cast<size_t>(count), Error, info.name,
                 ": an OpHook returned ", results.size(), " results, and the op has ", count);
  for (const Tensor& y : results)
    LOCKSTEP_CHECK(y.defined(), Error, info.name, ": an OpHook returned an undefined tensor");
  LOCKSTEP_CHECK(!info.in_place || results[0].is_same(inputs[0]), Error, info.name,
                 ": an OpHook returned another tensor than the one that the op works on; write the "
                 "values to that one");
}

std::vector<Tensor> call_from(OpHookGuard* guard, const OpInfo& info,
                              std::span<const Tensor> inputs, int count, const OpHook::Run& op) {
  if (!guard) return op();
  const Active outer(guard->outer());  // null around the op itself, so that its parts are unseen
  bool ran = false;
  const OpHook::Run run = [&] {
    LOCKSTEP_CHECK(!std::exchange(ran, true), Error, info.name,
                   ": an OpHook called run() twice; an op runs once");
    return call_from(guard->outer(), info, inputs, count, op);
  };
  std::vector<Tensor> results = guard->hook().around(info, inputs, run);
  check_results(info, inputs, results, count);
  return results;
}

}  // namespace

OpHookGuard::OpHookGuard(OpHook& hook) noexcept
    : hook_(hook), outer_(std::exchange(innermost, this)) {}

OpHookGuard::~OpHookGuard() {
  OpHookGuard** at = &innermost;
  while (*at && *at != this) at = &(*at)->outer_;
  if (*at) *at = outer_;
}

OpHookGuard* detail::op_hooks() noexcept { return innermost; }

std::vector<Tensor> detail::call_op_hooks(const OpInfo& info, std::span<const Tensor> inputs,
                                          int count, const OpHook::Run& op) {
  return call_from(innermost, info, inputs, count, op);
}

}  // namespace lockstep
