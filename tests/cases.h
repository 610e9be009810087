// Cases: scenarios of training on several ranks. A case is a name, a number of ranks and a body that every
// rank runs and that throws where something is wrong. The same body runs on ranks as threads (local), as
// processes (shm), and as processes over gloo where that backend is there. A test file lists its cases in
// cases::all(). A body tries its fault in every variant that it can think of (which rank, how many buckets,
// which options), so that processes start once per case.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <future>
#include <regex>

#include <lockstep/distributed/registry.h>

#include "ddp_helpers.h"
#include "sockets.h"
#include "wrapped_group.h"

namespace cases {

using dist::DistributedDataParallelOptions, dist::Milliseconds;

/// The group's deadline where a case is to meet it: time enough for what works, and not more, since it passes.
inline constexpr Milliseconds kDeadline{1500 + 250 * ranks::kPatience};

struct Case {
  std::string name;
  int size = 2;
  std::function<void(Group)> body;
  std::vector<std::string> throws = {};  // parts of the Error on every rank; empty: there is none
  Milliseconds timeout = std::chrono::seconds(15);  // of the group
  bool threads = true;                              // false: a rank ends its process
  std::map<int, int> codes = {};                    // exit codes other than 0, by rank
  bool silent = false;                              // processes print nothing
};

/// What the test file lists.
const std::vector<Case>& all();

// ---- what bodies use ----

/// The warnings of this rank; every rank's thread has its own.
inline std::vector<std::string>& warnings() {
  thread_local std::vector<std::string> mine;
  return mine;
}
/// Since the last call there was one warning on this rank at most, with this in it, and one somewhere.
inline void one_warning(const Group& group, const std::string& part) {
  const auto mine = std::exchange(warnings(), {});
  for (const std::string& w : mine) {
    require(mine.size() == 1, "more warnings than one on a rank: " + w);
    require(contains(w, part), "\"" + w + "\" lacks \"" + part + "\"");
  }
  const Tensor n = f64(static_cast<double>(mine.size()));
  group.all_reduce(n);
  require(n.item<double>() > 0, "nobody was warned: " + part);
}
inline void no_warning() {
  for (const std::string& w : std::exchange(warnings(), {})) require(false, "a warning: " + w);
}

/// f throws an Error with all these parts on this rank, and the group serves on after it.
inline void refuses(const Group& group, const std::vector<std::string>& parts,
                    const std::function<void()>& f) {
  std::string text = "no error";
  try {
    f();
  } catch (const Error& e) {
    text = e.what();
  }
  for (const std::string& part : parts)
    require(contains(text, part),
            str_cat("rank ", group.rank(), ": \"", text, "\" lacks \"", part, "\""));
  const Tensor t = f64(group.rank() + 1.0);
  group.all_reduce(t);
  near(t.item<double>(), group.size() * (group.size() + 1) / 2.0, "the group after the error");
}

/// The mean over the ranks r of f(r).
inline double mean_over(const Group& group, const std::function<double(int)>& f) {
  double sum = 0;
  for (int r = 0; r < group.size(); ++r) sum += f(r);
  return sum / group.size();
}

/// t holds the same bits on every rank.
inline void same_bits(const Group& group, const Tensor& t, const std::string& what) {
  const Tensor all = group.all_gather(t.detach().contiguous());
  const auto first = all[0].to_vector<double>();
  for (int r = 1; r < group.size(); ++r)
    require(first.empty() || std::memcmp(all[r].to_vector<double>().data(), first.data(),
                                         first.size() * sizeof(double)) == 0,
            str_cat(what, " of rank ", r, " differs from rank 0's"));
}
/// Parameters, and gradients where there are such, hold the same bits on every rank.
template <class Net>
void in_step(const Group& group, const Net& net) {
  for (const auto& [name, p] : net.named_parameters()) {
    same_bits(group, p, name);
    same_bits(group, f64(p.grad().defined()), name + ": whether there is a gradient");
    if (p.grad().defined()) same_bits(group, p.grad(), name + ".grad");
  }
}
/// Every element within tol of the other's, relative to the largest.
inline void all_near(const Tensor& got, const Tensor& want, const std::string& what,
                     double tol = kTol) {
  require(got.shape() == want.shape(), what + ": another shape");
  const auto a = got.to_vector<double>(), b = want.to_vector<double>();
  double scale = 1e-300;
  for (const double v : b) scale = std::max(scale, std::abs(v));
  for (size_t i = 0; i < b.size(); ++i)
    require(std::abs(a[i] - b[i]) <= tol * scale,
            str_cat(what, "[", i, "]: got ", a[i], ", want ", b[i]));
}

/// The options as they are, which is one bucket, and with a bucket for each parameter.
inline std::vector<DistributedDataParallelOptions> layouts(
    DistributedDataParallelOptions options = {}) {
  DistributedDataParallelOptions small = options;
  small.bucket_cap_mb = small.first_bucket_mb = 1e-6;
  return {options, small};
}

/// One collective that a rank started.
struct Call {
  dist::CollectiveKind kind;
  DType dtype = DType::u8;
  size_t bytes = 0;
  std::string text;
};
/// Notes what is started on a group and on the children that it makes.
class RecordingGroup final : public dist::WrappedGroup {
 public:
  using Log = std::vector<Call>;
  explicit RecordingGroup(std::shared_ptr<ProcessGroup> inner,
                          std::shared_ptr<Log> log = std::make_shared<Log>())
      : WrappedGroup(std::move(inner)), log_(std::move(log)) {}
  dist::WorkPtr start(dist::Collective call) override {
    Call made{call.kind, DType::u8, 0, call.text()};
    if (const Tensor& t = call.model(); t.defined()) {
      made.dtype = t.dtype();
      made.bytes = static_cast<size_t>(t.numel()) * size_of(t.dtype());
    }
    log_->push_back(made);
    return inner_->start(std::move(call));
  }
  std::shared_ptr<ProcessGroup> child() override {
    return std::make_shared<RecordingGroup>(inner_->child(), log_);
  }
  Log& log() { return *log_; }
  /// How many of the calls since the last clear() reduced gradients: all_reduces of floating numbers.
  size_t reductions() const {
    return static_cast<size_t>(std::count_if(log_->begin(), log_->end(), [](const Call& c) {
      return c.kind == dist::CollectiveKind::all_reduce && is_floating(c.dtype);
    }));
  }

 private:
  std::shared_ptr<Log> log_;
};
inline std::shared_ptr<RecordingGroup> recording(const Group& group) {
  return std::make_shared<RecordingGroup>(group.shared());
}

// ---- how cases run ----

/// A case on this rank: what it throws is what is wrong. The group can be destroyed in any event.
inline void run(const Case& c, const Group& group) {
  warnings().clear();
  std::string text;
  try {
    c.body(group);
  } catch (const Error& e) {
    if (c.throws.empty()) throw;
    text = e.what();
  }
  require(c.throws.empty() || !text.empty(), str_cat("no error on rank ", group.rank()));
  for (const std::string& part : c.throws)
    require(contains(text, part),
            str_cat("rank ", group.rank(), ": \"", text, "\" lacks \"", part, "\""));
  group.destroy();
}

/// What is wrong with a case on ranks as threads; "" for nothing. Threads that hang end the program.
inline std::string on_threads(const Case& c) {
  auto run_all = std::async(std::launch::async, [&]() -> std::string {
    try {
      run_local(c.size, [&](Group group) { run(c, group); }, {.timeout = c.timeout});
      return "";
    } catch (const std::exception& e) {
      return e.what();
    }
  });
  if (run_all.wait_for(std::chrono::seconds(20 * ranks::kPatience)) == std::future_status::ready)
    return run_all.get();
  std::fprintf(stderr, "hung: %s\n", c.name.c_str());
  std::_Exit(1);
}

/// The same on ranks as processes over a backend.
inline std::string on_processes(const Case& c, const std::string& backend) {
  ranks::Options options{.variables = {{"CASE", c.name}, {"BACKEND", backend}}};
  if (backend == "gloo")
    options.variables.insert({{"MASTER_ADDR", "127.0.0.1"},
                              {"MASTER_PORT", std::to_string(sockets::Listener().port())},
                              {"LOCKSTEP_TOKEN", "a secret"}});
  const auto ended = ranks::run_ranks(c.size, "rank: case", options);
  std::string text;
  for (const ranks::Ended& e : ended) {
    const auto code = c.codes.find(e.rank);
    const bool as_expected = code != c.codes.end() && !e.hung && e.code == code->second;
    if (!as_expected) text += ranks::failures({e});
    if (c.silent && std::regex_replace(e.output, std::regex("\\[doctest\\].*\n"), "") != "")
      text += str_cat("rank ", e.rank, " printed: ", e.output);
  }
  return text;
}

/// The environment variable CASE picks one case alone.
inline bool is_picked(const Case& c) {
  const char* name = std::getenv("CASE");
  return !name || c.name == name;
}

struct WarningsPerRank {
  WarningsPerRank() {
    set_warning_handler([](const std::string& w) { warnings().push_back(w); });
  }
  ~WarningsPerRank() { set_warning_handler({}); }
};

}  // namespace cases

TEST_CASE("ranks as threads") {
  const cases::WarningsPerRank heard;
  for (const cases::Case& c : cases::all()) {
    if (!c.threads || !cases::is_picked(c)) continue;
    CAPTURE(c.name);
    const std::string wrong = cases::on_threads(c);
    CHECK_MESSAGE(wrong == "", wrong);
  }
}

TEST_CASE("ranks as processes over shm") {
  for (const cases::Case& c : cases::all()) {
    if (!cases::is_picked(c)) continue;
    CAPTURE(c.name);
    const std::string wrong = cases::on_processes(c, "shm");
    CHECK_MESSAGE(wrong == "", wrong);
  }
}

TEST_CASE("ranks as processes over gloo") {
#ifndef LOCKSTEP_HAS_GLOO
  MESSAGE("skipped: Lockstep was built without Gloo");
  return;
#endif
  for (const cases::Case& c : cases::all()) {
    if (!cases::is_picked(c)) continue;
    CAPTURE(c.name);
    const std::string wrong = cases::on_processes(c, "gloo");
    CHECK_MESSAGE(wrong == "", wrong);
  }
}

TEST_CASE("rank: case" * doctest::skip()) {
  const cases::WarningsPerRank heard;
  const char* name = std::getenv("CASE");
  REQUIRE(name != nullptr);
  for (const cases::Case& c : cases::all()) {
    if (c.name != name) continue;
    const Group group = dist::init({.backend = std::getenv("BACKEND"), .timeout = c.timeout});
    cases::run(c, group);
    return;
  }
  FAIL("no case of this name");
}
