// Work: one that is dropped completes all the same; what then() leaves runs in wait() and nowhere
// else; a rank may wait in any order and on any group; and what a tensor's release function does is
// the user's affair.
#include <doctest/doctest.h>

#include <functional>
#include <optional>
#include <thread>

#include <lockstep/lockstep.h>

#include "backends.h"
#include "texts.h"

using namespace lockstep;
using namespace lockstep::dist;
using ranks::require;

namespace {

void poll_until_complete(Work& work) {
  const double end = ranks::now() + 20;
  while (!work.is_completed()) {
    require(ranks::now() < end, "it does not complete");
    std::this_thread::yield();
  }
}

void then_runs_in_wait(const Group& g) {
  const Tensor t = full({50000}, 1.0), u = ones({3});
  const WorkPtr work = g.all_reduce_async(t);
  std::vector<int> ran;
  std::thread::id where;
  work->then([&] { ran.push_back(1); });
  work->then([&] {
    where = std::this_thread::get_id();
    throw std::runtime_error("what a callback throws");
  });
  work->then([&] { ran.push_back(3); });
  poll_until_complete(*work);
  g.all_reduce(u);  // a wait for another one
  g.process_group().progress();
  require(ran.empty(), "then() ran outside wait()");
  require(work->is_completed() && !work->exception(), "the transport is done");
  const std::string text = error_of<std::runtime_error>([&] { work->wait(); });
  require(text == "what a callback throws", text);
  require(ran == std::vector<int>{1}, "in order");
  require(where == std::this_thread::get_id(), "on the thread that waits");
  work->wait();
  require(ran == std::vector<int>{1, 3}, "what is left runs in the next wait");
  require(t.data<float>()[9] == static_cast<float>(g.size()), "the sum");
}

// Each rank finds its operations complete at another time, and all start the second ones alike.
void then_may_start_more(const Group& g) {
  constexpr int kMany = 6;
  std::vector<Tensor> first, second;
  std::vector<WorkPtr> works, more(kMany);
  for (int i = 0; i < kMany; ++i) {
    first.push_back(full({10 + 20000 * i}, 1.0 + i));
    second.push_back(full({30 + i}, 2.0));
    works.push_back(g.all_reduce_async(first.back()));
    works.back()->then([&, i] {
      more[static_cast<size_t>(i)] = g.all_reduce_async(second[static_cast<size_t>(i)]);
    });
    if (g.rank() == i % g.size()) poll_until_complete(*works[0]);
  }
  for (const WorkPtr& w : works) w->wait();
  for (const WorkPtr& w : more) w->wait();
  for (const Tensor& t : second)
    require(t.data<float>()[0] == 2.0f * static_cast<float>(g.size()), "second");
}

void polled_coalesced(const Group& g) {
  const Tensor a = full({5}, g.rank() + 1.0), b = full({2, 2}, 1.0, {.dtype = DType::f64});
  const WorkPtr work = all_reduce_coalesced(g.process_group(), {a, b});
  poll_until_complete(*work);
  require(a.data<float>()[4] == static_cast<float>(g.size() * (g.size() + 1) / 2), "a");
  require(b.data<double>()[3] == g.size(), "b");
  const Tensor c = full({3}, g.rank());
  const WorkPtr sent = broadcast_coalesced(g.process_group(), {c}, g.size() - 1);
  poll_until_complete(*sent);
  require(c.data<float>()[2] == static_cast<float>(g.size() - 1), "c");
  sent->wait();
}

// One order of calls in each group; the ranks wait in different orders, while some rank is late.
void waits_in_any_order(const Group& g) {
  const Group a(g.process_group().child()), b(g.process_group().child());
  for (int late = 0; late < g.size(); ++late) {
    const Tensor t = full({100000}, 1.0), u = full({7}, 1.0);
    if (g.rank() == late) std::this_thread::sleep_for(Milliseconds(30));
    const WorkPtr work = a.all_reduce_async(t);
    if (g.rank() % 2 == 0) {
      b.all_reduce(u);
      work->wait();
    } else {
      work->wait();
      b.all_reduce(u);
    }
    require(t.data<float>()[99999] == static_cast<float>(g.size()), "a");
    require(u.data<float>()[6] == static_cast<float>(g.size()), "b");
  }
}

// The last handle on an operation's tensors may be the library's. Its release function uses the
// group.
void release_uses_the_group(const Group& g) {
  int released = 0;
  for (int i = 0; i < 10; ++i) {
    std::optional<Group> child = Group(g.process_group().child());
    std::vector<float> in(40000, 1.0f);
    WorkPtr work;
    const Tensor out = empty({g.size(), 40000});
    {
      const Tensor t = from_blob(in.data(), {40000}, {}, [&] {
        g.process_group().progress();
        child.reset();
        ++released;
      });
      work = g.all_gather_async(out, t);
    }
    work->wait();
    require(out.data<float>()[0] == 1.0f, "all_gather");
    work.reset();
    require(released == i + 1, "its memory is given back");
  }
  g.barrier();
}

// Every kind of Work, dropped at once, has written its outputs when the group is destroyed.
void dropped_works_complete(const Group& all) {
  const Group g(all.process_group().child());
  ProcessGroup& group = g.process_group();
  const int me = g.rank(), size = g.size();
  const double sum = size * (size + 1) / 2.0;
  constexpr int64_t n = 60000;  // more than one piece
  const auto mine = [&] { return full({n}, me + 1.0); };
  std::vector<std::pair<std::string, std::pair<Tensor, double>>> expected;
  const auto expect = [&](const std::string& what, const Tensor& t, double value) {
    expected.push_back({what, {t, value}});
    return t;
  };
  if (me == 0) std::this_thread::sleep_for(Milliseconds(30));
  all_reduce_coalesced(group, {expect("all_reduce_coalesced", mine(), sum),
                               expect("its columns", full({4, n}, me + 1.0).t(), sum),
                               expect("its other dtype", mine().to(DType::f64), sum)});
  broadcast_coalesced(group, {expect("broadcast_coalesced", mine(), size)}, size - 1);
  group.all_reduce(expect("all_reduce", mine(), sum));
  group.broadcast(expect("broadcast", mine(), size), size - 1);
  group.reduce(expect("reduce", mine(), me == 0 ? sum : me + 1.0), 0);
  const Tensor rows = empty({size, n}), from = empty({size, n}), gathered = empty({size, n});
  group.all_gather(rows, mine());
  std::vector<Tensor> parts;
  for (int r = 0; r < size; ++r) {
    expect("all_gather", rows[r], r + 1.0);
    expect("all_to_all", from[r], r + 1.0);
    if (me == 0) parts.push_back(expect("gather", gathered[r], r + 1.0));
  }
  group.gather(parts, mine(), 0);
  group.reduce_scatter(expect("reduce_scatter", empty({n}), sum), full({size, n}, me + 1.0));
  group.scatter(
      expect("scatter", empty({n}), 1),
      me == 0 ? std::vector<Tensor>(static_cast<size_t>(size), mine()) : std::vector<Tensor>(), 0);
  group.all_to_all(from, full({size, n}, me + 1.0));
  if (size > 1 && g.backend() != "shm+gloo") {
    if (me == 0) group.send(mine(), 1);
    if (me == 1) group.recv(expect("recv", empty({n}), 1), 0);
  }
  group.barrier();
  g.destroy();
  for (const auto& [what, value] : expected) {
    const auto got = value.first.to_vector<double>();
    for (const double x : got)
      require(x == value.second,
              what + ": " + std::to_string(x) + " and not " + std::to_string(value.second));
  }
}

void check_all(const Group& g) {
  dropped_works_complete(g);
  then_runs_in_wait(g);
  then_may_start_more(g);
  polled_coalesced(g);
  waits_in_any_order(g);
  release_uses_the_group(g);
}

}  // namespace

TEST_CASE("works between threads, and alone") {
  for (const int size : {1, 2, 3}) run_local(size, check_all);
  check_all(Group());
}
TEST_CASE("works between ranks as processes") {
  for (const std::string& backend : backends::all())
    for (const int size : {2, 4}) {
      CAPTURE(backend);
      CAPTURE(size);
      CHECK(ranks::failures(backends::run(backend, size, "rank: works")) == "");
    }
}
TEST_CASE("rank: works" * doctest::skip()) { check_all(backends::join()); }
