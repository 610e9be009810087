// Group, init and the default group of each thread.
#include <lockstep/distributed/group.h>

#include <cstdlib>

#include <lockstep/distributed/deadline.h>
#include <lockstep/distributed/error_file.h>
#include <lockstep/distributed/failure_note.h>
#include <lockstep/distributed/limits.h>
#include <lockstep/distributed/log.h>
#include <lockstep/distributed/registry.h>
#include <lockstep/distributed/single_group.h>

namespace lockstep::dist {

namespace {
struct Default {
  std::shared_ptr<ProcessGroup> group;
  int local_rank = 0;
};
thread_local Default this_thread;
}  // namespace

Group::Hold::~Hold() {
  if (!aborts || std::uncaught_exceptions() <= exceptions) return;
  suppress_failure_note();
  try {
    group->abort(str_cat("an exception ended rank ", group->rank(), "'s use of the group",
                         group->failure_text()));
  } catch (...) {
    // The exception under way is the one to report.
  }
}

Group::Group() : Group(std::make_shared<SingleGroup>(), 0) {}
Group::Group(std::shared_ptr<ProcessGroup> group, int local_rank)
    : hold_(std::make_shared<Hold>(std::move(group), true)), local_rank_(local_rank) {}

Tensor Group::all_gather(const Tensor& input, const CollectiveOptions& options) const {
  Shape shape = input.shape();
  shape.insert(0, size());
  Tensor output = empty(shape, {.dtype = input.dtype(), .device = input.device()});
  all_gather(output, input, options);
  return output;
}

std::vector<Tensor> Group::gather(const Tensor& input, int root,
                                  const CollectiveOptions& options) const {
  std::vector<Tensor> outputs;
  for (int r = 0; rank() == root && r < size(); ++r)
    outputs.push_back(empty(input.shape(), {.dtype = input.dtype(), .device = input.device()}));
  process_group().gather(outputs, input, root, options)->wait();
  return outputs;
}

std::optional<Group> Group::new_group(const std::vector<int>& ranks) const {
  auto made = process_group().new_group(ranks);
  if (!made) return std::nullopt;
  return Group(std::move(made), local_rank_);
}

Group init(const InitOptions& options) {
  record_errors();
  const bool again = this_thread.group && this_thread.group->size() > 1;
  LOCKSTEP_CHECK(
      !again, DistError, "init: this thread has a default group of ", this_thread.group->size(),
      " ranks already; use default_group(), or destroy it and set_default_group(nullptr, 0)");
  const Environment env = read_environment();
  InitOptions filled = options;
  if (filled.join_timeout.count() <= 0)
    filled.join_timeout = Milliseconds(static_cast<int64_t>(
        1000 * join_timeout_seconds([](const char* n) { return std::getenv(n); })));
  filled.timeout = bounded(filled.timeout);
  filled.join_timeout = bounded(filled.join_timeout);
  open_standard_descriptors();
  std::shared_ptr<ProcessGroup> group;
  try {
    group = make_group(env, filled);
  } catch (const DistError&) {
    note_failed_peer();
    throw;
  }
  log_info(str_cat("rank ", env.rank, " of ", env.size, ", launched by ", env.launcher,
                   ", backend ", group->backend()));
  set_default_group(group, env.local_rank);
  return Group(std::move(group), env.local_rank);
}

Group default_group() {
  if (!this_thread.group) return Group();
  // A temporary handle: it does not abort the group when an exception unwinds it.
  return Group(std::make_shared<Group::Hold>(this_thread.group, false), this_thread.local_rank);
}

void set_default_group(std::shared_ptr<ProcessGroup> group, int local_rank) {
  this_thread = {std::move(group), local_rank};
}

double mean(double value, const Group& group) {
  const Tensor t = full({1}, value, {.dtype = DType::f64});
  group.all_reduce(t, ReduceOp::avg, {.label = "dist::mean"});
  return *t.data<double>();
}

}  // namespace lockstep::dist
