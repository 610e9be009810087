// What ranks are told when something goes wrong: mismatches, deaths, deadlines, missing ranks,
// goodbyes, strangers. Every case ends long before its deadline, on every rank.
#include <doctest/doctest.h>

#include <sys/socket.h>
#include <sys/un.h>

#include <functional>
#include <regex>

#include <lockstep/distributed/local.h>
#include <lockstep/distributed/shm/rendezvous.h>
#include <lockstep/distributed/shm/wire.h>

#include "backends.h"
#include "texts.h"

using namespace lockstep;
using namespace lockstep::dist;
using ranks::require;

namespace {

// Whether a socket of any job that this test started is still there.
bool a_meeting_is_left() {
  for (int run = 0; run < ranks::runs; ++run) {
    Environment env;
    env.run_id = ranks::run_id_of(run);
    if (ranks::is_listed(MeetingPoint::of(env, Milliseconds(0)).name)) return true;
  }
  return false;
}

struct Stopwatch {
  double begin = ranks::now();
  void below(double seconds, const char* what) const {
    const double took = ranks::now() - begin;
    require(took < seconds * ranks::kPatience,
            std::string(what) + " took " + std::to_string(took) + " s");
  }
};

// Runs `body` on threads and, through the test case "rank: NAME", on processes.
void on_threads(int size, const std::function<void(Group)>& body,
                Milliseconds timeout = std::chrono::minutes(30)) {
  run_local(size, body, {.timeout = timeout});
}

Group init_here(Milliseconds timeout = std::chrono::minutes(30)) {
  return init({.timeout = timeout});
}

// ---- bodies, the same for threads and processes ----

void disagree(const Group& g, int which) {
  g.barrier();
  const Stopwatch watch;
  std::string text;
  const bool first = g.rank() == 0;
  switch (which) {
    case 0:
      text = error_of<DistError>([&] { g.all_reduce(ones({first ? 10 : 11})); });
      expect(text, {"all_reduce(sum) of f32 [10]", "all_reduce(sum) of f32 [11]", "rank 0",
                    "rank 1", "same order"});
      break;
    case 1:
      text = error_of<DistError>(
          [&] { first ? g.all_reduce(ones({10})) : g.broadcast(ones({10}), 1); });
      expect(text, {"all_reduce(sum) of f32 [10]", "broadcast of f32 [10], root 1"});
      break;
    case 2:
      text = error_of<DistError>(
          [&] { g.all_reduce(ones({10}, {.dtype = first ? DType::f32 : DType::f64})); });
      expect(text, {"of f32 [10]", "of f64 [10]"});
      break;
    case 3:
      text = error_of<DistError>(
          [&] { g.all_reduce(ones({10}), first ? ReduceOp::sum : ReduceOp::avg); });
      expect(text, {"all_reduce(sum)", "all_reduce(avg)"});
      break;
    case 4:
      text =
          error_of<DistError>([&] { first ? (void)g.process_group().allocate(64) : g.barrier(); });
      expect(text, {"allocate of 64 bytes", "barrier"});
      break;
    default:
      text = error_of<DistError>([&] { g.broadcast(ones({10}), first ? 0 : 1); });
      expect(text, {"broadcast of f32 [10], root 0", "broadcast of f32 [10], root 1"});
  }
  expect(text, {"sequence number 2", "last completed: barrier, sequence number 1"});
  // Everything later fails at once with the same text, and the group can be destroyed.
  expect(error_of<DistError>([&] { g.barrier(); }), {"ranks disagree"});
  expect(error_of<DistError>([&] { g.process_group().child(); }), {"ranks disagree"});
  g.destroy();
  watch.below(2, "a mismatch");
}

void late(const Group& g) {
  g.barrier();
  if (g.rank() == 0) {
    const Stopwatch watch;
    const auto text = error_of<DistError>([&] {
      g.all_reduce(ones({3, 2}), ReduceOp::avg,
                   {.timeout = Milliseconds(300), .label = "bucket 7"});
    });
    expect(text,
           {"all_reduce(avg) of f32 [3, 2]", "sequence number 2", "bucket 7",
            "rank 1 did not arrive within 300 ms", "last completed: barrier, sequence number 1"});
    require(ranks::now() - watch.begin >= 0.3, "too early");
    watch.below(1.5, "a deadline");
  } else {
    std::this_thread::sleep_for(std::chrono::milliseconds(800));
    const Stopwatch watch;
    expect(error_of<DistError>([&] {
             g.all_reduce(ones({3, 2}), ReduceOp::avg);
           }),
           {"rank 1 did not arrive", "rank 0 waited"});
    watch.below(0.5, "the late rank's error");
  }
}

void leave_early(const Group& g) {
  const Tensor t = full({100}, g.rank() + 1);
  const WorkPtr needed = g.all_reduce_async(t);
  if (g.rank() == 1) {
    g.destroy();  // completes it
    require(t.data<float>()[99] == 3, "destroy did not complete what was under way");
    expect(error_of<DistError>([&] { g.barrier(); }), {"destroyed"});
    return;
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  needed->wait();  // rank 1 has completed it: it is not needed any more
  require(t.data<float>()[99] == 3, "the sum");
  const Stopwatch watch;
  expect(error_of<DistError>([&] { g.barrier(); }),
         {"rank 1 has left", "barrier, sequence number 2"});
  watch.below(1, "the news that a rank has left");
}

void abort_one(const Group& g) {
  const Stopwatch watch;
  const auto child = g.process_group().child();
  if (g.rank() == 0) {
    expect(error_of<DistError>([&] { child->all_reduce(ones({4}), ReduceOp::sum)->wait(); }),
           {"aborted by rank 1: enough of this"});
  } else {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    child->abort("enough of this");
    expect(error_of<DistError>([&] { child->barrier(); }), {"enough of this"});
  }
  watch.below(2, "an abort");
  g.barrier();  // the parent is not concerned
}

void flush(const Group& g) {
  std::vector<Tensor> tensors;
  for (int k = 0; k < 100; ++k) {
    tensors.push_back(full({1 + 500 * (k % 7)}, k + g.rank()));
    g.all_reduce_async(tensors.back());  // the Work is dropped
  }
  g.destroy();
  for (int k = 0; k < 100; ++k)
    require(tensors[static_cast<size_t>(k)].data<float>()[0] == static_cast<float>(2 * k + 1),
            "result " + std::to_string(k));
}

void miss_record(const Group& g) {
  ProcessGroup& pg = g.process_group();
  if (g.rank() == 1) {
    std::this_thread::sleep_for(std::chrono::milliseconds(900));
    return;
  }
  pg.post(1, {});
  expect(error_of<DistError>([&] { pg.collect(1); }), {"epoch 1", "rank 1 did not post"});
}

}  // namespace

TEST_CASE("a mismatch is an error on all ranks that names both sides") {
  for (int which = 0; which < 6; ++which) {
    CAPTURE(which);
    on_threads(2, [&](Group g) { disagree(g, which); });
    CHECK(ranks::failures(ranks::run_ranks(
              2, "rank: disagree", {.variables = {{"WHICH", std::to_string(which)}}})) == "");
  }
  // The third rank, which agrees with the first, hears of it as well.
  on_threads(3, [](Group g) {
    expect(error_of<DistError>([&] { g.all_reduce(ones({g.rank() == 1 ? 3 : 2})); }),
           {"[2]", "[3]"});
  });
}
TEST_CASE("rank: disagree" * doctest::skip()) {
  disagree(init_here(), std::atoi(std::getenv("WHICH")));
}

TEST_CASE("a deadline names the operation and who did not arrive") {
  on_threads(2, late);
  CHECK(ranks::failures(ranks::run_ranks(2, "rank: late")) == "");
  on_threads(2, miss_record, Milliseconds(300));
}
TEST_CASE("rank: late" * doctest::skip()) { late(init_here()); }

TEST_CASE("a rank that left is missed only where it is needed") {
  on_threads(2, leave_early);
  CHECK(ranks::failures(ranks::run_ranks(2, "rank: leave early")) == "");
}
TEST_CASE("rank: leave early" * doctest::skip()) { leave_early(init_here()); }

TEST_CASE("abort frees the others, in its own group alone") {
  on_threads(2, abort_one);
  CHECK(ranks::failures(ranks::run_ranks(2, "rank: abort")) == "");
}
TEST_CASE("rank: abort" * doctest::skip()) { abort_one(init_here()); }

TEST_CASE("destroy completes a hundred operations whose Work was dropped") {
  on_threads(2, flush);
  CHECK(ranks::failures(ranks::run_ranks(2, "rank: flush")) == "");
}
TEST_CASE("rank: flush" * doctest::skip()) { flush(init_here()); }

TEST_CASE("a program that ends without destroying anything exits 0 and prints nothing") {
  const auto ended = ranks::run_ranks(2, "rank: end with work under way", {});
  for (const auto& e : ended) {
    CHECK(e.code == 0);
    CHECK(std::regex_replace(e.output, std::regex("\\[doctest\\].*\n"), "") == "");
  }
}
TEST_CASE("rank: end with work under way" * doctest::skip()) {
  const Group g = init();
  const Tensor t = ones({1000});
  for (int k = 0; k < 20; ++k) g.all_reduce_async(t);
  std::exit(0);  // no destructor of this function runs, and doctest prints no summary
}

TEST_CASE("during stack unwinding the group aborts instead of waiting") {
  const auto ended = ranks::run_ranks(2, "rank: unwind");
  CHECK(ranks::failures(ended) == "");
}
TEST_CASE("rank: unwind" * doctest::skip()) {
  const Stopwatch watch;
  if (std::string(std::getenv("RANK")) == "0") {
    const Group g = init();
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    expect(error_of<DistError>([&] { g.barrier(); }),
           {"an exception ended rank 1's use of the group"});
  } else {
    expect(error_of<ValueError>([] {
             const Group g = init();
             g.all_reduce_async(ones({3}));  // rank 0 never joins in
             throw ValueError("oops");
           }),
           {"oops"});
  }
  watch.below(2, "unwinding");
}

// ---- deaths ----

TEST_CASE("a rank killed before a collective is noticed at once") {
  for (const std::string how : {"kill", "exit", "within"}) {
    CAPTURE(how);
    const auto ended = ranks::run_ranks(3, "rank: die", {.variables = {{"HOW", how}}});
    INFO(ended[0].output, ended[2].output);
    CHECK(ended[0].code == 0);
    CHECK(ended[2].code == 0);
    if (how == "exit")
      CHECK(ended[1].code == 37);
    else
      CHECK(ended[1].signal == SIGKILL);
    for (const auto& e : ended) CHECK(!e.hung);
  }
}
TEST_CASE("rank: die" * doctest::skip()) {
  const Group g = init();
  const std::string how = std::getenv("HOW");
  for (int k = 0; k < 4; ++k) g.all_reduce(ones({10}));
  if (g.rank() == 1) {
    if (how == "exit") _exit(37);
    if (how == "kill") raise(SIGKILL);
    // In the midst of large collectives, at any point of them.
    std::thread killer([] {
      std::this_thread::sleep_for(std::chrono::milliseconds(30));
      kill(getpid(), SIGKILL);
    });
    const Tensor large = ones({3000000});
    for (;;) g.all_reduce(large);
  }
  const Stopwatch watch;
  const auto text = error_of<DistError>([&] {
    const Tensor t = ones({how == "within" ? 3000000 : 10});
    for (;;) g.all_reduce(t);
  });
  expect(text, {"rank 1 (pid ", "died", "all_reduce(sum) of f32", "last completed: all_reduce"});
  if (how != "within") expect(text, {"sequence number 5"});
  watch.below(2, "noticing a death");
  expect(error_of<DistError>([&] { g.barrier(); }), {"died"});
}

TEST_CASE("a death is noticed by a rank that only tests, and by one that waits for records") {
  CHECK(ranks::failures({ranks::run_ranks(2, "rank: die quietly").front()}) == "");
}
TEST_CASE("rank: die quietly" * doctest::skip()) {
  const Group g = init();
  const auto child = g.process_group().child();
  if (g.rank() == 1) raise(SIGKILL);
  const Stopwatch watch;
  const WorkPtr w = g.all_reduce_async(ones({4}));
  while (!w->is_completed()) {
  }
  require(w->exception() != nullptr, "completed without the other rank");
  watch.below(2, "noticing a death by testing");
  child->post(1, {});
  expect(error_of<DistError>([&] { child->collect(1); }), {"rank 1", "died", "epoch 1"});
}

// ---- the meeting ----

TEST_CASE("a missing rank is named on every rank that waits") {
  const std::map<std::string, std::string> two_seconds{{"LOCKSTEP_JOIN_TIMEOUT", "2"}};
  for (const auto& [only, missing] : std::map<std::vector<int>, std::string>{
           {{0}, "1/2 ranks joined within 2 s: rank 1 is missing; did you start it with srun?"},
           {{1}, "1/2 ranks joined within 2 s: rank 0 is missing; did you start it with srun?"}}) {
    const auto ended = ranks::run_ranks(2, "rank: join", {.variables = two_seconds, .only = only});
    CHECK(ended[0].code != 0);
    CHECK(ended[0].output.find(missing) != std::string::npos);
    CHECK(ended[0].seconds >= 1.9);
    CHECK(ended[0].seconds < 3.5 * ranks::kPatience);
    INFO(ended[0].output);
  }
  const auto three = ranks::run_ranks(3, "rank: join", {.variables = two_seconds, .only = {0, 2}});
  for (const auto& e : three) {
    CHECK(e.code != 0);
    CHECK(e.output.find("2/3 ranks joined within 2 s: rank 1 is missing") != std::string::npos);
    CHECK(e.seconds < 3.5 * ranks::kPatience);
  }
  CHECK(!a_meeting_is_left());
}
TEST_CASE("rank: join" * doctest::skip()) { init().barrier(); }

TEST_CASE("ranks that differ in WORLD_SIZE, or have the same rank") {
  const std::map<std::string, std::string> seconds{{"LOCKSTEP_JOIN_TIMEOUT", "4"}};
  const std::string self = std::filesystem::read_symlink("/proc/self/exe");
  const auto run = [&](std::vector<std::array<const char*, 2>> who) {
    std::vector<pid_t> pids;
    std::vector<int> files;
    for (const auto& [rank, size] : who) {
      files.push_back(ranks::new_file());
      pids.push_back(ranks::start({self, "--test-case=rank: join", "--no-skip"}, files.back(),
                                  {{"RANK", rank},
                                   {"WORLD_SIZE", size},
                                   {"TORCHELASTIC_RUN_ID", "odd"},
                                   {"LOCKSTEP_JOIN_TIMEOUT", "4"}}));
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
    }
    std::string all;
    for (size_t i = 0; i < pids.size(); ++i) {
      const auto e = ranks::wait_for(pids[i], ranks::now() + 10 * ranks::kPatience);
      all += ranks::read_all(files[i]) + (e.hung ? "HUNG" : "") + "|";
      close(files[i]);
    }
    return all;
  };
  const std::string sizes = run({{"0", "3"}, {"1", "2"}});
  CHECK(std::regex_search(sizes,
                          std::regex("WORLD_SIZE differs: it is 3 on rank 0 and 2 on rank 1")));
  CHECK(sizes.find("HUNG") == std::string::npos);
  const std::string twice = run({{"0", "3"}, {"1", "3"}, {"1", "3"}, {"2", "3"}});
  CHECK(twice.find("rank 1 is there already: two processes have this rank") != std::string::npos);
  CHECK(twice.find("HUNG") == std::string::npos);
  // A second rank 0, while the first still waits.
  const std::string host = run({{"0", "2"}, {"0", "2"}});
  CHECK(host.find("the meeting point is in use") != std::string::npos);
}

namespace {
// Connects to the meeting of `env` and sends what no rank would.
void make_noise(const Environment& env) {
  const MeetingPoint point = MeetingPoint::of(env, Milliseconds(0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  point.name.copy(address.sun_path + 1, sizeof address.sun_path - 1);
  const auto length =
      static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + point.name.size());
  std::vector<int> sockets;
  const double end = ranks::now() + 10;
  for (int k = 0; k < 30 && ranks::now() < end; ++k) {
    const int s = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    while (connect(s, reinterpret_cast<sockaddr*>(&address), length) != 0 && ranks::now() < end)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const std::string noise(k % 3 == 1 ? 100000 : 5, 'x');
    if (k % 3 != 0) send(s, noise.data(), noise.size(), MSG_NOSIGNAL);
    if (k % 2)
      sockets.push_back(s);  // stays, the silent ones too
    else
      close(s);
  }
  std::this_thread::sleep_for(std::chrono::seconds(1));
  for (const int s : sockets) close(s);
}
}  // namespace

TEST_CASE("noise at the meeting point disturbs nobody") {
  Environment env;
  env.size = 2;
  env.run_id = "noisy";
  std::thread stranger([&] { make_noise(env); });
  const std::string self = std::filesystem::read_symlink("/proc/self/exe");
  std::vector<pid_t> pids;
  std::vector<int> files;
  for (const char* rank : {"0", "1"}) {
    files.push_back(ranks::new_file());
    pids.push_back(
        ranks::start({self, "--test-case=rank: join", "--no-skip"}, files.back(),
                     {{"RANK", rank}, {"WORLD_SIZE", "2"}, {"TORCHELASTIC_RUN_ID", "noisy"}}));
    std::this_thread::sleep_for(std::chrono::milliseconds(400));
  }
  for (size_t i = 0; i < pids.size(); ++i) {
    const auto e = ranks::wait_for(pids[i], ranks::now() + 10 * ranks::kPatience);
    CHECK(e.code == 0);
    INFO(ranks::read_all(files[i]));
  }
  stranger.join();
}

// A rank of another build, whose shared memory is laid out in another way, introduces itself.
TEST_CASE("a build with another layout of the shared memory is refused by name") {
  Environment env;
  env.size = 2;
  env.run_id = "two builds";
  const MeetingPoint point = MeetingPoint::of(env, Milliseconds(0));
  const std::string self = std::filesystem::read_symlink("/proc/self/exe");
  const int file = ranks::new_file();
  const pid_t pid =
      ranks::start({self, "--test-case=rank: join", "--no-skip"}, file,
                   {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"TORCHELASTIC_RUN_ID", env.run_id}});
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  point.name.copy(address.sun_path + 1, sizeof address.sun_path - 1);
  const auto length =
      static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + point.name.size());
  const int s = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  const double end = ranks::now() + 10;
  while (connect(s, reinterpret_cast<sockaddr*>(&address), length) != 0 && ranks::now() < end)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  Message hello(Message::hello);
  hello.rank = 1;
  hello.size = 2;
  hello.layout = 12345;
  CHECK(send(s, &hello, sizeof hello, MSG_NOSIGNAL) == sizeof hello);
  const auto e = ranks::wait_for(pid, end);
  CHECK(!e.hung);
  CHECK(e.code != 0);
  CHECK(contains(ranks::read_all(file), "rank 1 runs another build of liblockstep than rank 0"));
  close(s);
  close(file);
}

// The natural spelling of "no limit", wherever a time is asked for.
void without_limits(const Group& g) {
  constexpr Milliseconds kNone = Milliseconds::max();
  const Tensor t = ones({3});
  for (int i = 0; i < 3; ++i) {
    if (g.rank() == i) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    g.all_reduce(t, ReduceOp::max, {.timeout = kNone});
    g.process_group().barrier()->wait(kNone);
    const WorkPtr work = Group(g.process_group().child()).all_reduce_async(t, ReduceOp::max);
    work->wait(kNone);
  }
  g.process_group().post(0, {});
  require(g.process_group().collect(0).size() == static_cast<size_t>(g.size()), "collect");
}
TEST_CASE("times without a limit") {
  run_local(3, without_limits, {.timeout = Milliseconds::max()});
  for (const std::string& backend : backends::all()) {
    CAPTURE(backend);
    CHECK(ranks::failures(backends::run(backend, 3, "rank: without limits")) == "");
  }
}
TEST_CASE("rank: without limits" * doctest::skip()) {
  without_limits(init({.backend = std::getenv("TEST_BACKEND"),
                       .timeout = Milliseconds::max(),
                       .join_timeout = Milliseconds::max()}));
}

TEST_CASE("a stranger's server that says nothing ends in the deadline's error") {
  Environment env;
  env.size = 2;
  env.rank = 1;
  env.run_id = "silent";
  const MeetingPoint point = MeetingPoint::of(env, Milliseconds(0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  point.name.copy(address.sun_path + 1, sizeof address.sun_path - 1);
  const int s = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  REQUIRE(bind(s, reinterpret_cast<sockaddr*>(&address),
               static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + point.name.size())) ==
          0);
  REQUIRE(listen(s, 8) == 0);
  CHECK(ranks::is_listed(point.name));  // so the other cases would see what was left
  const Stopwatch watch;
  expect(error_of<DistError>([&] { join(env, 4096, Milliseconds(500)); }),
         {"rank 0 is missing", "0.5 s"});
  watch.below(1.5, "a silent server");
  // And rank 0 of a job that wants this name is told so.
  env.rank = 0;
  expect(error_of<DistError>([&] { join(env, 4096, Milliseconds(500)); }),
         {"in use", "MASTER_PORT"});
  close(s);
}

TEST_CASE("lack of memory is a typed error on all ranks, and the group goes on") {
  CHECK(ranks::failures(ranks::run_ranks(2, "rank: too much")) == "");
}
TEST_CASE("rank: too much" * doctest::skip()) {
  const Group g = init();
  expect(error_of<OutOfMemory>([&] { g.process_group().allocate(size_t{1} << 46); }), {"bytes"});
  g.barrier();
  // Memory outlives its group, and is given back when both ranks have dropped it.
  Ref<Storage> storage = g.process_group().allocate(1 << 20);
  g.destroy();
  std::memset(storage->data(), 1, storage->bytes());
}

TEST_CASE("init twice") { CHECK(ranks::failures(ranks::run_ranks(2, "rank: init twice")) == ""); }
TEST_CASE("rank: init twice" * doctest::skip()) {
  const Group g = init();
  expect(error_of<DistError>([] { init(); }), {"default group"});
  g.barrier();
}
