// Every kind of collective, sync and async, for every dtype and layout, on ranks that are threads
// (local), processes (shm) and alone (single): the same body everywhere, against a plain reference.
#include <doctest/doctest.h>

#include <lockstep/distributed/local.h>

#include "exchanges.h"

using namespace lockstep;
using namespace lockstep::dist;
using ranks::require;

namespace {

// What a group of this size can be asked to do with one layout; of large ones one reduction and one
// root of each kind, and one dtype of each width.
std::vector<Ask> asks(const Layout& layout, DType dtype, int size) {
  if (layout.large && (dtype == DType::i64 || dtype == DType::i32 || dtype == DType::f16 ||
                       dtype == DType::boolean))
    return {};
  const ReduceOp one = dtype == DType::boolean ? ReduceOp::max : ReduceOp::sum;
  std::vector<Ask> all;
  const int last = size - 1;
  int64_t salt = 0;
  for (const CollectiveKind kind : kKinds) {
    if (kind == CollectiveKind::recv || (kind == CollectiveKind::send && size == 1)) continue;
    // all_to_all makes its own tensors.
    if (kind == CollectiveKind::all_to_all && layout.name != std::string("contiguous")) continue;
    for (const ReduceOp op : kOps) {
      if (!meaningful(op, dtype) || ((layout.large || !reduces(kind)) && op != one)) continue;
      for (int root = layout.large ? last : 0; root < size; root += std::max(1, last))
        all.push_back({kind, dtype, layout.make, op, root, (root + 1) % size, ++salt});
    }
  }
  return all;
}

void check_every_kind(const Group& g) {
  ProcessGroup& pg = g.process_group();
  for (const DType dtype : kDTypes)
    for (const Layout& layout : layouts()) {
      std::vector<Started> under_way;
      for (const Ask& ask : asks(layout, dtype, g.size())) {
        const Started now = start(pg, ask);
        try {
          now.finish();
        } catch (const Error& e) {
          fail<Error>(layout.name, ": ", now.what, ": ", e.what());
        }
        if (!layout.large || dtype == DType::f32) under_way.push_back(start(pg, ask));
      }
      // And all at once, finished from the last to the first.
      for (; !under_way.empty(); under_way.pop_back()) under_way.back().finish();
    }
}

// The forms that take one tensor for all ranks' parts.
void check_whole_tensors(const Group& g) {
  ProcessGroup& pg = g.process_group();
  const int me = g.rank(), size = g.size();
  const auto given = [](int r) { return [=](int64_t i) { return value<float>(r, i); }; };
  const Tensor part = new_tensor({3, 5}, DType::f32);  // [3, 5]
  for (const Shape& shape : {Shape{size, 3, 5}, Shape{3 * size, 5}}) {
    fill<float>(part, given(me));
    const Tensor all = new_tensor(shape, DType::f32);
    const WorkPtr gathered = pg.all_gather(all, part);
    gathered->wait();
    require(gathered->result().size() == static_cast<size_t>(size), "all_gather: result");
    check_elements<float>(
        all, [](int64_t i) { return value<float>(static_cast<int>(i / 15), i % 15); },
        "all_gather into one tensor");
    fill<float>(all, given(me));
    const WorkPtr scattered = pg.reduce_scatter(part, all, ReduceOp::max);
    scattered->wait();
    require(scattered->result()[0].is_same(part), "reduce_scatter: result");
    check_elements<float>(
        part, [&](int64_t i) { return expected<float>(ReduceOp::max, size, me * 15 + i); },
        "reduce_scatter of one tensor");
  }
  // Rank r sends r + 2 d rows to rank d.
  std::vector<int64_t> sends, receives;
  int64_t sent = 0, received = 0, before_me = 0;
  for (int r = 0; r < size; ++r) {
    sends.push_back(me + 2 * r);
    receives.push_back(r + 2 * me);
    sent += sends.back();
    received += receives.back();
  }
  const Tensor input = new_tensor({sent, 4}, DType::f32),
               output = new_tensor({received, 4}, DType::f32);
  fill<float>(input, given(me));
  pg.all_to_all(output, input, receives, sends)->wait();
  for (int r = 0; r < size; ++r) {
    int64_t begin = 0;  // of this rank's rows in rank r's input
    for (int d = 0; d < me; ++d) begin += r + 2 * d;
    check_elements<float>(
        output.narrow(0, before_me, receives[static_cast<size_t>(r)]),
        [&](int64_t i) { return value<float>(r, begin * 4 + i); }, "all_to_all by splits");
    before_me += receives[static_cast<size_t>(r)];
  }
  const Tensor even_in = new_tensor({2 * size}, DType::f32),
               even_out = new_tensor({2 * size}, DType::f32);
  fill<float>(even_in, given(me));
  pg.all_to_all(even_out, even_in)->wait();
  check_elements<float>(
      even_out, [&](int64_t i) { return value<float>(static_cast<int>(i / 2), 2 * me + i % 2); },
      "all_to_all, even");
}

// An expanded tensor can be read by all that reads, and a view of the output be the input.
void check_odd_inputs(const Group& g) {
  const int me = g.rank(), size = g.size(), next = (me + 1) % size, before = (me + size - 1) % size;
  const Tensor five = new_tensor({1, 5}, DType::f32);
  const Tensor wide = five.expand({4, 5});
  fill<float>(five, [&](int64_t i) { return value<float>(me, i); });
  const auto repeated = [](int r) { return [=](int64_t i) { return value<float>(r, i % 5); }; };
  const Tensor all = g.all_gather(wide);
  for (int r = 0; r < size; ++r) check_elements<float>(all[r], repeated(r), "expanded, gathered");
  const Tensor out = new_tensor({4, 5}, DType::f32);
  g.reduce_scatter(out, wide.expand({size, 4, 5}), ReduceOp::min);
  check_elements<float>(
      out, [&](int64_t i) { return expected<float>(ReduceOp::min, size, i % 5); },
      "expanded, reduced");
  if (size > 1) {
    const WorkPtr sent = g.process_group().send(wide, next);
    g.recv(out, before);
    sent->wait();
    check_elements<float>(out, repeated(before), "expanded, sent");
  }
  // In place, in plain memory and in memory of the group.
  const auto storage = g.process_group().allocate(static_cast<size_t>(size) * 9000 * 4);
  for (const bool shared : {false, true}) {
    const Tensor whole = shared ? from_blob(storage->data(), {size, 9000}, {}, [storage] {})
                                : new_tensor({size, 9000}, DType::f32);
    fill<float>(whole[me], [&](int64_t i) { return value<float>(me, i); });
    g.all_gather(whole, whole[me]);
    for (int r = 0; r < size; ++r)
      check_elements<float>(
          whole[r], [&](int64_t i) { return value<float>(r, i); }, "all_gather in place");
    fill<float>(whole, [&](int64_t i) { return value<float>(me, i); });
    g.reduce_scatter(whole[me], whole);
    check_elements<float>(
        whole[me], [&](int64_t i) { return expected<float>(ReduceOp::sum, size, me * 9000 + i); },
        "reduce_scatter in place");
  }
}

// Memory of the group: every kind works from it and into it, with ranks that pass other memory.
void check_allocated(const Group& g) {
  ProcessGroup& pg = g.process_group();
  constexpr int64_t kElements = 100003;
  for (const CollectiveKind kind : kKinds) {
    if (kind == CollectiveKind::recv || (kind == CollectiveKind::send && g.size() == 1)) continue;
    for (const bool mixed : {false, true}) {
      std::vector<Ref<Storage>> parts;  // two tensors of each rank at most lie in shared memory
      for (int k = 0; k < 2; ++k) parts.push_back(pg.allocate(kElements * 4));
      size_t used = mixed && g.rank() % 2 == 1 ? parts.size() : 0;
      const auto make = [&](DType t) {
        if (used == parts.size()) return new_tensor({kElements}, t);
        const Ref<Storage> storage = parts[used++];
        return from_blob(storage->data(), {kElements}, {.dtype = t}, [storage] {});
      };
      start(pg, {kind, DType::f32, make, ReduceOp::sum, g.size() - 1, 0, 5}).finish();
    }
  }
}

void check_all(const Group& g) {
  check_every_kind(g);
  check_whole_tensors(g);
  check_odd_inputs(g);
  check_allocated(g);
  g.barrier();
}

}  // namespace

#ifdef __SANITIZE_THREAD__
constexpr int kMostRanks = 3;  // it takes minutes to look at what five do
#else
constexpr int kMostRanks = 5;
#endif
TEST_CASE("every kind between threads") {
  for (int size = 1; size <= kMostRanks; ++size) {
    CAPTURE(size);
    run_local(size, [](Group g) { check_all(g); });
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
  check_all(g);
}

TEST_CASE("every kind alone") {
  const Group g = init();
  REQUIRE(g.backend() == "single");
  check_all(g);
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
