// SyncFlag: which backwards of a wrapped module are synchronised. The forward decides: one inside
// no_sync makes it local, one outside synchronised, and every backward obeys the flag as it stands
// when it starts. When a parameter changes the flag holds no longer, so that a backward without a
// forward through the wrapper is noticed.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>

namespace lockstep::dist {

class SyncFlag {
 public:
  /// `versions` grows whenever a parameter's values change.
  SyncFlag(int rank, std::function<uint64_t()> versions)
      : rank_(rank), versions_(std::move(versions)) {}

  void forward_starts();
  /// Enters (+1) or leaves (-1) a no_sync scope.
  void no_sync(int by) { depth_ += by; }
  bool inside_no_sync() const { return depth_ > 0; }
  /// Whether a backward ran without a forward through the wrapper, ever. Its gradients stayed on this
  /// rank.
  bool had_unwrapped_backward() const { return had_unwrapped_backward_; }
  /// While it has a value, that decides and not the forward.
  void force(std::optional<bool> synchronised) { forced_ = synchronised; }
  /// Whether a backward that starts now is synchronised; warns, once each, where the program may
  /// not mean it. `through_forward`: it runs through a forward of the wrapper, so it is known even
  /// where a parameter has changed since.
  bool decide(bool through_forward);

 private:
  enum class Flag { unset, sync, local };

  int rank_;
  std::function<uint64_t()> versions_;
  Flag flag_ = Flag::unset;
  uint64_t flag_versions_ = 0;
  int depth_ = 0;
  std::optional<bool> forced_;
  bool had_unwrapped_backward_ = false, warned_scope_ = false;
};

}  // namespace lockstep::dist
