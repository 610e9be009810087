// Every kind of collective, sync and async, for every dtype and layout, on ranks that are threads
// (local), processes (shm) and alone (single): the same body everywhere, against a plain reference.
#include <doctest/doctest.h>

#include <lockstep/distributed/local.h>

#include "exchange_checks.h"

using namespace lockstep;
using namespace lockstep::dist;
using ranks::require;

// Sanitizers take minutes to look at all that five ranks do.
#if defined(__SANITIZE_THREAD__)
constexpr int kMostRanks = 3;
const Scope kScope{.dtypes = {DType::f32, DType::bf16}};
#elif defined(__SANITIZE_ADDRESS__)
constexpr int kMostRanks = 3;
const Scope kScope;
#else
constexpr int kMostRanks = 5;
const Scope kScope;
#endif
TEST_CASE("every kind between threads") {
  for (int size = 1; size <= kMostRanks; ++size) {
    CAPTURE(size);
    run_local(size, [](Group g) { check_exchanges(g, kScope); });
  }
}

TEST_CASE("every kind between ranks as processes") {
  for (const int size : {2, 5}) {
    CAPTURE(size);
    CHECK(ranks::failures(ranks::run_ranks(size, "rank: every kind", {.deadline = 90})) == "");
  }
}
TEST_CASE("rank: every kind" * doctest::skip()) {
  const Group g = init();
  REQUIRE(g.backend() == "shm");
  check_exchanges(g);
}

TEST_CASE("every kind alone") {
  const Group g = init();
  REQUIRE(g.backend() == "single");
  check_exchanges(g, kScope);
  set_default_group(nullptr, 0);
}

TEST_CASE("f16 and bf16 are summed in f32 and rounded once") {
  // In f16, 2048 + 1 + 1 would stay 2048: each sum rounds to even. 0x6800 is 2048, 0x3C00 is 1.
  run_local(3, [](Group g) {
    const Tensor t = new_tensor({1}, DType::f16), b = new_tensor({1}, DType::bf16);
    *static_cast<uint16_t*>(t.data_ptr()) = g.rank() == 0 ? 0x6800 : 0x3C00;
    // The same with 256 and 1, whose bf16 are 0x4380 and 0x3F80.
    *static_cast<uint16_t*>(b.data_ptr()) = g.rank() == 0 ? 0x4380 : 0x3F80;
    g.all_reduce(t);
    g.all_reduce(b);
    require(*static_cast<uint16_t*>(t.data_ptr()) == 0x6801, "f16: 2050");
    require(*static_cast<uint16_t*>(b.data_ptr()) == 0x4381, "bf16: 258");
  });
}

TEST_CASE("what makes no sense throws on the caller, and nobody is out of step") {
  const auto body = [](const Group& g) {
    ProcessGroup& pg = g.process_group();
    const int size = g.size();
    const Tensor two = ones({2}), three = ones({3}), whole = ones({2}, {.dtype = DType::i64});
    const std::vector<Tensor> twos(static_cast<size_t>(size), two);
    expect(error_of<ValueError>([&] { pg.reduce(two, size); }), {"reduce: the root", "got"});
    expect(error_of<ValueError>([&] { pg.send(two, g.rank()); }), {"send", "itself"});
    expect(error_of<ValueError>([&] { pg.recv(two, -1); }), {"recv", "-1"});
    expect(error_of<ValueError>([&] { pg.scatter(two, {}, g.rank()); }), {"scatter", "one input"});
    expect(error_of<ValueError>([&] {
             pg.gather({two, two, two, two, two, two}, two, g.rank());
           }),
           {"gather", "one output"});
    expect(error_of<ShapeError>([&] { pg.scatter(three, twos, g.rank()); }), {"[2]", "[3]"});
    expect(error_of<DTypeError>([&] { pg.reduce_scatter(whole, twos); }), {"f32", "i64"});
    expect(error_of<DTypeError>([&] { pg.reduce(whole, 0, ReduceOp::avg); }), {"avg"});
    expect(error_of<ShapeError>([&] { pg.all_to_all(ones({5}), ones({size}), {9}, {}); }),
           {"all_to_all", "splits"});
    if (size > 1)
      expect(error_of<ValueError>([&] {
               pg.all_gather(ones({2}).expand({size, 2}), two);
             }),
             {"share memory"});
    expect(error_of<ValueError>([&] { pg.note(std::string(64, 'x')); }), {"63"});
    g.barrier();
  };
  run_local(3, body);
}
