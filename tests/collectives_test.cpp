// What a group does beside the kinds of collectives that exchanges_test looks at: parts of its
// memory, records, children, stress, refusals; on ranks that are threads (local), processes (shm)
// and alone. And how groups begin and end: backends by name, failing threads, sockets that are left.
#include <doctest/doctest.h>

#include <deque>
#include <random>

#include <lockstep/distributed/local.h>
#include <lockstep/distributed/registry.h>
#include <lockstep/distributed/shm/rendezvous.h>
#include <lockstep/tensor/random.h>

#include "exchange_checks.h"

using namespace lockstep;
using namespace lockstep::dist;
using ranks::require;

namespace {

// Buckets: parts of one piece of memory under way at once.
void check_parts(const Group& g) {
  ProcessGroup& pg = g.process_group();
  constexpr int64_t n = 100003;
  const Ref<Storage> storage = pg.allocate(n * 4);
  require(storage->bytes() == n * 4, "allocate: bytes");
  require(pg.allocate(0)->bytes() == 0, "allocate: nothing");
  const Tensor whole = from_blob(storage->data(), {n}, {}, [storage] {});
  fill<float>(whole, [&](int64_t i) { return value<float>(g.rank(), i); });
  std::vector<WorkPtr> works;
  for (int64_t at = 0; at < n; at += 9001)
    works.push_back(pg.all_reduce(whole.narrow(0, at, std::min<int64_t>(9001, n - at))));
  for (const WorkPtr& w : works) w->wait();
  check_elements<float>(
      whole, [&](int64_t i) { return expected<float>(ReduceOp::sum, g.size(), i); },
      "allocated, in parts");
}

void check_records(const Group& g) {
  ProcessGroup& pg = g.process_group();
  for (uint64_t epoch = 1; epoch < 50; ++epoch) {
    std::vector<std::byte> record((epoch * 131 + static_cast<uint64_t>(g.rank()) * 7) % 4097,
                                  std::byte(epoch + 3 * g.rank()));
    pg.post(epoch, record);
    const auto all = pg.collect(epoch);
    require(static_cast<int>(all.size()) == g.size(), "collect: size");
    for (int r = 0; r < g.size(); ++r) {
      const auto& theirs = all[static_cast<size_t>(r)];
      require(theirs.size() == (epoch * 131 + static_cast<uint64_t>(r) * 7) % 4097,
              "collect: bytes");
      for (const std::byte b : theirs) require(b == std::byte(epoch + 3 * r), "collect: content");
    }
  }
  const std::vector<std::byte> large(kRecordBytes + 1);
  try {
    pg.post(50, large);
    require(false, "post: took a record that is too large");
  } catch (const ValueError&) {
  }
}

// A child beside its parent, in different orders on the ranks.
void check_child(const Group& g) {
  const auto child = g.process_group().child();
  const Tensor a = full({5}, g.rank() + 1), b = full({70000}, 10 * (g.rank() + 1));
  WorkPtr wa, wb;
  if (g.rank() % 2)
    wa = g.all_reduce_async(a), wb = child->all_reduce(b);
  else
    wb = child->all_reduce(b), wa = g.all_reduce_async(a);
  wa->wait();
  while (!wb->is_completed()) {
  }
  const float sum = static_cast<float>(g.size() * (g.size() + 1) / 2);
  check_elements<float>(
      a, [&](int64_t) { return sum; }, "beside a child");
  check_elements<float>(
      b, [&](int64_t) { return 10 * sum; }, "in a child");
  child->destroy();
}

// The same random sequence on all ranks, with ragged pauses and sizes.
void check_stress(const Group& g) {
  std::mt19937 shared(7), own(static_cast<unsigned>(g.rank()));
  std::deque<Started> under_way;
  const auto finish_first = [&] {
    under_way.front().finish();
    under_way.pop_front();
  };
  for (int k = 0; k < 300; ++k) {
    const int64_t n = shared() % 8 == 0 ? static_cast<int64_t>(shared() % 60000)
                                        : static_cast<int64_t>(shared() % 100);
    if (shared() % 4 == 0) g.barrier();
    const auto make = [n](DType t) { return new_tensor({n}, t); };
    under_way.push_back(start(
        g.process_group(), {CollectiveKind::all_reduce, DType::f32, make, ReduceOp::sum, 0, 0, k}));
    if (own() % 50 == 0) std::this_thread::sleep_for(std::chrono::microseconds(own() % 3000));
    if (own() % 3 == 0) g.process_group().progress();
    while (under_way.size() > own() % 25) finish_first();
  }
  while (!under_way.empty()) finish_first();
}

void check_refusals(const Group& g) {
  const Tensor whole_numbers = ones({2}, {.dtype = DType::i64}), floats = ones({2}),
               truths = ones({2}, {.dtype = DType::boolean});
  const auto reduce = [&](const Tensor& t, ReduceOp op) {
    return error_of<DTypeError>([&] { g.all_reduce(t, op); });
  };
  require(contains(reduce(whole_numbers, ReduceOp::avg), "avg is not defined for i64"),
          "avg of integers");
  require(contains(reduce(floats, ReduceOp::bxor), "bxor is not defined for f32"),
          "bitwise of floats");
  require(contains(reduce(truths, ReduceOp::sum), "sum is not defined for bool"), "sum of bools");
  require(contains(error_of<ValueError>([&] { g.broadcast(floats, g.size()); }), "root"),
          "root out of range");
  require(contains(error_of<ShapeError>([&] {
                     g.all_gather(ones({g.size(), 3}), floats);
                   }),
                   "[2]") ||
              contains(error_of<ShapeError>([&] {
                         g.all_gather(ones({g.size(), 3}), floats);
                       }),
                       "2]"),
          "gather's shape");
  require(contains(error_of<DTypeError>([&] {
                     g.all_gather(ones({g.size(), 2}), whole_numbers);
                   }),
                   "i64"),
          "gather's dtype");
  if (g.size() > 1)
    require(contains(error_of<ValueError>([&] { g.all_reduce(ones({1}).expand({4})); }),
                     "share memory"),
            "expanded");
  g.barrier();  // nobody is out of step
}

void check_all(const Group& g) {
  check_parts(g);
  check_records(g);
  check_async(g);
  check_child(g);
  check_stress(g);
  check_refusals(g);
  require(mean(g.rank(), g) == (g.size() - 1) / 2.0, "mean");
  require(default_group().size() == g.size() && default_group().rank() == g.rank(),
          "default group");
  const data::Shard shard = g;
  require(shard.rank == g.rank() && shard.size == g.size(), "shard");
}

// Whether a socket of any job that this test started is still there.
bool a_meeting_is_left() {
  for (int run = 0; run < ranks::runs; ++run) {
    Environment env;
    env.run_id = ranks::run_id_of(run);
    if (ranks::is_listed(MeetingPoint::of(env, Milliseconds(0)).name)) return true;
  }
  return false;
}

}  // namespace

TEST_CASE("collectives between threads") {
  for (int size = 1; size <= 4; ++size) {
    CAPTURE(size);
    std::atomic<int> ran = 0;
    run_local(size, [&](Group g) {
      require(g.size() == size, "size");
      check_all(g);
      ++ran;
    });
    CHECK(ran == size);
  }
}

TEST_CASE("rank: collectives" * doctest::skip()) {
  const int before = ranks::open_descriptors();
  {
    const Group g = init();
    REQUIRE(g.backend() == "shm");
    check_all(g);
    g.destroy();
    set_default_group(nullptr, 0);
  }
  CHECK(ranks::open_descriptors() == before);
}

TEST_CASE("collectives between ranks as processes") {
  for (const int size : {2, 3}) {
    CAPTURE(size);
    CHECK(ranks::failures(ranks::run_ranks(size, "rank: collectives", {.deadline = 60})) == "");
  }
  CHECK(!a_meeting_is_left());
}

TEST_CASE("a group of one needs no launcher") {
  const Group g = init();
  CHECK(g.backend() == "single");
  CHECK(g.is_main());
  check_all(g);
  set_default_group(nullptr, 0);
}

TEST_CASE("random numbers: each thread has a copy of the caller's generator") {
  manual_seed(11);
  const float mine = rand({1}).item<float>();
  manual_seed(11);
  run_local(2, [&](Group) { require(rand({1}).item<float>() == mine, "not the caller's stream"); });
}

TEST_CASE("the first failure of a thread is rethrown, and the others are freed") {
  const auto run = [] {
    run_local(3, [](Group g) {
      if (g.rank() == 1) throw ValueError("rank 1's own mistake");
      g.barrier();
    });
  };
  const double begin = ranks::now();
  CHECK_THROWS_WITH_AS(run(), "rank 1's own mistake", ValueError);
  CHECK(ranks::now() - begin < 5 * ranks::kPatience);
}

TEST_CASE("a failing thread frees those that wait in a child group") {
  std::string text;
  std::shared_ptr<ProcessGroup>
      children[2];  // they outlive the threads: no destructor says goodbye
  const double begin = ranks::now();
  CHECK_THROWS_AS(run_local(2,
                            [&](Group g) {
                              const auto& child = children[g.rank()] = g.process_group().child();
                              if (g.rank() == 1) throw ValueError("no more");
                              try {
                                child->barrier()->wait();
                              } catch (const DistError& e) {
                                text = e.what();
                                throw;
                              }
                            }),
                  ValueError);
  CHECK(contains(text, "rank 1 failed: no more"));
  CHECK(ranks::now() - begin < 5 * ranks::kPatience);
}

TEST_CASE("backends are found by name") {
  CHECK(contains(error_of<DistError>([] { init({.backend = "carrier-pigeon"}); }),
                 "there are gloo, local, shm, shm+gloo, single"));
  CHECK(contains(error_of<DistError>([] { init({.backend = "local"}); }), "run_local"));
  struct Own {
    static std::shared_ptr<ProcessGroup> make(const Environment& env, const InitOptions& options) {
      Environment one = env;
      return make_group(one, {.backend = "single", .timeout = options.timeout});
    }
  };
  register_backend("own", Own::make);
  CHECK(init({.backend = "own"}).size() == 1);
  set_default_group(nullptr, 0);
}
