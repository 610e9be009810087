// What ranks hear when they disagree, are late or die, for the kinds of collectives that
// faults_test.cpp leaves out: both sides of a mismatch on every rank, where each rank stands, and
// what the ranks' notes say. On threads, and on processes.
#include <doctest/doctest.h>

#include <lockstep/distributed/local.h>

#include "exchanges.h"

using namespace lockstep;
using namespace lockstep::dist;
using ranks::require;

namespace {

struct Mismatch {
  const char* name;
  std::function<WorkPtr(ProcessGroup&, bool first)> call;  // `first`: on rank 0
  std::vector<std::string> parts;                          // of the error on every rank
};

std::vector<Tensor> each(const ProcessGroup& g, int64_t n) {
  std::vector<Tensor> all;
  for (int r = 0; r < g.size(); ++r) all.push_back(ones({n}));
  return all;
}

std::vector<Mismatch> mismatches() {
  using G = ProcessGroup;
  return {
      {"reduce, roots",
       [](G& g, bool first) { return g.reduce(ones({4}), first ? 0 : 1); },
       {"reduce(sum) of f32 [4], root 0", "reduce(sum) of f32 [4], root 1"}},
      {"reduce against all_reduce",
       [](G& g, bool first) { return first ? g.reduce(ones({4}), 0) : g.all_reduce(ones({4})); },
       {"reduce(sum) of f32 [4], root 0", "all_reduce(sum) of f32 [4]"}},
      {"reduce_scatter, reductions",
       [](G& g, bool first) {
         return g.reduce_scatter(ones({4}), each(g, 4), first ? ReduceOp::min : ReduceOp::max);
       },
       {"reduce_scatter(min) of f32 [4]", "reduce_scatter(max) of f32 [4]"}},
      {"gather, sizes",
       [](G& g, bool first) {
         const int64_t n = first ? 10 : 11;
         return g.gather(g.rank() == 2 ? each(g, n) : std::vector<Tensor>(), ones({n}), 2);
       },
       {"gather of f32 [10], root 2", "gather of f32 [11], root 2"}},
      {"scatter, sizes",
       [](G& g, bool first) {
         return g.scatter(ones({first ? 10 : 11}), first ? each(g, 10) : std::vector<Tensor>(), 0);
       },
       {"scatter of f32 [10], root 0", "scatter of f32 [11], root 0"}},
      {"all_gather, dtypes",
       [](G& g, bool first) {
         const TensorOptions options{.dtype = first ? DType::f32 : DType::f64};
         return g.all_gather(ones({3, 2}, options), ones({2}, options));
       },
       {"all_gather of f32 [2]", "all_gather of f64 [2]"}},
      {"all_to_all, one pair",
       [](G& g, bool first) {
         // Rank 0 sends 7 elements to rank 1, which expects 5; all else fits.
         auto inputs = each(g, 5);
         if (first) inputs[1] = ones({7});
         return g.all_to_all(each(g, 5), inputs);
       },
       {"all_to_all of f32", "rank 0 sends 7 elements to rank 1, which expects 5"}},
      {"child against new_group",
       [](G& g, bool first) -> WorkPtr {
         first ? (void)g.child() : (void)g.new_group({0});
         return nullptr;
       },
       {"child", "new_group"}},
  };
}

void disagree(const Group& g, size_t which) {
  const Mismatch m = mismatches()[which];
  const double begin = ranks::now();
  const std::string text =
      error_of<DistError>([&] { m.call(g.process_group(), g.rank() == 0)->wait(); });
  expect(text, m.parts);
  expect(text, {"ranks disagree", "rank 0 "});
  expect(error_of<DistError>([&] { g.barrier(); }), {"ranks disagree"});
  require(ranks::now() - begin < 2 * ranks::kPatience, "a mismatch took too long");
}

// Rank 1 is late: the error says where it stands, and what the notes say.
void late(const Group& g) {
  const Group ddp(g.process_group().child());
  ddp.process_group().note(std::string(63, 'x'));
  ddp.process_group().note(g.rank() == 1 ? "3 forwards, inside no_sync" : "2 forwards");
  g.process_group().note("of another group");
  ddp.all_reduce(ones({7}));
  if (g.rank() == 1) {
    std::this_thread::sleep_for(std::chrono::milliseconds(800));
    expect(error_of<DistError>([&] { ddp.barrier(); }), {"rank 1 did not arrive"});
    return;
  }
  const WorkPtr w = ddp.all_reduce_async(ones({5}));
  const std::string text = error_of<DistError>([&] { w->wait(Milliseconds(200)); });
  expect(text, {"rank 1 did not arrive within 200 ms", "all_reduce(sum) of f32 [5]",
                "rank 1 last completed all_reduce(sum) of f32 [7], sequence number 1",
                "; rank 0: 2 forwards; rank 1: 3 forwards, inside no_sync"});
  require(text.find("another group") == std::string::npos, "a note of another group");
  require(text.find("xx") == std::string::npos, "an old note");
  require(w->exception() != nullptr && w->is_completed(), "a failed work is over");
}

void outcome(const Group& g) {
  ProcessGroup& pg = g.process_group();
  const Tensor t = full({3}, g.rank() + 1.0);
  const WorkPtr w = pg.all_reduce(t);
  int ran = 0;
  w->then([&] {
    ++ran;
    w->wait();  // complete: asking again is allowed
  });
  w->wait(std::chrono::seconds(20));
  require(ran == 1, "then did not run before wait returned");
  w->then([&] { ++ran; });
  w->wait();
  require(ran == 2, "then of a work that was complete");
  require(w->result().size() == 1 && w->result()[0].is_same(t), "result");
  w->synchronize();
  require(ran == 2, "then ran again");
}

}  // namespace

TEST_CASE("both sides of a mismatch on every rank") {
  for (size_t which = 0; which < mismatches().size(); ++which) {
    CAPTURE(mismatches()[which].name);
    run_local(3, [&](Group g) { disagree(g, which); });
    CHECK(ranks::failures(ranks::run_ranks(
              3, "rank: mismatch", {.variables = {{"WHICH", std::to_string(which)}}})) == "");
  }
}
TEST_CASE("rank: mismatch" * doctest::skip()) {
  disagree(init(), static_cast<size_t>(std::atoi(std::getenv("WHICH"))));
}

TEST_CASE("a deadline quotes where the late rank stands, and the notes") {
  run_local(2, late);
  CHECK(ranks::failures(ranks::run_ranks(2, "rank: late with notes")) == "");
}
TEST_CASE("rank: late with notes" * doctest::skip()) { late(init()); }

TEST_CASE("a death quotes the notes") {
  const auto ended = ranks::run_ranks(2, "rank: dies with a note");
  INFO(ended[0].output);
  CHECK(ended[0].code == 0);
  CHECK(ended[1].signal == SIGKILL);
}
TEST_CASE("rank: dies with a note" * doctest::skip()) {
  const Group g = init();
  g.process_group().note(g.rank() == 1 ? "step 12" : "");
  g.barrier();
  if (g.rank() == 1) raise(SIGKILL);
  expect(error_of<DistError>([&] { g.all_gather(ones({2})); }),
         {"rank 1 (pid ", "died", "; rank 1: step 12"});
}

TEST_CASE("then runs before wait returns, and a work has its outputs") {
  for (const int size : {1, 2, 3}) run_local(size, outcome);
  outcome(Group());
}
