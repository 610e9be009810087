#include <lockstep/distributed/ddp/forward_log.h>

#include <algorithm>
#include <functional>

#include <lockstep/tensor/node.h>

namespace lockstep::dist {

namespace {
constexpr size_t kMost = 1 << 16;  // a program that never runs a backward must not grow
}

void ForwardLog::stay_on_thread() {
  if (thread_ != std::this_thread::get_id()) clear();
  thread_ = std::this_thread::get_id();
}

void ForwardLog::starts() {
  stay_on_thread();
  if (forwards_.size() >= kMost) clear();
  const uint64_t next = next_node_sequence();
  forwards_.push_back({next, next, false});
}

void ForwardLog::ends() {
  if (thread_ != std::this_thread::get_id() || forwards_.empty()) return;
  forwards_.back().end = next_node_sequence();
  if (forwards_.back().begin == forwards_.back().end) forwards_.pop_back();  // made no graph
}

bool ForwardLog::backward_runs(std::span<const uint64_t> nodes) {
  stay_on_thread();
  bool any = false;
  for (const uint64_t node : nodes) {
    const auto after = std::upper_bound(forwards_.begin(), forwards_.end(), node,
                                        [](uint64_t n, const Forward& f) { return n < f.begin; });
    if (after == forwards_.begin()) continue;
    Forward& f = *std::prev(after);
    const bool inside = node < f.end;
    f.has_backward |= inside;
    any |= inside;
  }
  return any;
}

uint32_t ForwardLog::skipped() const {
  const auto has = [](const Forward& f) { return f.has_backward; };
  const auto last = std::find_if(forwards_.rbegin(), forwards_.rend(), has);
  return static_cast<uint32_t>(std::count_if(last, forwards_.rend(), std::not_fn(has)));
}

}  // namespace lockstep::dist
