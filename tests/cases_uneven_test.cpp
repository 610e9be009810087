// Ranks that run out of step: more batches on one, join, collectives that do not match, ranks that are late,
// leave or die. Every rank is told, in time, with operation and rank; nothing hangs and nothing returns as if
// all were well. Expected numbers are worked by hand.
#include "cases.h"

#include <unistd.h>

namespace {

using namespace cases;

/// SGD with learning rate 1 on (a + b) x, x = 1.
void step(DistributedDataParallel<Two>& net) {
  net.zero_grad();
  auto [ya, yb] = net(f64(1));
  (ya + yb).backward();
  NoGradGuard guard;
  for (Tensor p : net.parameters()) p.sub_(p.grad());
}

// ---- one batch more ----

enum class After { lives, leaves, exits };

/// All ranks but the odd one take a third step.
void one_batch_more(const Group& g, int odd, After after) {
  // Deadlines take their time: one layout each.
  auto all = layouts();
  if (after != After::leaves) all = {all[static_cast<size_t>(odd)]};
  for (const auto& options : all) {
    {
      DistributedDataParallel net{Two{}, g, options};
      step(net), step(net);
      if (g.rank() == odd) {
        if (after == After::exits) _exit(0);
        if (after == After::lives) std::this_thread::sleep_for(kDeadline + kDeadline / 4);
      } else {
        const double begin = ranks::now();
        const std::string text = error_of([&] { step(net); });
        const double took = ranks::now() - begin;
        expect(text, {str_cat("rank ", odd)});
        if (after == After::lives)
          expect(text, {"DDP bucket 0", "all_reduce(avg) of f64", "sequence number"});
        require(after == After::lives || took < 2.0 * ranks::kPatience,
                str_cat("the news took ", took, " s"));
        for (const Tensor& p : net.parameters())
          require(!p.grad().defined(), "a gradient is left after the error");
      }
    }
    if (after == After::exits) return;
    g.barrier({.timeout = std::chrono::seconds(15)});  // the wrapper's communicator is its own
  }
}

/// The odd rank's third step stays local, by no_sync.
void one_rank_inside_no_sync(Group g) {
  const Group own(g.process_group().child());
  DistributedDataParallel net{Two{}, own};
  step(net), step(net);
  if (g.rank() == 1) {
    const auto local = net.no_sync();
    step(net);
    std::this_thread::sleep_for(kDeadline + kDeadline / 4);
  } else {
    const std::string text = error_of([&] { step(net); });
    expect(text, {"rank 1", "DDP bucket 0", "; rank 0: 3 forwards, 2 synchronised backwards",
                  "; rank 1: 3 forwards, 2 synchronised backwards, in no_sync"});
  }
  g.barrier({.timeout = std::chrono::seconds(15)});
}

/// A rank that comes to a backward which a goodbye has ended already: it waits for nobody, and its error
/// says where it was.
void late_to_a_broken_backward(Group g) {
  const Group own(g.process_group().child());
  std::optional<DistributedDataParallel<Two>> net(std::in_place, Two{}, own);
  step(*net);
  if (g.rank() == 2) {
    net.reset();
    own.destroy();
  }
  if (g.rank() == 0) expect(error_of([&] { step(*net); }), {"rank 2 has left", "DDP bucket 0 (b"});
  g.barrier();
  if (g.rank() == 1) {
    const std::string text = error_of([&] { step(*net); });
    expect(text, {"rank 2 has left", "DDP bucket 0 (b"});
    // Over gloo the record travels beside the bucket, and the bucket is waited for first.
    if (g.backend() != "gloo") expect(text, {"control record of synchronised backward 2"});
  }
  g.barrier();
}

// ---- join ----

struct Counter : nn::Module {  // (a + b) x, and a buffer that tells who was last
  nn::Parameter a{f64(10)}, b{f64(20)};
  nn::Buffer seen{f64(0)};
  Tensor forward(Tensor x, double mark) {
    seen = seen * 10.0 + f64(mark);
    return (a + b) * x;
  }
  LOCKSTEP_MODULE(Counter, a, b, seen)
};

/// Trains on `batches[rank]` inputs of 1; returns what a has lost.
double joined(const Group& g, const std::vector<int>& batches, dist::JoinOptions join,
              DistributedDataParallelOptions options = {}, int window = 1) {
  DistributedDataParallel net{Counter{}, g, std::move(options)};
  Counter& m = net.module();
  const int mine = batches[static_cast<size_t>(g.rank())];
  net.join(
      [&] {
        for (int i = 0; i < mine; ++i) {
          if (i % window == 0) net.zero_grad();
          {
            const auto local = net.no_sync((i + 1) % window != 0);
            net(f64(1), g.rank() + 1).backward();
          }
          if ((i + 1) % window != 0) continue;
          NoGradGuard guard;
          m.a.sub_(m.a.grad());
          m.b.sub_(m.b.grad());
        }
      },
      join);
  same_bits(g, m.a, "a");
  same_bits(g, m.b, "b");
  same_bits(g, m.seen, "the buffer");
  double seen = 0;  // in each round the mark of the lowest rank that had an input
  for (int round = 0;; ++round) {
    int lowest = 0;
    while (lowest < g.size() && batches[static_cast<size_t>(lowest)] <= round) ++lowest;
    if (lowest == g.size()) break;
    seen = seen * 10 + lowest + 1;
  }
  if (window == 1) near(m.seen.item<double>(), seen, "the buffer");
  near(10 - m.a.item<double>(), 20 - m.b.item<double>(), "a and b lose the same");
  // Both work on.
  net.zero_grad();
  net(f64(g.rank()), 0).backward();
  near(m.a.grad().item<double>(), (g.size() - 1) / 2.0, "after join");
  return 10 - m.a.item<double>();
}

void joins(Group g) {
  const bool three = g.size() == 3;
  const std::vector<std::vector<int>> plans{{2, 3, 3}, {3, 2, 5}, {4, 1, 0}, {0, 3, 1},
                                            {2, 2, 2}, {0, 0, 0}, {1, 2, 4}};
  int turn = 0;
  for (const auto& plan : plans) {
    const int most = *std::max_element(plan.begin(), plan.begin() + g.size());
    double all = 0;  // each step loses the number of active ranks over W
    for (int r = 0; r < g.size(); ++r) all += plan[static_cast<size_t>(r)] / double(g.size());
    for (const bool find : {false, true})
      for (const bool static_graph : {false, true})
        for (const bool hook : {false, true}) {
          if (hook && (find || static_graph)) continue;
          // Over gloo every wrapper connects anew: there the layouts take turns.
          auto all_layouts =
              layouts({.find_unused_parameters = find, .static_graph = static_graph});
          if (g.backend() == "gloo") all_layouts = {all_layouts[static_cast<size_t>(turn++ % 2)]};
          for (auto options : all_layouts) {
            if (hook)
              options.comm_hook = [](dist::GradBucket& b) {
                return b.group->all_reduce(b.buffer, dist::ReduceOp::avg);
              };
            near(joined(g, plan, {}, options), all, "divided by all ranks");
            near(joined(g, plan, {.divide_by_initial_world_size = false}, options), most,
                 "divided by the active");
          }
        }
  }
  // Windows of two micro-batches.
  near(joined(g, {2, 4, 4}, {}, {}, 2), three ? 2 + 2 * 2 / 3.0 : 3, "windows");
}

void join_that_throws(Group g) {
  for (const auto& options : layouts()) {
    DistributedDataParallel net{Two{}, g, options};
    int steps = 0;
    refuses(g, {"rank 1 has no more inputs"}, [&] {
      net.join(
          [&] {
            for (; steps < (g.rank() == 1 ? 2 : 3); ++steps) step(net);
          },
          {.throw_on_early_termination = true});
    });
    require(steps == 2, str_cat("stopped after ", steps, " steps"));
    near(net.module().a.item<double>(), 2 - 2.0, "a");
    same_bits(g, net.module().a, "a");
  }
}

/// Another collective inside join ends everybody's, wherever the others are.
void collective_inside_join(Group g) {
  const Group own(g.process_group().child());
  DistributedDataParallel net{Two{}, own};
  const std::string text = error_of([&] {
    net.join([&] {
      step(net);
      if (g.rank() == 0) return;  // shadows the others
      step(net);
      if (g.rank() == 1) own.barrier();
      step(net);
    });
  });
  expect(text, {g.rank() == 1 ? "inside join" : "rank 1"});
  g.barrier();
}

// ---- collectives that do not match ----

/// What this rank calls, and what that is in messages.
struct Act {
  std::function<void(const Group&, const dist::CollectiveOptions&)> call;
  std::string text;
};
Act all_reduce(const Shape& shape, DType t = DType::f32, dist::ReduceOp op = dist::ReduceOp::sum) {
  return {[=](const Group& g, const auto& o) { g.all_reduce(ones(shape, {.dtype = t}), op, o); },
          str_cat("all_reduce(", name_of(op), ") of ", t, " ", shape)};
}
Act broadcast(const Shape& shape, int root) {
  return {[=](const Group& g, const auto& o) { g.broadcast(ones(shape), root, o); },
          str_cat("broadcast of f32 ", shape, ", root ", root)};
}
Act all_gather(const Shape& shape) {
  return {[=](const Group& g, const auto& o) { g.all_gather(ones(shape), o); },
          str_cat("all_gather of f32 ", shape)};
}
Act barrier() {
  return {[](const Group& g, const auto& o) { g.barrier(o); }, "barrier"};
}

void mismatch(const Group& g, const Act& usual, const Act& other) {
  const bool by_deadline = g.backend() == "gloo";  // which sends no headers; once is enough there
  for (int odd = by_deadline ? g.size() - 1 : 0; odd < g.size(); ++odd) {
    const Group own(g.process_group().child());
    own.barrier();
    const dist::CollectiveOptions options{.timeout =
                                              by_deadline ? Milliseconds(1000) : Milliseconds(0)};
    const double begin = ranks::now();
    const std::string text =
        error_of([&] { (g.rank() == odd ? other : usual).call(own, options); });
    expect(text, {usual.text, other.text, "sequence number 2"});
    require(ranks::now() - begin < (by_deadline ? 5 : 2) * ranks::kPatience, "the error came late");
    // The communicator stays broken, the one above it does not.
    require(
        error_of([&] { own.all_reduce(ones({2}), dist::ReduceOp::sum, options); }) != "no error",
        "a broken communicator goes on");
    g.barrier();
  }
}

void other_amounts(Group g) {
  mismatch(g, all_reduce({10}), all_reduce({11}));
  mismatch(g, all_reduce({10}), all_reduce({2, 5}));
  mismatch(g, all_reduce({10}), all_reduce({0}));
  mismatch(g, all_reduce({300000}), all_reduce({300001}));
  mismatch(g, all_gather({3}), all_gather({4}));
}
void other_kinds(Group g) {
  mismatch(g, all_reduce({10}), broadcast({10}, 0));
  mismatch(g, all_reduce({10}), all_gather({10}));
  mismatch(g, all_reduce({1}), barrier());
  mismatch(g, broadcast({10}, 0), broadcast({10}, 1));
}
void other_types(Group g) {
  mismatch(g, all_reduce({10}), all_reduce({10}, DType::f64));
  mismatch(g, all_reduce({10}), all_reduce({10}, DType::i32));
  mismatch(g, all_reduce({10}), all_reduce({10}, DType::f32, dist::ReduceOp::avg));
  mismatch(g, all_reduce({10}), all_reduce({10}, DType::f32, dist::ReduceOp::max));
}

/// Two that are called in another order, in the middle of others under way.
void other_order(Group g) {
  const Group own(g.process_group().child());
  const dist::CollectiveOptions options{.timeout = Milliseconds(g.backend() == "gloo" ? 1000 : 0)};
  const Tensor good = full({5}, g.rank() + 1.0), a = ones({7}), b = ones({9});
  const auto w1 = own.all_reduce_async(good, dist::ReduceOp::sum, options);
  const bool odd = g.rank() == g.size() - 1;
  const std::string text = error_of([&] {
    const auto w2 = own.all_reduce_async(odd ? b : a, dist::ReduceOp::sum, options);
    const auto w3 = own.all_reduce_async(odd ? a : b, dist::ReduceOp::sum, options);
    w1->wait();
    require(good.to_vector<double>() == std::vector<double>(5, g.size() * (g.size() + 1) / 2),
            "what came before");
    w2->wait();
    w3->wait();
  });
  expect(text, {"all_reduce(sum) of f32 [7]", "all_reduce(sum) of f32 [9]"});
  g.barrier();
}

// ---- dead and slow ranks ----

void rank_exits(const Group& g, int dies) {
  for (int i = 0; i < 4; ++i) g.all_reduce(ones({10}));
  if (g.rank() == dies) _exit(1);
  const double begin = ranks::now();
  try {
    g.all_reduce(ones({10}));
  } catch (const Error&) {
    require(ranks::now() - begin < 2.0 * ranks::kPatience, "a death was noticed late");
    throw;
  }
}

/// In the middle of a backward that has launched its first bucket.
void rank_exits_in_backward(Group g) {
  DistributedDataParallel net{Two{}, g, layouts()[1]};
  step(net);
  net.zero_grad();
  auto y = net(f64(1));
  y.first.register_hook([&](const Tensor&) -> Tensor {
    if (g.rank() == 1) _exit(1);
    return {};
  });
  const double begin = ranks::now();
  const std::string text = error_of([&] { (y.first + y.second).backward(); });
  expect(text, {"rank 1", "died", "last completed"});
  require(ranks::now() - begin < 2.0 * ranks::kPatience, "a death was noticed late");
  for (const Tensor& p : net.parameters()) require(!p.grad().defined(), "a gradient is left");
}

void slow_rank(Group g) {
  for (int i = 0; i < 4; ++i) g.all_reduce(ones({10}));
  if (g.rank() == 1) std::this_thread::sleep_for(kDeadline + kDeadline / 4);
  g.all_reduce(ones({10}));
}

}  // namespace

const std::vector<cases::Case>& cases::all() {
  const std::vector<std::string> fifth{"all_reduce(sum) of f32 [10]", "sequence number 5", "rank 1",
                                       "last completed: all_reduce(sum)"};
  static const std::vector<Case> list{
      {.name = "a batch more than a rank that lives on",
       .body = [](Group g) { one_batch_more(g, 0, After::lives); },
       .timeout = kDeadline},
      {.name = "a batch more than one of three that lives on",
       .size = 3,
       .body = [](Group g) { one_batch_more(g, 1, After::lives); },
       .timeout = kDeadline},
      {"a batch more than a rank that has left", 2,
       [](Group g) { one_batch_more(g, 0, After::leaves); }},
      {"a batch more than one of three that has left", 3,
       [](Group g) { one_batch_more(g, 2, After::leaves); }},
      {.name = "a batch more than a rank that has exited",
       .size = 3,
       .body = [](Group g) { one_batch_more(g, 1, After::exits); },
       .threads = false},
      {.name = "a rank that is inside no_sync",
       .body = one_rank_inside_no_sync,
       .timeout = kDeadline},
      {"a rank that is late to a broken backward", 3, late_to_a_broken_backward},
      {"join on two ranks", 2, joins},
      {"join on three ranks", 3, joins},
      {"join that throws", 2, join_that_throws},
      {"join that throws on three ranks", 3, join_that_throws},
      {"another collective inside join", 3, collective_inside_join},
      {"collectives of other amounts", 2, other_amounts},
      {"collectives of other kinds", 2, other_kinds},
      {"collectives of other types", 2, other_types},
      {"collectives of other kinds on three ranks", 3, other_kinds},
      {"collectives in another order", 3, other_order},
      {.name = "a rank that exits",
       .body = [](Group g) { rank_exits(g, 1); },
       .throws = fifth,
       .threads = false,
       .codes = {{1, 1}}},
      {.name = "one of three ranks that exits",
       .size = 3,
       .body = [](Group g) { rank_exits(g, 1); },
       .throws = fifth,
       .threads = false,
       .codes = {{1, 1}}},
      {.name = "a rank that exits in a backward",
       .size = 3,
       .body = rank_exits_in_backward,
       .threads = false,
       .codes = {{1, 1}}},
      {.name = "a rank that is slow", .body = slow_rank, .throws = fifth, .timeout = kDeadline},
      {.name = "one of three ranks that is slow",
       .size = 3,
       .body = slow_rank,
       .throws = fifth,
       .timeout = kDeadline},
  };
  return list;
}
