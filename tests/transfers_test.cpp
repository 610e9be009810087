// Sends and receives: order within a pair of ranks, independence of pairs, mismatches, deadlines
// and deaths; on threads, and through "rank: ..." on processes.
#include <doctest/doctest.h>

#include <random>

#include <lockstep/distributed/local.h>

#include "exchanges.h"

using namespace lockstep;
using namespace lockstep::dist;
using ranks::require;

namespace {

Tensor filled(int64_t n, int rank, int64_t salt, DType t = DType::f32) {
  const Tensor x = new_tensor({n}, t);
  with_type(t, [&]<class T>(T) { fill<T>(x, [&](int64_t i) { return value<T>(rank, i, salt); }); });
  return x;
}
void check(const Tensor& t, int rank, int64_t salt, const std::string& what) {
  check_elements<float>(
      t, [&](int64_t i) { return value<float>(rank, i, salt); }, what);
}

// From none to several windows.
constexpr int64_t kSizes[] = {1, 0, 5, 8192, 8193, 40000, 0, 400001, 3};

// Everything to everybody at once, started in another order on every rank, waited for in another.
void all_pairs(const Group& g) {
  ProcessGroup& pg = g.process_group();
  std::mt19937 random(static_cast<unsigned>(g.rank()));
  struct One {
    bool sends;
    int other;
    size_t next = 0;  // of kSizes
  };
  std::vector<One> open;
  for (int r = 0; r < g.size(); ++r)
    if (r != g.rank()) {
      open.push_back({true, r});
      open.push_back({false, r});
    }
  std::vector<std::function<void()>> finish;
  while (!open.empty()) {
    One& one = open[random() % open.size()];
    const int64_t n = kSizes[one.next], salt = static_cast<int64_t>(one.next) + 100 * g.size();
    if (one.sends) {
      const Tensor t = filled(n, g.rank(), salt + one.other);
      finish.push_back([t, w = pg.send(t, one.other)] { w->wait(); });
    } else {
      const Tensor t = new_tensor({n}, DType::f32);
      finish.push_back([t, w = pg.recv(t, one.other), from = one.other, salt, me = g.rank()] {
        w->wait();
        check(t, from, salt + me, str_cat("from rank ", from, " to rank ", me));
      });
    }
    if (++one.next == std::size(kSizes)) {
      one = open.back();
      open.pop_back();
    }
  }
  std::shuffle(finish.begin(), finish.end(), random);
  for (const auto& f : finish) f();
  g.barrier();
}

// A receive that nobody answers yet holds up neither other pairs nor collectives.
void independent(const Group& g) {
  ProcessGroup& pg = g.process_group();
  const int64_t large = 300000;
  if (g.rank() == 0) {
    // Rank 1 takes the first of these last; both are larger than the outbox.
    const Tensor a = filled(large, 0, 1), b = filled(large, 0, 2);
    const WorkPtr to_1 = pg.send(a, 1), to_2 = pg.send(b, 2);
    to_2->wait();
    g.all_reduce(ones({4}));
    to_1->wait();
  } else if (g.rank() == 1) {
    g.all_reduce(ones({4}));
    const Tensor t = new_tensor({large}, DType::f32);
    g.recv(t, 0);
    check(t, 0, 1, "the late receive");
  } else {
    const Tensor t = new_tensor({large}, DType::f32);
    g.recv(t, 0);
    check(t, 0, 2, "the early receive");
    g.all_reduce(ones({4}));
  }
  // A ring of receives that are posted before what they wait for.
  const int next = (g.rank() + 1) % 3, before = (g.rank() + 2) % 3;
  const Tensor in = new_tensor({large}, DType::f32);
  const WorkPtr received = pg.recv(in, before);
  g.barrier();
  const WorkPtr sent = pg.send(filled(large, g.rank(), 7), next);
  received->wait();
  sent->wait();
  check(in, before, 7, "the ring");
  require(sent->result().empty() && received->result()[0].is_same(in), "result");
}

void disagree(const Group& g) {
  ProcessGroup& pg = g.process_group();
  const bool dtypes = std::getenv("WHICH") == nullptr || *std::getenv("WHICH") == '0';
  std::string text;
  if (g.rank() == 0)
    text = error_of<DistError>([&] { pg.send(ones({10}), 1)->wait(); });
  else if (dtypes)
    text = error_of<DistError>([&] { pg.recv(ones({10}, {.dtype = DType::f64}), 0)->wait(); });
  else
    text = error_of<DistError>([&] { pg.recv(ones({11}), 0)->wait(); });
  expect(text, {"ranks disagree", "rank 0 called send of f32 [10] to rank 1", "rank 1",
                dtypes ? "10 elements of f64" : "11 elements of f32"});
}

void late(const Group& g) {
  const CollectiveOptions soon{.timeout = Milliseconds(200), .label = "weights"};
  const auto child = g.process_group().child();
  if (g.rank() == 0) {
    expect(error_of<DistError>([&] { g.process_group().recv(ones({3}), 1, soon)->wait(); }),
           {"recv of f32 [3] from rank 1", "rank 1 did not arrive within 200 ms", "weights"});
    // The same with a deadline of the wait.
    const WorkPtr w = child->send(ones({3}), 1);
    expect(error_of<DistError>([&] { w->wait(Milliseconds(150)); }),
           {"send of f32 [3] to rank 1", "rank 1 did not arrive within 150 ms"});
  } else {
    // Waits for something else until it hears of it.
    expect(error_of<DistError>([&] { g.barrier(); }), {"rank 1 did not arrive within 200 ms"});
    expect(error_of<DistError>([&] { child->barrier()->wait(); }),
           {"rank 1 did not arrive within 150 ms"});
  }
}

void on_both(int size, const std::string& name, const std::function<void(Group)>& body) {
  run_local(size, body);
  CHECK(ranks::failures(ranks::run_ranks(size, "rank: " + name)) == "");
}

}  // namespace

TEST_CASE("every pair at once, in any order") {
  for (const int size : {2, 3, 4}) run_local(size, all_pairs);
  CHECK(ranks::failures(ranks::run_ranks(3, "rank: all pairs")) == "");
}
TEST_CASE("rank: all pairs" * doctest::skip()) { all_pairs(init()); }

TEST_CASE("pairs do not wait for each other") { on_both(3, "independent", independent); }
TEST_CASE("rank: independent" * doctest::skip()) { independent(init()); }

TEST_CASE("dtype and size are compared before data moves") {
  on_both(2, "send disagrees", disagree);
  CHECK(ranks::failures(
            ranks::run_ranks(2, "rank: send disagrees", {.variables = {{"WHICH", "1"}}})) == "");
}
TEST_CASE("rank: send disagrees" * doctest::skip()) { disagree(init()); }

TEST_CASE("a deadline names the rank that did not send or receive") {
  on_both(2, "send late", late);
}
TEST_CASE("rank: send late" * doctest::skip()) { late(init()); }

TEST_CASE("a dead rank is named to whoever waits for it, and missed by nobody else") {
  const auto ended = ranks::run_ranks(3, "rank: sender dies");
  CHECK(ended[1].signal == SIGKILL);
  for (const size_t r : {0, 2}) {
    INFO(ended[r].output);
    CHECK(ended[r].code == 0);
  }
}
TEST_CASE("rank: sender dies" * doctest::skip()) {
  const Group g = init();
  const Tensor t = g.rank() == 1 ? filled(4, 1, 3) : new_tensor({4}, DType::f32);
  if (g.rank() == 1) {
    g.send(t, 0);
    raise(SIGKILL);
  }
  if (g.rank() == 0) {
    g.recv(t, 1);  // complete before the death: fine
    check(t, 1, 3, "sent before the end");
    g.send(t, 2);  // until then nobody needs the dead rank
    const double begin = ranks::now();
    expect(error_of<DistError>([&] { g.recv(t, 1); }),
           {"rank 1 (pid ", "died", "recv of f32 [4] from rank 1"});
    require(ranks::now() - begin < 2 * ranks::kPatience, "noticed too late");
  } else {
    g.recv(t, 0);
    expect(error_of<DistError>([&] { g.send(t, 1); }),
           {"rank 1 (pid ", "died", "send of f32 [4] to rank 1"});
  }
}

TEST_CASE("destroy completes sends and receives whose Work was dropped") {
  run_local(2, [](Group g) {
    const Tensor t = g.rank() == 0 ? filled(70000, 0, 1) : new_tensor({70000}, DType::f32);
    if (g.rank() == 0)
      g.process_group().send(t, 1);
    else
      g.process_group().recv(t, 0);
    g.destroy();
    check(t, 0, 1, "after destroy");
  });
}
