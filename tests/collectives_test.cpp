// Collectives on ranks that are threads (local) and processes (shm): the same checks run on both.
// Values differ per rank and element, and the expected bits are computed here, in rank order.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <random>

#include <lockstep/distributed/local.h>
#include <lockstep/distributed/registry.h>
#include <lockstep/distributed/shm/rendezvous.h>
#include <lockstep/tensor/random.h>

#include "texts.h"

using namespace lockstep;
using namespace lockstep::dist;
using ranks::require;

namespace {

constexpr ReduceOp kOps[] = {ReduceOp::sum, ReduceOp::avg,  ReduceOp::product, ReduceOp::min,
                             ReduceOp::max, ReduceOp::band, ReduceOp::bor,     ReduceOp::bxor};

bool meaningful(ReduceOp op, DType t) {
  if (is_floating(t)) return op < ReduceOp::band;
  if (t == DType::boolean) return op >= ReduceOp::min;
  return op != ReduceOp::avg;
}

template <class T>
T value(int rank, int64_t i) {
  const uint64_t h = (static_cast<uint64_t>(rank) * 1000003 + static_cast<uint64_t>(i) + 17) *
                         0x9E3779B97F4A7C15u >>
                     40;
  if constexpr (std::is_floating_point_v<T>)
    return static_cast<T>(h % 10007) / T(997) - T(5);
  else if constexpr (std::is_same_v<T, bool>)
    return h % 3 == 0;
  else
    return static_cast<T>(h);
}

// Combines in the element's own type, one rank after the other.
template <class T>
T expected(ReduceOp op, int size, int64_t i) {
  T x = value<T>(0, i);
  for (int r = 1; r < size; ++r) {
    const T y = value<T>(r, i);
    switch (op) {
      case ReduceOp::sum:
      case ReduceOp::avg:
        x = static_cast<T>(x + y);
        break;
      case ReduceOp::product:
        if constexpr (std::is_floating_point_v<T>)
          x = x * y;
        else
          x = static_cast<T>(static_cast<uint64_t>(x) * static_cast<uint64_t>(y));
        break;
      case ReduceOp::min:
        x = std::min(x, y);
        break;
      case ReduceOp::max:
        x = std::max(x, y);
        break;
      default:
        if constexpr (std::is_integral_v<T>)
          x = static_cast<T>(op == ReduceOp::band ? x & y : op == ReduceOp::bor ? x | y : x ^ y);
    }
  }
  if (op == ReduceOp::avg) x = static_cast<T>(x * static_cast<T>(1.0 / size));
  return x;
}

// A tensor of a layout: [n elements in it] and what must stay as it is around it.
struct Case {
  const char* name;
  std::function<Tensor(DType)> make;  // the tensor; its storage is filled with 1 where it has gaps
};
std::vector<Case> cases() {
  const auto ones_of = [](const Shape& shape, DType t) { return ones(shape, {.dtype = t}); };
  return {
      {"one element", [=](DType t) { return ones_of({1}, t); }},
      {"0-d", [=](DType t) { return ones_of({}, t); }},
      {"empty",
       [=](DType t) {
         return ones_of({3, 0, 2}, t);
       }},
      {"contiguous",
       [=](DType t) {
         return ones_of({7, 13}, t);
       }},
      {"transposed",
       [=](DType t) {
         return ones_of({9, 14}, t).transpose(0, 1);
       }},
      {"sliced",
       [=](DType t) {
         return ones_of({6, 40}, t).slice(1, {3, 37, 3});
       }},
      {"offset rows",
       [=](DType t) {
         return ones_of({8, 5, 6}, t).narrow(0, 2, 3).permute({2, 0, 1});
       }},
      {"several chunks",
       [=](DType t) {
         return ones_of({3, 33333}, t);
       }},
      {"several chunks transposed",
       [=](DType t) {
         return ones_of({257, 301}, t).transpose(0, 1);
       }},
  };
}

template <class T, class F>
void fill(const Tensor& t, F f) {
  Tensor dense = empty(t.shape(), {.dtype = t.dtype()});
  T* p = dense.data<T>();
  for (int64_t i = 0; i < t.numel(); ++i) p[i] = f(i);
  Tensor(t).copy_(dense);
}

template <class T, class F>
void check_elements(const Tensor& t, F f, const std::string& what) {
  const Tensor dense = t.contiguous();
  const T* p = dense.data<T>();
  for (int64_t i = 0; i < t.numel(); ++i)
    if (p[i] != f(i)) fail<Error>(what, ": element ", i, " is ", p[i], ", not ", f(i));
}

// Elements of the whole storage that the view does not name must still be 1.
template <class T>
void check_gaps(const Tensor& t, const std::string& what) {
  const auto total = static_cast<int64_t>(t.storage().bytes() / sizeof(T));
  const Tensor whole = from_blob(t.storage().data(), {total}, {.dtype = t.dtype()});
  Tensor(t).fill_(1);
  check_elements<T>(
      whole.narrow(0, 0, std::min(total, t.numel())), [](int64_t) { return T(1); },
      what + ", its neighbours");
}

void check_all_reduce(const Group& g, DType dtype) {
  dispatch("test", dtype, [&]<class T>(TypeTag<T>) {
    for (const Case& c : cases())
      for (const ReduceOp op : kOps) {
        if (!meaningful(op, dtype)) continue;
        const std::string what =
            str_cat("all_reduce(", name_of(op), ") of ", dtype, ", ", c.name, ", rank ", g.rank());
        const Tensor t = c.make(dtype);
        fill<T>(t, [&](int64_t i) { return value<T>(g.rank(), i); });
        g.all_reduce(t, op);
        check_elements<T>(
            t, [&](int64_t i) { return expected<T>(op, g.size(), i); }, what);
        check_gaps<T>(t, what);
      }
  });
}

void check_broadcast_and_gather(const Group& g, DType dtype) {
  dispatch("test", dtype, [&]<class T>(TypeTag<T>) {
    for (const Case& c : cases()) {
      for (int root = 0; root < g.size(); ++root) {
        const std::string what =
            str_cat("broadcast of ", dtype, ", ", c.name, " from ", root, " on ", g.rank());
        const Tensor t = c.make(dtype);
        fill<T>(t, [&](int64_t i) { return value<T>(g.rank(), i); });
        g.broadcast(t, root);
        check_elements<T>(
            t, [&](int64_t i) { return value<T>(root, i); }, what);
        check_gaps<T>(t, what);
      }
      const Tensor input = c.make(dtype);
      fill<T>(input, [&](int64_t i) { return value<T>(g.rank(), i); });
      const Tensor output = g.all_gather(input);
      for (int r = 0; r < g.size(); ++r)
        check_elements<T>(
            output.select(0, r), [&](int64_t i) { return value<T>(r, i); },
            str_cat("all_gather of ", dtype, ", ", c.name));
    }
  });
}

void check_everything(const Group& g) {
  for (const DType t :
       {DType::f32, DType::f64, DType::i64, DType::i32, DType::u8, DType::boolean}) {
    check_all_reduce(g, t);
    check_broadcast_and_gather(g, t);
  }
  g.barrier();
}

// Memory from allocate(): reduced where it is, alone and together with ranks that pass other
// memory.
void check_allocated(const Group& g) {
  ProcessGroup& pg = g.process_group();
  constexpr int64_t n = 100003;
  const Ref<Storage> storage = pg.allocate(n * 4);
  require(storage->bytes() == n * 4, "allocate: bytes");
  const Tensor whole = from_blob(storage->data(), {n}, {}, [storage] {});
  const Tensor other = empty({n});
  for (const bool mixed : {false, true})
    for (const ReduceOp op : {ReduceOp::sum, ReduceOp::avg, ReduceOp::max}) {
      const Tensor t = mixed && g.rank() % 2 == 1 ? other : whole;
      fill<float>(t, [&](int64_t i) { return value<float>(g.rank(), i); });
      g.all_reduce(t, op);
      check_elements<float>(
          t, [&](int64_t i) { return expected<float>(op, g.size(), i); },
          str_cat("allocated, mixed ", mixed));
    }
  // Buckets: parts of it under way at once.
  fill<float>(whole, [&](int64_t i) { return value<float>(g.rank(), i); });
  std::vector<WorkPtr> works;
  for (int64_t at = 0; at < n; at += 9001)
    works.push_back(pg.all_reduce(whole.narrow(0, at, std::min<int64_t>(9001, n - at))));
  for (const WorkPtr& w : works) w->wait();
  check_elements<float>(
      whole, [&](int64_t i) { return expected<float>(ReduceOp::sum, g.size(), i); },
      "allocated, in parts");
  // From and to it.
  const int last = g.size() - 1;
  fill<float>(whole, [&](int64_t i) { return value<float>(g.rank(), i); });
  g.broadcast(whole, last);
  check_elements<float>(
      whole, [&](int64_t i) { return value<float>(last, i); }, "allocated, broadcast");
  fill<float>(whole, [&](int64_t i) { return value<float>(g.rank(), i); });
  const Tensor gathered = g.all_gather(whole);
  for (int r = 0; r < g.size(); ++r)
    check_elements<float>(
        gathered[r], [&](int64_t i) { return value<float>(r, i); }, "allocated, all_gather");
  require(pg.allocate(0)->bytes() == 0, "allocate: nothing");
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
  const std::vector<std::byte> large(4097);
  try {
    pg.post(50, large);
    require(false, "post: took a record that is too large");
  } catch (const ValueError&) {
  }
}

// Many under way, waited for in another order; a child beside its parent, in different orders on
// the ranks.
void check_async(const Group& g) {
  std::vector<Tensor> tensors;
  std::vector<WorkPtr> works;
  int notified = 0;
  for (int k = 0; k < 40; ++k) {
    tensors.push_back(empty({1 + k * 977}));
    fill<float>(tensors.back(), [&](int64_t i) { return value<float>(g.rank(), i + k); });
    works.push_back(g.all_reduce_async(tensors.back()));
    works.back()->then([&] { ++notified; });
  }
  for (int k = 39; k >= 0; --k) works[static_cast<size_t>(k)]->wait();
  require(notified == 40, "then: ran " + std::to_string(notified) + " times, not 40");
  for (int k = 0; k < 40; ++k)
    check_elements<float>(
        tensors[static_cast<size_t>(k)],
        [&](int64_t i) { return expected<float>(ReduceOp::sum, g.size(), i + k); }, "async");
  for (size_t k = 1; k < works.size(); ++k)
    require(works[k]->sequence_number() == works[k - 1]->sequence_number() + 1, "sequence numbers");

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
  std::vector<std::pair<WorkPtr, Tensor>> under_way;
  std::vector<int64_t> salts;
  const auto finish_first = [&] {
    under_way.front().first->wait();
    const int64_t salt = salts.front();
    check_elements<float>(
        under_way.front().second,
        [&](int64_t i) { return expected<float>(ReduceOp::sum, g.size(), i + salt); }, "stress");
    under_way.erase(under_way.begin());
    salts.erase(salts.begin());
  };
  for (int k = 0; k < 300; ++k) {
    const int64_t n = shared() % 8 == 0 ? static_cast<int64_t>(shared() % 60000)
                                        : static_cast<int64_t>(shared() % 100);
    const unsigned kind = shared() % 4;
    if (kind == 0) g.barrier();
    const Tensor t = empty({n});
    fill<float>(t, [&](int64_t i) { return value<float>(g.rank(), i + k); });
    under_way.emplace_back(g.all_reduce_async(t), t);
    salts.push_back(k);
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
  check_everything(g);
  check_allocated(g);
  check_records(g);
  check_async(g);
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
