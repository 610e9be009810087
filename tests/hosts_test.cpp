// Ranks on several hosts. Two hosts are two values of LOCKSTEP_HOST_ID on this machine, and, where the
// machine allows it, two network namespaces with a cable between them.
#include <doctest/doctest.h>

#include <lockstep/distributed/group.h>
#include <lockstep/distributed/hosts/group.h>

#include "equality.h"
#include "exchange_checks.h"
#include "sockets.h"
#include "texts.h"

using namespace lockstep;
using namespace lockstep::dist;
using ranks::Ended;
using ranks::require;

namespace {

const Scope kScope{.pairs = false, .in_rank_order = false, .two_byte_means = false, .brief = true};

/// host_of[r] is the host of rank r.
ranks::Options on_hosts(const std::vector<int>& host_of, ranks::Options options = {}) {
  options.variables.insert({"MASTER_PORT", std::to_string(sockets::Listener().port())});
  options.variables.insert({"MASTER_ADDR", "127.0.0.1"});
  options.variables.insert({"LOCKSTEP_TOKEN", "a secret"});
  std::map<int, int> size, next;
  for (const int h : host_of) ++size[h];
  for (size_t r = 0; r < host_of.size(); ++r) {
    const int h = host_of[r];
    auto& own = options.of_rank[static_cast<int>(r)];
    own.insert({"LOCKSTEP_HOST_ID", std::to_string(h)});
    own.insert({"LOCAL_RANK", std::to_string(next[h]++)});
    own.insert({"LOCAL_WORLD_SIZE", std::to_string(size[h])});
  }
  return options;
}

std::vector<Ended> run(const std::vector<int>& host_of, const std::string& test_case,
                       ranks::Options options = {}) {
  return ranks::run_ranks(static_cast<int>(host_of.size()), test_case,
                          on_hosts(host_of, std::move(options)));
}

Group join(Milliseconds timeout = std::chrono::seconds(60)) {
  Group group = init({.timeout = timeout});
  require(group.backend() == "shm+gloo", str_cat("backend ", group.backend()));
  return group;
}

}  // namespace

namespace {

// Each host averages its own, weighed by how many ranks it has; of these values that is exact.
void check_two_byte_means(const Group& g) {
  const auto check = [&]<class T>(DType dtype, T) {
    const auto times = [](int n) {
      return [n](int64_t i) { return T(static_cast<float>(n * (i % 7 + 1))); };
    };
    const Tensor t = new_tensor({100}, dtype);
    fill<T>(t, times(12 * (g.rank() + 1)));
    g.all_reduce(t, ReduceOp::avg);
    check_elements<T>(t, times(30), str_cat("the mean of ", dtype));  // 12 (1 + 2 + 3 + 4) / 4
  };
  check(DType::f16, Half());
  check(DType::bf16, BFloat16());
}

}  // namespace

TEST_CASE("rank: every kind" * doctest::skip()) {
  const Group g = join();
  Scope scope = kScope;
  scope.two_byte_means = std::getenv("LOCAL_WORLD_SIZE") == std::string("2");
  check_exchanges(g, scope);
  check_two_byte_means(g);
  check_bits(g);
  check_async(g, kScope);
  const auto message = error_of<DistError>([&] { g.send(ones({2}), g.rank() == 0 ? 1 : 0); });
  expect(message, {"send: backend shm+gloo has no send", "new_group"});
  g.destroy();
  expect(error_of<DistError>([&] { g.barrier(); }), {"destroyed"});
}
TEST_CASE("every kind, dtype and layout") {
  CHECK(ranks::failures(run({0, 0, 1, 1}, "rank: every kind", {.deadline = 60})) == "");
  CHECK(ranks::failures(run({0, 1, 1, 1}, "rank: every kind", {.deadline = 60})) == "");
}
TEST_CASE("ranks of a host need not be neighbours") {
  CHECK(ranks::failures(run({0, 1, 0, 1, 2}, "rank: bits")) == "");
}
TEST_CASE("rank: bits" * doctest::skip()) {
  const Group g = join();
  check_bits(g);
  check_async(g, kScope);
  Scope scope = kScope;
  scope.dtypes = {DType::f32};
  check_every_kind(g, scope);
}

TEST_CASE("rank: traffic" * doctest::skip()) {
  const Group g = join();
  auto& pg = dynamic_cast<HostGroup&>(g.process_group());
  const bool leads = g.rank() == 0 || g.rank() == 2;
  require(pg.traffic().gloo == 0 && pg.traffic().shm == 0, "nothing was sent yet");
  g.all_reduce(ones({1000}));
  require(pg.traffic().gloo == (leads ? 4000u : 0u), "one crossing per host");
  require(pg.traffic().shm == 8000, "in and out of each host by shared memory");
  // A bucket's memory is shared by the ranks of the host.
  const auto bucket = pg.allocate(4096);
  std::memset(bucket->data(), 0, 4096);
  static_cast<float*>(bucket->data())[5] = static_cast<float>(g.rank());
  const Tensor t = from_blob(bucket->data(), {1024});
  g.all_reduce(t);
  require(t.data<float>()[5] == 6, "the sum in a bucket");
  const auto child = pg.child();
  const Tensor u = full({3}, g.rank());
  child->all_reduce(u, ReduceOp::avg)->wait();
  require(u.data<float>()[1] == 1.5f, "a child's mean");
  // A group of one rank of each host.
  const auto some = g.new_group({3, 1});
  require(some.has_value() == (g.rank() % 2 == 1), "who is in the group");
  if (some) {
    require(some->backend() == "gloo", "over Gloo");
    const WorkPtr sent = some->process_group().send(full({2}, some->rank()), 1 - some->rank());
    const Tensor in = zeros({2});
    some->recv(in, 1 - some->rank());
    sent->wait();
    require(in.data<float>()[1] == static_cast<float>(1 - some->rank()), "what was sent");
  }
}
TEST_CASE("what crosses between hosts, and what does not") {
  CHECK(ranks::failures(run({0, 0, 1, 1}, "rank: traffic")) == "");
}

TEST_CASE("rank: one host after all" * doctest::skip()) {
  const Group g = init();
  require(g.backend() == "shm", str_cat("backend ", g.backend()));
  require(g.all_gather(full({1}, g.rank())).data<float>()[2] == 2, "gathered");
}
TEST_CASE("ranks that turn out to be on one host share memory") {
  ranks::Options options;
  for (int r = 0; r < 3; ++r) options.of_rank[r] = {{"LOCAL_WORLD_SIZE", "1"}, {"LOCAL_RANK", "0"}};
  CHECK(ranks::failures(run({7, 7, 7}, "rank: one host after all", options)) == "");
}

TEST_CASE("rank: trains" * doctest::skip()) {
  const Group g = join();
  const auto one = equality::train(Group(), {});
  const auto mine = equality::train(g, {.most_delay_ms = 3, .delay_seed = 4});
  require(equality::difference(mine.weights, one.weights) <= 1e-12,
          str_cat("differs from one process by ", equality::difference(mine.weights, one.weights)));
  require(mine.buckets >= 4, "too few buckets to see anything");
  const Tensor all = g.all_gather(tensor(mine.weights));
  for (int r = 0; r < g.size(); ++r)
    require(all[r].to_vector<double>() == mine.weights, "ranks hold other bits");
}
TEST_CASE("training over two hosts equals one process") {
  CHECK(ranks::failures(run({0, 0, 1, 1}, "rank: trains", {.deadline = 60})) == "");
  CHECK(ranks::failures(run({0, 1, 1, 1}, "rank: trains", {.deadline = 60})) == "");
}

// ---- faults ----

TEST_CASE("rank: dies" * doctest::skip()) {
  const Group g = join();
  const int victim = std::atoi(std::getenv("TEST_VICTIM"));
  g.barrier();
  if (g.rank() == victim) raise(SIGKILL);
  const double begin = ranks::now();
  const std::string text = error_of<DistError>([&] { g.all_reduce(ones({5})); });
  expect(text, {"all_reduce(sum) of f32 [5], sequence number 2", str_cat("rank ", victim), "died",
                "last completed: barrier, sequence number 1"});
  ranks::below(begin, 2, "the news of a death");
  expect(error_of<DistError>([&] { g.barrier(); }), {"died"});
}
TEST_CASE("a rank that dies is named on every host") {
  for (int victim = 0; victim < 4; ++victim) {
    CAPTURE(victim);
    const auto ended =
        run({0, 0, 1, 1}, "rank: dies", {.variables = {{"TEST_VICTIM", std::to_string(victim)}}});
    for (const Ended& e : ended) {
      if (e.rank == victim)
        CHECK(e.signal == SIGKILL);
      else
        CHECK_MESSAGE((!e.hung && e.code == 0), e.output);
    }
  }
}

TEST_CASE("rank: disagrees" * doctest::skip()) {
  const Group g = join(std::chrono::seconds(2));
  const int odd = std::atoi(std::getenv("TEST_ODD"));  // this host's ranks call something else
  g.barrier();
  const double begin = ranks::now();
  const bool other = odd < 2 ? (g.rank() >= 2) == (odd == 1) : g.rank() == 3;
  const std::string text = error_of<DistError>([&] { g.all_reduce(ones({other ? 11 : 10})); });
  expect(text, {"all_reduce(sum) of f32 [10]", "all_reduce(sum) of f32 [11]", "disagree"});
  ranks::below(begin, 5, "a mismatch");
}
TEST_CASE("hosts, or ranks of a host, that disagree are told so") {
  for (const int odd : {0, 2}) {
    CAPTURE(odd);
    CHECK(ranks::failures(run({0, 0, 1, 1}, "rank: disagrees",
                              {.variables = {{"TEST_ODD", std::to_string(odd)}}})) == "");
  }
}

TEST_CASE("rank: disagrees about kinds" * doctest::skip()) {
  const Group g = join(std::chrono::seconds(3));
  const bool odd = g.rank() == 3;
  g.barrier();
  const double begin = ranks::now();
  std::string text;
  switch (std::atoi(std::getenv("TEST_WHICH"))) {
    case 0:
      text = error_of<DistError>([&] { g.reduce(ones({10}), odd ? 1 : 0); });
      break;
    case 1:
      text = error_of<DistError>([&] { odd ? g.all_reduce(ones({10})) : g.reduce(ones({10}), 0); });
      break;
    default:
      text = error_of<DistError>(
          [&] { odd ? (void)g.gather(ones({10}), 0) : (void)g.all_gather(ones({10})); });
  }
  expect(text, {"disagree"});
  ranks::below(begin, 3, "a mismatch");
}
TEST_CASE("kinds that are made of others are told apart") {
  for (const char* which : {"0", "1", "2"}) {
    CAPTURE(which);
    CHECK(ranks::failures(run({0, 0, 1, 1}, "rank: disagrees about kinds",
                              {.variables = {{"TEST_WHICH", which}}})) == "");
  }
}

TEST_CASE("rank: aborts" * doctest::skip()) {
  const Group g = join();
  g.barrier();
  if (g.rank() == std::atoi(std::getenv("TEST_WHO"))) {
    std::this_thread::sleep_for(Milliseconds(200));
    g.process_group().abort("out of luck");
    return;
  }
  const double begin = ranks::now();
  expect(error_of<DistError>([&] { g.all_reduce(ones({4})); }), {"out of luck"});
  ranks::below(begin, 2, "an abort");
}
TEST_CASE("an abort reaches every host") {
  for (const char* who : {"0", "1", "3"}) {
    CAPTURE(who);
    CHECK(ranks::failures(run({0, 0, 1, 1}, "rank: aborts", {.variables = {{"TEST_WHO", who}}})) ==
          "");
  }
}

TEST_CASE("rank: late" * doctest::skip()) {
  const Group g = join();
  g.barrier();
  g.process_group().note("soon outdated");
  g.process_group().note(str_cat("here is ", g.rank()));
  const double begin = ranks::now();
  if (g.rank() == 3) {
    std::this_thread::sleep_for(Milliseconds(2500));
    error_of<DistError>([&] { g.barrier(); });
    return;
  }
  const std::string text = error_of<DistError>(
      [&] { g.barrier({.timeout = Milliseconds(400), .label = "the last one"}); });
  expect(text, {"barrier, sequence number 2 (the last one)", "; rank 0: here is 0",
                "; rank 1: here is 1", "; rank 2: here is 2; rank 3: here is 3"});
  require(text.find("; rank 0") == text.rfind("; rank 0"), "notes came twice: " + text);
  require(ranks::now() - begin >= 0.39, "too early");
  ranks::below(begin, 3, "a deadline");
}
TEST_CASE("a deadline ends the wait on every host") {
  CHECK(ranks::failures(run({0, 0, 1, 1}, "rank: late")) == "");
  CHECK(ranks::failures(run({0, 0, 1, 2}, "rank: late")) == "");
}

TEST_CASE("rank: goodbye under a wrapper" * doctest::skip()) {
  const Group g = join();
  DistributedDataParallel net{nn::Linear{3, 2}, g};
  net(ones({1, 3})).sum().backward();
  const int leaver = std::atoi(std::getenv("TEST_WHO"));
  if (g.rank() == leaver) {
    g.destroy();
    expect(error_of<DistError>([&] {
             net(ones({1, 3})).sum().backward();
           }),
           {"destroyed on this rank"});
    std::this_thread::sleep_for(Milliseconds(4000));  // it lives on
    return;
  }
  const double begin = ranks::now();
  expect(error_of<DistError>([&] {
           net(ones({1, 3})).sum().backward();
         }),
         {"has left", "DDP bucket 0 (weight"});
  ranks::below(begin, 2, "a goodbye");
}
TEST_CASE("a goodbye under a living wrapper reaches every host") {
  for (const char* who : {"1", "2", "3"}) {
    CAPTURE(who);
    CHECK(ranks::failures(run({0, 0, 1, 1}, "rank: goodbye under a wrapper",
                              {.variables = {{"TEST_WHO", who}}})) == "");
  }
}

namespace {
struct Picky : nn::Module {
  nn::Linear fc{3, 2};
  Tensor forward(Tensor x) {  // [B, 3] to [B, 2]
    LOCKSTEP_CHECK(x.numel() > 0, ValueError, "an empty batch");
    return fc(x);
  }
  LOCKSTEP_MODULE(Picky, fc)
};
}  // namespace

TEST_CASE("rank: forward throws" * doctest::skip()) {
  const Group g = join();
  const int who = std::atoi(std::getenv("TEST_WHO")), rank = g.rank();
  const double begin = ranks::now();
  std::string text = "no error";
  try {
    DistributedDataParallel net{Picky{}, g};
    net(ones({1, 3})).sum().backward();
    net(ones({rank == who ? 0 : 1, 3})).sum().backward();
  } catch (const Error& e) {
    text = e.what();
  }
  expect(text, {"an empty batch"});
  if (rank != who) expect(text, {"left by an exception", str_cat("rank ", who).c_str()});
  ranks::below(begin, 3, "the news of an exception");
}
TEST_CASE("what a forward threw is told on every host") {
  for (const char* who : {"0", "3"}) {
    CAPTURE(who);
    CHECK(ranks::failures(
              run({0, 0, 1, 1}, "rank: forward throws", {.variables = {{"TEST_WHO", who}}})) == "");
  }
}

// ---- two network namespaces ----

namespace {

int shell(const std::string& command) {
  return std::system((command + " >/dev/null 2>&1").c_str());
}

/// Two namespaces with an address each, and a cable.
struct Namespaces {
  std::string name = "lockstep" + std::to_string(getpid());
  bool made = false;
  Namespaces() {
    const std::string a = name + "a", b = name + "b";
    made = shell("ip netns add " + a) == 0 && shell("ip netns add " + b) == 0 &&
           shell("ip -n " + a + " link add cable type veth peer name cable netns " + b) == 0 &&
           shell("ip -n " + a + " addr add 10.213.77.1/24 dev cable") == 0 &&
           shell("ip -n " + b + " addr add 10.213.77.2/24 dev cable") == 0;
    for (const std::string& n : {a, b})
      made = made && shell("ip -n " + n + " link set lo up") == 0 &&
             shell("ip -n " + n + " link set cable up") == 0 &&
             shell("ip netns exec " + n + " true") == 0;
  }
  ~Namespaces() {
    shell("ip netns del " + name + "a");
    shell("ip netns del " + name + "b");
  }
};

}  // namespace

TEST_CASE("rank: in a namespace" * doctest::skip()) {
  const Group g = join();
  check_bits(g);
  const auto one = equality::train(Group(), {}), mine = equality::train(g, {});
  require(equality::difference(mine.weights, one.weights) <= 1e-12, "differs from one process");
  // Gloo, and the store, listen on the cable alone.
  const auto flat = g.new_group({0, 1, 2, 3});
  std::ifstream sockets("/proc/self/net/tcp");
  std::string line;
  std::getline(sockets, line);
  int listening = 0;
  while (std::getline(sockets, line)) {
    std::istringstream fields(line);
    std::string n, local, remote, state;
    fields >> n >> local >> remote >> state;
    if (state != "0A") continue;
    ++listening;
    require(local.starts_with("014DD50A") || local.starts_with("024DD50A"), "listens at " + local);
  }
  std::ifstream six("/proc/self/net/tcp6");
  std::getline(six, line);
  while (std::getline(six, line))
    require(line.find(" 0A ") == std::string::npos, "listens at " + line);
  require(g.rank() > 1 || listening > 0, "the store's socket was not seen");
  g.barrier();
}
TEST_CASE("ranks in two network namespaces") {
  const Namespaces spaces;
  if (!spaces.made) {
    MESSAGE("skipped: this machine does not let us make network namespaces");
    return;
  }
  const std::string self = std::filesystem::read_symlink("/proc/self/exe");
  std::vector<pid_t> pids;
  std::vector<int> files;
  const double begin = ranks::now();
  for (int r = 0; r < 4; ++r) {
    files.push_back(ranks::new_file());
    pids.push_back(ranks::start({"ip", "netns", "exec", spaces.name + (r < 2 ? "a" : "b"), self,
                                 "--test-case=rank: in a namespace", "--no-skip"},
                                files.back(),
                                {{"RANK", std::to_string(r)},
                                 {"WORLD_SIZE", "4"},
                                 {"LOCAL_RANK", std::to_string(r % 2)},
                                 {"LOCAL_WORLD_SIZE", "2"},
                                 {"MASTER_ADDR", "10.213.77.1"},
                                 {"MASTER_PORT", "29500"},
                                 {"LOCKSTEP_TOKEN", "a secret"}}));
  }
  std::vector<Ended> ended(4);
  for (size_t r = 0; r < 4; ++r) {
    ended[r] = ranks::wait_for(pids[r], begin + 30 * ranks::kPatience);
    ended[r].rank = static_cast<int>(r);
    ended[r].output = ranks::read_all(files[r]);
    close(files[r]);
  }
  CHECK(ranks::failures(ended) == "");
}

TEST_CASE("rank: without IPv4" * doctest::skip()) {
  const Group g = dist::init({.backend = std::getenv("TEST_BACKEND")});
  const Tensor t = full({1000}, g.rank() + 1.0);
  g.all_reduce(t);
  require(t.data<float>()[999] == 3, "the sum");
  g.barrier();
}
TEST_CASE("ranks meet over ::1 where no interface has an IPv4 address") {
  const std::string name = "lockstep" + std::to_string(getpid()) + "six";
  const bool made = shell("ip netns add " + name) == 0 &&
                    shell("ip -n " + name + " link set lo up") == 0 &&
                    shell("ip netns exec " + name + " ip addr flush dev lo scope host") == 0 &&
                    shell("ip -n " + name + " -6 addr replace ::1/128 dev lo") == 0 &&
                    shell("test -z \"$(ip -n " + name + " -4 addr)\"") == 0 &&
                    shell("ip netns exec " + name + " true") == 0;
  if (!made) MESSAGE("skipped: this machine does not let us make network namespaces");
  const std::string self = std::filesystem::read_symlink("/proc/self/exe");
  for (const std::string backend : {"gloo", "shm+gloo", ""}) {
    if (!made) break;
    CAPTURE(backend);
    std::vector<pid_t> pids;
    std::vector<int> files;
    const double begin = ranks::now();
    for (int r = 0; r < 2; ++r) {
      files.push_back(ranks::new_file());
      pids.push_back(ranks::start(
          {"ip", "netns", "exec", name, self, "--test-case=rank: without IPv4", "--no-skip"},
          files.back(),
          {{"RANK", std::to_string(r)},
           {"WORLD_SIZE", "2"},
           {"LOCAL_RANK", "0"},
           {"LOCAL_WORLD_SIZE", "1"},
           {"LOCKSTEP_HOST_ID", backend == "gloo" ? "0" : std::to_string(r)},
           {"MASTER_ADDR", "::1"},
           {"MASTER_PORT", "29500"},
           {"LOCKSTEP_TOKEN", "a secret"},
           {"TEST_BACKEND", backend}}));
    }
    std::vector<Ended> ended(2);
    for (size_t r = 0; r < 2; ++r) {
      ended[r] = ranks::wait_for(pids[r], begin + 20 * ranks::kPatience);
      ended[r].rank = static_cast<int>(r);
      ended[r].output = ranks::read_all(files[r]);
      close(files[r]);
    }
    CHECK(ranks::failures(ended) == "");
  }
  shell("ip netns del " + name);
}
