// Ranks that are killed, stopped, leave or throw while all of them train under DistributedDataParallel, over
// shm and over gloo, each fault once on rank 0 and once on another. The survivors get an error that names
// the rank, within two seconds of a death and within the deadline of a stop.
#include <doctest/doctest.h>

#include <signal.h>
#include <sys/resource.h>

#include <cstdlib>
#include <fstream>
#include <future>

#include "ddp_helpers.h"
#include "sockets.h"

namespace {

constexpr double kDeadline = 2 * ranks::kPatience;  // seconds, of every collective

struct Fault {
  std::string mode, point;  // what happens, and where
};
const std::vector<Fault> kFaults{
    {"kill", "before"}, {"kill", "during"},   {"kill", "after"},    {"kill", "backward"},
    {"stop", "before"}, {"stop", "during"},   {"stop", "after"},    {"stop", "backward"},
    {"exit", "before"}, {"exit", "backward"}, {"throw", "forward"}, {"throw", "backward"},
};

struct Three : nn::Module {
  nn::Linear a{32, 32}, b{32, 32}, c{32, 4};
  std::function<void()> in_forward = [] {};
  Tensor forward(Tensor x) {  // [B, 32] to [B, 4]
    in_forward();
    return c(relu(b(relu(a(x)))));
  }
  LOCKSTEP_MODULE(Three, a, b, c)
};

std::string variable(const char* name) { return std::getenv(name); }

/// Where the victim leaves its number and the time before the fault.
void leave_word() {
  std::ofstream file(variable("FAULT_FILE"));
  file << getpid() << ' ' << std::to_string(ranks::now()) << std::endl;
}
std::pair<pid_t, double> read_word() {
  std::ifstream file(variable("FAULT_FILE"));
  std::pair<pid_t, double> word{0, 0};
  file >> word.first >> word.second;
  return word;
}

void happen(const std::string& mode) {
  leave_word();
  if (mode == "kill") raise(SIGKILL);
  if (mode == "stop") raise(SIGSTOP);
  if (mode == "exit") std::_Exit(0);
  if (mode == "throw") throw ValueError("the victim gave up");
}

/// Trains until something happens; in step 3 the fault does, on the victim.
void train(const Group& g, const Fault& fault, int victim) {
  const bool mine = g.rank() == victim;
  bool armed = false;
  const auto at = [&](const std::string& point) {
    if (armed && mine && fault.point == point) happen(fault.mode);
  };
  manual_seed(1);
  Three module;
  module.in_forward = [&] { at("forward"); };
  DistributedDataParallel net{module, g, {.bucket_cap_mb = 1e-3, .first_bucket_mb = 1e-3}};
  module.b.weight.register_post_accumulate_grad_hook([&](const Tensor&) { at("backward"); });
  optim::SGD opt{net.parameters(), {.lr = 0.01}};
  const Tensor numbers = ones({1 << 20});
  for (int step = 0; step < 1000; ++step) {
    armed = step == 3;
    at("before");
    const dist::WorkPtr work = g.all_reduce_async(numbers, dist::ReduceOp::avg);
    at("during");
    work->wait();
    at("after");
    opt.zero_grad();
    net(randn({4, 32})).square().mean().backward();
    opt.step();
  }
}

std::map<std::string, std::string> variables_of(const std::string& backend) {
  std::map<std::string, std::string> variables{{"FAULT_BACKEND", backend}};
  if (backend == "gloo")
    variables.insert({{"MASTER_ADDR", "127.0.0.1"},
                      {"MASTER_PORT", std::to_string(sockets::Listener().port())},
                      {"LOCKSTEP_TOKEN", "a secret"}});
  return variables;
}

Group join_here() {
  return dist::init({.backend = variable("FAULT_BACKEND"),
                     .timeout = std::chrono::milliseconds(static_cast<int>(1000 * kDeadline))});
}

}  // namespace

TEST_CASE("rank: fault" * doctest::skip()) {
  const Fault fault{variable("FAULT_MODE"), variable("FAULT_POINT")};
  const int victim = std::atoi(variable("FAULT_VICTIM").c_str());
  const Group g = join_here();
  std::string text;
  try {
    train(g, fault, victim);
  } catch (const Error& e) {
    text = e.what();
  }
  const double after = ranks::now();
  const auto word = read_word();
  const auto pid = word.first;
  const double then = word.second;
  if (fault.mode == "stop" && g.rank() == (victim == 0 ? 1 : 0)) kill(pid, SIGKILL);
  if (g.rank() == victim) {
    CHECK_MESSAGE(contains(text, "the victim gave up"), text);
    g.process_group().abort(text);  // as the unwinding of the last handle does
  } else {
    CHECK_MESSAGE(contains(text, str_cat("rank ", victim)), text);
    if (fault.mode == "throw") CHECK_MESSAGE(contains(text, "the victim gave up"), text);
    if (fault.point == "forward" || fault.point == "backward")  // where DDP alone communicates
      CHECK_MESSAGE(contains(text, "DDP bucket "), text);
    const double most =
        fault.mode == "stop" ? kDeadline + 2 * ranks::kPatience : 2 * ranks::kPatience;
    CHECK_MESSAGE(after - then <= most, str_cat(after - then, " s: ", text));
  }
  CHECK_NOTHROW(g.destroy());
}

namespace {

/// What is wrong with one fault on three ranks; "" for nothing.
std::string check_fault(const std::string& backend, const Fault& fault, int victim,
                        const std::string& file) {
  auto variables = variables_of(backend);
  variables.insert({{"FAULT_MODE", fault.mode},
                    {"FAULT_POINT", fault.point},
                    {"FAULT_VICTIM", std::to_string(victim)},
                    {"FAULT_FILE", file}});
  std::string wrong;
  for (const auto& e :
       ranks::run_ranks(3, "rank: fault", {.deadline = 30, .variables = variables})) {
    const bool dies = e.rank == victim && (fault.mode == "kill" || fault.mode == "stop");
    if (e.hung || e.signal != (dies ? SIGKILL : 0) || (!dies && e.code != 0))
      wrong +=
          str_cat(fault.mode, ' ', fault.point, " on rank ", victim, ": rank ", e.rank,
                  e.hung ? " hung" : "", ", signal ", e.signal, ", code ", e.code, ":\n", e.output);
  }
  return wrong;
}

void check_faults(const std::string& backend) {
  char folder[] = "/tmp/lockstep-fault-XXXXXX";
  REQUIRE(mkdtemp(folder));
  // Some at once: they mostly wait.
  std::vector<std::future<std::string>> under_way;
  int number = 0;
  const auto finish = [&] {
    for (auto& one : under_way) {
      const std::string wrong = one.get();
      CHECK_MESSAGE(wrong.empty(), wrong);
    }
    under_way.clear();
  };
  for (const Fault& fault : kFaults)
    for (const int victim : {1, 0}) {
      under_way.push_back(std::async(std::launch::async, check_fault, backend, fault, victim,
                                     str_cat(folder, "/", number++)));
      if (under_way.size() == 4) finish();
    }
  finish();
  std::filesystem::remove_all(folder);
}
}  // namespace

TEST_CASE("faults while training, ranks as processes over shm") { check_faults("shm"); }
TEST_CASE("faults while training, ranks as processes over gloo") {
#ifdef LOCKSTEP_HAS_GLOO
  check_faults("gloo");
#else
  MESSAGE("skipped: Lockstep was built without Gloo");
#endif
}

TEST_CASE("rank: no room" * doctest::skip()) {
  const Group g = join_here();
  const int victim = std::atoi(variable("FAULT_VICTIM").c_str());
  if (g.rank() == victim) {
    const bool files = variable("FAULT_MODE") == "files";
    signal(SIGXFSZ, SIG_IGN);
    rlimit limit;
    getrlimit(files ? RLIMIT_FSIZE : RLIMIT_AS, &limit);
    limit.rlim_cur = files ? 1 << 20 : 256 << 20;  // what is mapped already stays
    REQUIRE(setrlimit(files ? RLIMIT_FSIZE : RLIMIT_AS, &limit) == 0);
  }
  bool refused = false;
  try {
    g.process_group().allocate(size_t{1} << 29);
  } catch (const OutOfMemory&) {
    refused = true;
  }
  // Only who hands the memory out writes a file; a limit of files elsewhere limits nothing.
  CHECK(refused == (variable("FAULT_MODE") == "space" || victim == 0));
  const Tensor t = ones({3}) * static_cast<double>(g.rank());
  g.all_reduce(t);
  CHECK(t.to_vector<double>() == std::vector<double>(3, 3));
}
#ifndef __SANITIZE_ADDRESS__  // whose shadow is larger than any limit
TEST_CASE("memory that one rank cannot have, ranks as processes, is an error on all") {
  for (const char* mode : {"files", "space"})
    for (const int victim : {0, 1, 2}) {
      CAPTURE(victim);
      auto variables = variables_of("shm");
      variables.insert({{"FAULT_MODE", mode}, {"FAULT_VICTIM", std::to_string(victim)}});
      const auto ended = ranks::run_ranks(3, "rank: no room", {.variables = variables});
      CHECK(ranks::failures(ended) == "");
    }
}
#endif
