// The backend gloo, on real processes: all kinds of collectives, training, and what every rank is told
// when something goes wrong. Every case ends long before its deadline.
#include <doctest/doctest.h>

#include <dirent.h>

#include <atomic>
#include <regex>

#include <lockstep/distributed/group.h>

#include "equality.h"
#include "exchange_checks.h"
#include "sockets.h"
#include "texts.h"

using namespace lockstep;
using namespace lockstep::dist;
using ranks::Ended;
using ranks::require;

namespace {

std::string free_port() { return std::to_string(sockets::Listener().port()); }

// Runs a test case on ranks that share a token and a port.
std::vector<Ended> run(int size, const std::string& test_case, ranks::Options options = {}) {
  options.variables.insert({"MASTER_PORT", free_port()});
  options.variables.insert({"MASTER_ADDR", "127.0.0.1"});
  options.variables.insert({"LOCKSTEP_TOKEN", "a secret"});
  return ranks::run_ranks(size, test_case, options);
}

Group join(Milliseconds timeout = std::chrono::seconds(60)) {
  Group group = init({.backend = "gloo", .timeout = timeout});
  require(group.backend() == "gloo", "another backend");
  return group;
}

// The ports at which this process listens, and the addresses, as /proc writes them.
std::vector<std::string> listening_here() {
  std::vector<std::string> own, found;
  DIR* fds = opendir("/proc/self/fd");
  while (const dirent* e = readdir(fds)) {
    char to[64] = {};
    if (readlink((std::string("/proc/self/fd/") + e->d_name).c_str(), to, sizeof to - 1) > 0)
      own.push_back(to);
  }
  closedir(fds);
  for (const char* table : {"/proc/net/tcp", "/proc/net/tcp6"}) {
    std::ifstream in(table);
    std::string line;
    std::getline(in, line);
    while (std::getline(in, line)) {
      std::istringstream fields(line);
      std::string n, local, remote, state, skip, inode;
      fields >> n >> local >> remote >> state >> skip >> skip >> skip >> skip >> skip >> inode;
      if (state == "0A" && std::count(own.begin(), own.end(), "socket:[" + inode + "]") > 0)
        found.push_back(local);
    }
  }
  return found;
}

}  // namespace

TEST_CASE("rank: every kind" * doctest::skip()) {
  const Group g = join();
  Scope scope{.in_rank_order = false, .two_byte_means = g.size() != 3, .brief = true};
  // The others have been seen with two ranks, and will be with four.
  if (g.size() == 3) scope.dtypes = {DType::f32};
  check_exchanges(g, scope);
  check_bits(g);
  check_async(g, scope);
  g.destroy();
  expect(error_of<DistError>([&] { g.barrier(); }), {"destroyed"});
}
TEST_CASE("every kind, dtype and layout") {
  for (int size = 2; size <= 4; ++size) {
    CAPTURE(size);
    CHECK(ranks::failures(run(size, "rank: every kind", {.deadline = 60})) == "");
  }
}

// ---- two-byte floats ----

namespace {
template <class T>
void two_byte(const Group& g, DType dtype) {
  const int64_t n = 1000;
  const auto number = [](int rank, int64_t i) {
    return static_cast<float>((rank * 37 + i * 11) % 101 - 50) / 7;
  };
  for (const ReduceOp op : {ReduceOp::sum, ReduceOp::avg, ReduceOp::max}) {
    const Tensor t = empty({n}, {.dtype = dtype}), part = empty({n}, {.dtype = dtype});
    auto* x = static_cast<T*>(t.data_ptr());
    for (int64_t i = 0; i < n; ++i) x[i] = T(number(g.rank(), i));
    std::vector<Tensor> inputs;
    for (int r = 0; r < g.size(); ++r) {
      inputs.push_back(empty({n}, {.dtype = dtype}));
      std::memcpy(inputs.back().data_ptr(), x, n * sizeof(T));
    }
    ProcessGroup& pg = g.process_group();
    pg.start({CollectiveKind::reduce_scatter, op, 0, inputs, {part}, {}})->wait();
    pg.start({CollectiveKind::all_reduce, op, 0, {t}, {t}, {}})->wait();
    const auto* y = static_cast<T*>(part.data_ptr());
    for (int64_t i = 0; i < n; ++i) {
      double sum = 0, most = -1e9, size_of_terms = 0;
      for (int r = 0; r < g.size(); ++r) {
        const double v = static_cast<float>(T(number(r, i)));
        sum += v;
        size_of_terms += std::abs(v);
        most = std::max(most, v);
      }
      const double right = op == ReduceOp::max ? most : op == ReduceOp::avg ? sum / g.size() : sum;
      if (op == ReduceOp::avg) size_of_terms /= g.size();
      // Half a unit in the last place for each rounding: of the scaled terms, the partial sums and
      // the result.
      const double unit = dtype == DType::f16 ? 0x1p-11 : 0x1p-8;
      const double off = op == ReduceOp::max ? 0 : unit * size_of_terms * (g.size() + 1);
      require(std::abs(static_cast<float>(x[i]) - right) <= off, str_cat("all_reduce of ", dtype));
      const double once = op == ReduceOp::max ? 0 : unit * std::abs(right) + 1e-6;
      require(std::abs(static_cast<float>(y[i]) - right) <= once,
              str_cat("reduce_scatter of ", dtype, ": ", static_cast<float>(y[i]), " for ", right));
    }
  }
}
}  // namespace

TEST_CASE("rank: two-byte floats" * doctest::skip()) {
  const Group g = join();
  two_byte<Half>(g, DType::f16);
  two_byte<BFloat16>(g, DType::bf16);
  // A sum of these would not fit into f16: they are scaled first.
  const Tensor t = empty({3, 2}, {.dtype = DType::f16});
  auto* x = static_cast<Half*>(t.data_ptr());
  std::fill(x, x + 6, Half(30000));
  g.process_group().start({CollectiveKind::all_reduce, ReduceOp::avg, 0, {t}, {t}, {}})->wait();
  for (int i = 0; i < 6; ++i) require(static_cast<float>(x[i]) == 30000, "the mean overflowed");
  // Their bytes travel as they are, in any layout.
  const Tensor strided = t.transpose(0, 1);
  for (int i = 0; i < 6; ++i) x[i].bits = static_cast<uint16_t>(g.rank() * 100 + i);
  g.broadcast(strided, 1);
  for (int i = 0; i < 6; ++i) require(x[i].bits == 100 + i, "broadcast of strided f16");
}
TEST_CASE("two-byte floats") { CHECK(ranks::failures(run(4, "rank: two-byte floats")) == ""); }

// ---- pairs and groups ----

TEST_CASE("rank: pairs and groups" * doctest::skip()) {
  const Group g = join();
  ProcessGroup& pg = g.process_group();
  const int me = g.rank(), size = g.size();
  const int next = (me + 1) % size, before = (me + size - 1) % size;
  // Everybody receives before it sends, in a ring: nobody may block the others.
  const Tensor in = zeros({4, 5}), second = zeros({3});
  const WorkPtr first_in = pg.recv(in.transpose(0, 1), before), second_in = pg.recv(second, before);
  g.barrier();
  const WorkPtr a = pg.send(full({5, 4}, me + 0.5), next), b = pg.send(full({3}, me + 0.25), next);
  b->wait();
  second_in->wait();
  first_in->wait();
  a->wait();
  require(in.data<float>()[7] == static_cast<float>(before + 0.5), "what came first");
  require(second.data<float>()[2] == static_cast<float>(before + 0.25), "what came second");

  // A child's traffic does not meet the parent's.
  const auto child = pg.child();
  const Tensor x = full({10}, me), y = full({10}, 100 + me);
  const WorkPtr in_child = child->all_reduce(x), in_parent = pg.all_reduce(y);
  in_parent->wait();
  in_child->wait();
  require(x.data<float>()[3] == static_cast<float>(size * (size - 1) / 2), "the child's sum");
  require(y.data<float>()[3] == static_cast<float>(100 * size + size * (size - 1) / 2),
          "the parent's sum");

  // Some ranks, in an order of their own.
  const auto some = g.new_group({size - 1, 0});
  require(some.has_value() == (me == 0 || me == size - 1), "who is in the group");
  if (some) {
    require(some->rank() == (me == 0 ? 1 : 0), "the rank in it");
    const Tensor all = some->all_gather(full({2}, me));  // [2, 2]
    require(all.data<float>()[0] == static_cast<float>(size - 1) && all.data<float>()[2] == 0,
            "what they gathered");
  }
  const auto alone = g.new_group({1});
  require(alone.has_value() == (me == 1), "a group of one");
  // Records, as DDP exchanges them.
  for (uint64_t epoch = 1; epoch < 4; ++epoch) {
    const std::byte record[3] = {std::byte(epoch), std::byte(me), std::byte(7)};
    pg.post(epoch, record);
    const auto records = pg.collect(epoch);
    for (int r = 0; r < size; ++r)
      require(records[static_cast<size_t>(r)] ==
                  std::vector<std::byte>{std::byte(epoch), std::byte(r), std::byte(7)},
              "records");
  }
}
TEST_CASE("pairs, children and groups of some ranks") {
  CHECK(ranks::failures(run(2, "rank: pairs and groups")) == "");
  CHECK(ranks::failures(run(4, "rank: pairs and groups")) == "");
}

TEST_CASE("rank: trains" * doctest::skip()) {
  const Group g = join();
  const auto one = equality::train(Group(), {}), mine = equality::train(g, {});
  require(equality::difference(mine.weights, one.weights) <= 1e-12, "differs from one process");
  require(mine.buckets >= 4, "too few buckets to see anything");
  const Tensor all = g.all_gather(tensor(mine.weights));
  for (int r = 0; r < g.size(); ++r)
    require(all[r].to_vector<double>() == mine.weights, "ranks hold other bits");
}
TEST_CASE("training on ranks equals one process") {
  CHECK(ranks::failures(run(2, "rank: trains", {.deadline = 60})) == "");
  CHECK(ranks::failures(run(3, "rank: trains", {.deadline = 60})) == "");
}

// ---- faults ----

TEST_CASE("rank: disagree" * doctest::skip()) {
  const Group g = join(std::chrono::seconds(2));
  const bool first = g.rank() == 0, detail = std::getenv("LOCKSTEP_DEBUG") != nullptr;
  g.barrier();
  std::string text;
  const double begin = ranks::now();
  switch (std::atoi(std::getenv("TEST_WHICH"))) {
    case 0:
      text = error_of<DistError>([&] { g.all_reduce(ones({first ? 10 : 11})); });
      expect(text, {"rank 0: all_reduce(sum) of f32 [10]", "rank 1: all_reduce(sum) of f32 [11]"});
      break;
    case 1:
      text = error_of<DistError>(
          [&] { first ? g.all_reduce(ones({10})) : g.broadcast(ones({10}), 0); });
      expect(text,
             {"rank 0: all_reduce(sum) of f32 [10]", "rank 1: broadcast of f32 [10], root 0"});
      break;
    case 2:
      text = error_of<DistError>(
          [&] { g.all_reduce(ones({10}, {.dtype = first ? DType::f32 : DType::f64})); });
      expect(text, {"of f32 [10]", "of f64 [10]"});
      break;
    default:
      text = error_of<DistError>(
          [&] { g.all_reduce(ones({10}), first ? ReduceOp::sum : ReduceOp::max); });
      expect(text, {"all_reduce(sum)", "all_reduce(max)"});
  }
  expect(text,
         {"ranks disagree", "sequence number 2", "last completed: barrier, sequence number 1"});
  if (detail) ranks::below(begin, 0.8, "a mismatch under detail");
  ranks::below(begin, 4, "a mismatch");
  expect(error_of<DistError>([&] { g.barrier(); }), {"ranks disagree"});
  g.destroy();
}
TEST_CASE("ranks that disagree are told so") {
  for (int which = 0; which < 4; ++which) {
    CAPTURE(which);
    CHECK(ranks::failures(run(2, "rank: disagree",
                              {.variables = {{"TEST_WHICH", std::to_string(which)},
                                             {"LOCKSTEP_DEBUG", "detail"}}})) == "");
  }
  CHECK(ranks::failures(run(2, "rank: disagree", {.variables = {{"TEST_WHICH", "0"}}})) == "");
  CHECK(ranks::failures(run(2, "rank: disagree", {.variables = {{"TEST_WHICH", "1"}}})) == "");
}

TEST_CASE("rank: late" * doctest::skip()) {
  const Group g = join();
  g.barrier();
  const auto child = g.process_group().child();
  child->note("of another group");
  g.process_group().note("soon outdated");
  if (g.rank() != 2) g.process_group().note(str_cat(g.rank(), " forwards"));
  const double begin = ranks::now();
  if (g.rank() != 1) {
    const std::string text = error_of<DistError>([&] {
      g.all_reduce(ones({3, 2}), ReduceOp::avg,
                   {.timeout = Milliseconds(300), .label = "bucket 7"});
    });
    expect(text, {"all_reduce(avg) of f32 [3, 2], sequence number 2 (bucket 7)",
                  "rank 1 did not arrive within 300 ms", "last completed: barrier",
                  "; rank 0: 0 forwards; rank 1: 1 forwards; rank 2: soon outdated"});
    require(text.find("another group") == std::string::npos, "a note of another group");
    require(ranks::now() - begin >= 0.3, "too early");
    ranks::below(begin, 2.5, "a deadline");
  } else {
    std::this_thread::sleep_for(Milliseconds(2000));
    expect(error_of<DistError>([&] {
             g.all_reduce(ones({3, 2}), ReduceOp::avg);
           }),
           {"rank 1 did not arrive"});
  }
}
TEST_CASE("a late rank is named") { CHECK(ranks::failures(run(3, "rank: late")) == ""); }

TEST_CASE("rank: dies" * doctest::skip()) {
  const Group g = join();
  const int victim = std::atoi(std::getenv("TEST_VICTIM"));
  const bool large = std::getenv("TEST_LARGE") != nullptr;
  g.barrier();
  if (g.rank() == victim) {
    if (!large) raise(SIGKILL);
    // In the middle of a message.
    const Tensor t = ones({20'000'000});
    const WorkPtr work = g.all_reduce_async(t);
    std::this_thread::sleep_for(Milliseconds(5));
    raise(SIGKILL);
  }
  const double begin = ranks::now();
  std::string text;
  for (int i = 0; i < 2 && text.empty(); ++i)
    text = error_of<DistError>([&] { g.all_reduce(ones({large ? 20'000'000 : 5})); });
  expect(text, {"all_reduce(sum)", "sequence number 2", str_cat("rank ", victim).c_str(), "died"});
  if (victim != 0)
    require(std::regex_search(text, std::regex(str_cat("rank ", victim, " \\(pid [0-9]+\\)"))),
            text);
  ranks::below(begin, 2, "the news of a death");
  for (int i = 0; i < 3; ++i) g.process_group().note("still there");  // with the store or without
  expect(error_of<DistError>([&] { g.barrier(); }), {"died"});
}
TEST_CASE("a rank that dies is named within two seconds") {
  for (const int victim : {0, 1, 2})
    for (const bool large : {false, true}) {
      CAPTURE(victim);
      CAPTURE(large);
      std::map<std::string, std::string> variables{{"TEST_VICTIM", std::to_string(victim)}};
      if (large) variables["TEST_LARGE"] = "1";
      const auto ended = run(3, "rank: dies", {.variables = variables});
      for (const Ended& e : ended) {
        if (e.rank == victim)
          CHECK(e.signal == SIGKILL);
        else
          CHECK_MESSAGE((!e.hung && e.code == 0), e.output);
      }
    }
}

TEST_CASE("rank: leaves" * doctest::skip()) {
  const Group g = join();
  const Tensor t = full({100}, g.rank() + 1);
  const WorkPtr needed = g.all_reduce_async(t);
  if (g.rank() == 1) {
    g.destroy();  // completes it
    require(t.data<float>()[99] == 6, "destroy did not complete what was under way");
    std::this_thread::sleep_for(Milliseconds(1500));
    return;
  }
  std::this_thread::sleep_for(Milliseconds(300));
  needed->wait();  // rank 1 has completed it: it is not needed any more
  require(t.data<float>()[99] == 6, "the sum");
  const double begin = ranks::now();
  expect(error_of<DistError>([&] { g.barrier(); }),
         {"rank 1 has left", "barrier, sequence number 2"});
  ranks::below(begin, 1, "the news that a rank has left");
}
TEST_CASE("a rank that has left is an error for what needs it") {
  CHECK(ranks::failures(run(3, "rank: leaves")) == "");
}

TEST_CASE("rank: aborts" * doctest::skip()) {
  const Group g = join();
  g.barrier();
  if (g.rank() == 1) {
    std::this_thread::sleep_for(Milliseconds(200));
    try {
      const Group handle(g.shared());
      throw Error("out of luck");
    } catch (const Error&) {
    }
    expect(error_of<DistError>([&] { g.barrier(); }), {"aborted by rank 1"});
    return;
  }
  const double begin = ranks::now();
  expect(error_of<DistError>([&] { g.all_reduce(ones({4})); }),
         {"all_reduce(sum) of f32 [4], sequence number 2", "aborted by rank 1", "exception"});
  ranks::below(begin, 1.5, "an abort");
}
TEST_CASE("an exception on one rank frees the others") {
  CHECK(ranks::failures(run(3, "rank: aborts")) == "");
}

TEST_CASE("rank: ends without a word" * doctest::skip()) {
  const Group g = join();
  const Tensor t = full({10}, 1);
  g.all_reduce_async(t);  // dropped unfinished
}
TEST_CASE("a program that destroys nothing ends well") {
  const auto ended = run(3, "rank: ends without a word");
  CHECK(ranks::failures(ended) == "");
}

// ---- meeting ----

TEST_CASE("rank: meets" * doctest::skip()) {
  const Group g = join();
  require(g.all_gather(full({1}, g.rank())).data<float>()[g.size() - 1] ==
              static_cast<float>(g.size() - 1),
          "gathered");
}
TEST_CASE("MASTER_PORT may be held by somebody else") {
  const sockets::Listener silent,
      noisy("HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n Lockstep Lockstep");
  for (const int port : {silent.port(), noisy.port()}) {
    const double begin = ranks::now();
    CHECK(ranks::failures(
              run(3, "rank: meets", {.variables = {{"MASTER_PORT", std::to_string(port)}}})) == "");
    CHECK(ranks::now() - begin < 5 * ranks::kPatience);
  }
}

TEST_CASE("two jobs at once, by one MASTER_PORT") {
  const std::string port = free_port();
  std::vector<Ended> one, two;
  const ranks::Options options{.variables = {{"MASTER_PORT", port}}};
  std::thread other([&] {
    ranks::Options with_id = options;
    with_id.variables["LOCKSTEP_RUN_ID"] = "the other";
    one = run(3, "rank: meets", with_id);
  });
  two = run(3, "rank: meets", options);
  other.join();
  CHECK(ranks::failures(one) == "");
  CHECK(ranks::failures(two) == "");
}

TEST_CASE("rank: waits in vain" * doctest::skip()) {
  const double begin = ranks::now();
  const std::string text = error_of<DistError>([] { join(); });
  expect(text, {std::getenv("TEST_EXPECT"), "127.0.0.1:"});
  // Rank 2 may have begun later than rank 0, whose deadline ends it for both.
  require(ranks::now() - begin >= 1 || std::getenv("RANK") == std::string("2"), "too early");
  ranks::below(begin, 2, "a missing rank");
}
TEST_CASE("missing ranks and wrong tokens") {
  // Long enough for the ranks that are there to start.
  const std::string patience = std::to_string(std::min(ranks::kPatience, 4));
  const auto missing = [&](int size, std::vector<int> only, const std::string& joined,
                           const std::string& rank) {
    const std::string text =
        str_cat(joined, " ranks joined within ", patience, " s: rank ", rank, " is missing");
    return run(size, "rank: waits in vain",
               {.variables = {{"LOCKSTEP_JOIN_TIMEOUT", patience}, {"TEST_EXPECT", text}},
                .only = std::move(only)});
  };
  CHECK(ranks::failures(missing(3, {0, 2}, "2/3", "1")) == "");
  CHECK(ranks::failures(missing(2, {1}, "1/2", "0")) == "");
  ranks::Options options{.variables = {{"LOCKSTEP_JOIN_TIMEOUT", patience}}};
  options.of_rank[0] = {{"TEST_EXPECT", "rank 1 is missing"}};
  options.of_rank[1] = {{"TEST_EXPECT", "is LOCKSTEP_TOKEN the same on all hosts"},
                        {"LOCKSTEP_TOKEN", "another"}};
  CHECK(ranks::failures(run(2, "rank: waits in vain", options)) == "");
}

TEST_CASE("rank: listens on loopback only" * doctest::skip()) {
  const Group g = join();
  const auto child = g.process_group().child();
  const auto listening = listening_here();
  for (const std::string& at : listening) require(at.starts_with("0100007F:"), "listens at " + at);
  require(g.rank() != 0 || !listening.empty(), "the store's socket was not seen");
  g.barrier();
}
TEST_CASE("on one host nothing listens beyond loopback") {
  CHECK(ranks::failures(run(2, "rank: listens on loopback only")) == "");
}

TEST_CASE("rank: a stranger comes first" * doctest::skip()) {
  const Group g = join();
  const std::string how = std::getenv("TEST_HOW");
  const auto before = listening_here();
  std::vector<int> strangers;
  std::atomic<bool> over{false};
  std::thread stranger;
  if (g.rank() == 0)
    // Rank 0 waits for rank 1 here, and its Gloo for a connection.
    stranger = std::thread([&] {
      while (strangers.empty() && !over) {
        for (const std::string& at : listening_here()) {
          if (std::count(before.begin(), before.end(), at) > 0) continue;
          const int s = sockets::connect_to(std::stoi(at.substr(at.find(':') + 1), nullptr, 16));
          if (s < 0) continue;
          if (how == "noise") send(s, "GET / HTTP/1.1\r\n\r\n", 18, MSG_NOSIGNAL);
          if (how == "closes") shutdown(s, SHUT_RDWR);
          if (how == "resets") {
            const linger now{1, 0};
            setsockopt(s, SOL_SOCKET, SO_LINGER, &now, sizeof now);
            close(s);
          }
          strangers.push_back(s);
        }
        std::this_thread::sleep_for(Milliseconds(1));
      }
    });
  else
    std::this_thread::sleep_for(Milliseconds(400));
  const double begin = ranks::now();
  // Whose connection it is depends on the ports: the group is made, or it is an error for both.
  std::string text = "made";
  try {
    const auto child = g.process_group().child();
    const Tensor t = ones({4});
    child->all_reduce(t)->wait();
    require(t.data<float>()[3] == 2, "the sum");
  } catch (const DistError& e) {
    text = e.what();
    expect(text, {"connecting the ranks"});
  }
  ranks::below(begin, 4, "connecting");
  over = true;
  if (stranger.joinable()) stranger.join();
  require(g.rank() != 0 || !strangers.empty(), "no stranger came");
  for (const int s : strangers) close(s);
  g.barrier();  // the group that stood before still does
}
TEST_CASE("a stranger at Gloo's port is an error and not a hang") {
  const auto with = [](const std::string& how) {
    return run(2, "rank: a stranger comes first",
               {.variables = {{"TEST_HOW", how}, {"LOCKSTEP_JOIN_TIMEOUT", "3"}}});
  };
  for (const std::string how : {"silent", "silent", "noise"}) {
    CAPTURE(how);
    CHECK(ranks::failures(with(how)) == "");
  }
  // A connection that is gone just after Gloo has accepted it makes Gloo's own thread end the
  // process, which the documentation says; a hang it is not either, and the peer gets an error.
  for (const std::string how : {"closes", "resets"}) {
    CAPTURE(how);
    const auto ended = with(how);
    for (const Ended& e : ended) CHECK_MESSAGE(!e.hung, e.output);
    if (ended[0].signal == SIGABRT) {
      CHECK_MESSAGE(ended[0].output.find("gloo::EnforceNotMet") != std::string::npos,
                    ended[0].output);
      CHECK_MESSAGE(ended[1].output.find("rank 0 died") != std::string::npos, ended[1].output);
    } else {
      CHECK(ranks::failures(ended) == "");
    }
  }
}
