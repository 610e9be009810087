// Groups of some ranks: who is in them, that all of a group works in them (without rank 0, nested,
// with children and memory of their own), and what is said when the lists differ.
#include <doctest/doctest.h>

#include <lockstep/distributed/local.h>

#include "exchanges.h"

using namespace lockstep;
using namespace lockstep::dist;
using ranks::require;

namespace {

// Every kind once, and a reduction in memory of the group.
void check_works(const Group& g, int64_t salt) {
  ProcessGroup& pg = g.process_group();
  const auto make = [](DType t) { return new_tensor({30011}, t); };
  for (const CollectiveKind kind : kKinds) {
    if (kind == CollectiveKind::recv || (kind == CollectiveKind::send && g.size() == 1)) continue;
    for (const int root : {0, g.size() - 1})
      start(pg, {kind, DType::f32, make, ReduceOp::sum, root, (root + 1) % g.size(), ++salt})
          .finish();
  }
  const auto storage = pg.allocate(50000 * 4);
  const auto in_it = [storage](DType t) {
    return from_blob(storage->data(), {50000}, {.dtype = t}, [storage] {});
  };
  start(pg, {CollectiveKind::all_reduce, DType::f32, in_it, ReduceOp::avg, 0, 0, salt}).finish();
  pg.post(1, std::as_bytes(std::span(&salt, 1)));
  const auto records = pg.collect(1);
  require(records.size() == static_cast<size_t>(g.size()), "records");
  for (const auto& r : records)
    require(std::memcmp(r.data(), &salt, sizeof salt) == 0, "a record of another group");
}

void check_groups(const Group& g) {
  const std::vector<std::vector<int>> lists{{1, 2}, {0, 2}, {3, 1, 0}, {2}, {}, {3, 2, 1, 0}};
  std::vector<std::optional<Group>> groups;
  for (const auto& list : lists) {
    groups.push_back(g.new_group(list));
    const auto at = std::find(list.begin(), list.end(), g.rank());
    require(groups.back().has_value() == (at != list.end()), "membership");
    if (!groups.back()) continue;
    require(groups.back()->size() == static_cast<int>(list.size()), "size");
    require(groups.back()->rank() == at - list.begin(), "rank");
    require(groups.back()->backend() == g.backend(), "backend");
  }
  // Each rank through its own groups at its own pace.
  for (size_t k = 0; k < groups.size(); ++k)
    if (groups[k]) check_works(*groups[k], static_cast<int64_t>(100 * k));
  // Of a group that lacks rank 0 and has its own order: a child, and a group of some of its ranks.
  if (const auto& three = groups[2]) {
    const Group child(three->process_group().child());
    require(child.rank() == three->rank() && child.size() == 3, "child");
    check_works(child, 1000);
    const auto inner = three->new_group({2, 0});  // ranks 0 and 3 of the whole
    require(inner.has_value() == (g.rank() != 1), "the inner group's members");
    if (inner) {
      require(inner->rank() == (g.rank() == 0 ? 0 : 1), "the inner group's rank");
      check_works(*inner, 2000);
    }
  }
  g.barrier();
  for (auto& one : groups)
    if (one) one->destroy();
  check_works(g, 3000);
}

void check_refusals(const Group& g) {
  const auto differ = error_of<DistError>([&] {
    g.new_group(g.rank() == 2 ? std::vector<int>{0, 2} : std::vector<int>{0, 1});
  });
  expect(differ, {"new_group: ranks disagree", "rank 0 listed {0, 1}", "rank 2 listed {0, 2}"});
  expect(
      error_of<DistError>([&] { g.new_group(std::vector<int>(static_cast<size_t>(g.rank()), 0)); }),
      {"rank 0 listed {}", "rank 1 listed {0}"});
  // One rank's mistake is the difference, and every rank's error.
  expect(error_of<DistError>([&] {
           g.new_group(g.rank() == 1 ? std::vector<int>{0, 9} : std::vector<int>{0, 1});
         }),
         {"rank 1 listed {0, 9}"});
  expect(error_of<ValueError>([&] { g.new_group({0, 9}); }), {"got 9", "0 .. "});
  expect(error_of<ValueError>([&] { g.new_group({1, 1}); }), {"rank 1 is listed twice"});
  expect(error_of<ValueError>([&] { g.new_group({0, 1, 2, 3, 4, 0}); }), {"new_group"});
  g.barrier();  // the group goes on
}

// An error names the ranks by the group's own numbers and the job's.
void check_absence(const Group& g) {
  const auto pair = g.new_group({3, 1});
  if (g.rank() == 3) pair->destroy();
  if (g.rank() == 1)
    expect(error_of<DistError>([&] { pair->barrier(); }),
           {"rank 0 of this group, rank 3 of the job, has left"});
  g.barrier();
}

void check_all(const Group& g) {
  check_groups(g);
  check_refusals(g);
  check_absence(g);
}

}  // namespace

TEST_CASE("groups of threads") {
  for (const int size : {4, 5}) run_local(size, check_all);
}
TEST_CASE("groups of ranks as processes") {
  CHECK(ranks::failures(ranks::run_ranks(4, "rank: groups", {.deadline = 60})) == "");
}
TEST_CASE("rank: groups" * doctest::skip()) {
  const int before = ranks::open_descriptors();
  {
    const Group g = init();
    check_all(g);
    g.destroy();
    set_default_group(nullptr, 0);
  }
  CHECK(ranks::open_descriptors() == before);
}

TEST_CASE("a rank that dies is noticed in its groups alone") {
  const auto ended = ranks::run_ranks(4, "rank: dies in a group");
  CHECK(ended[3].signal == SIGKILL);
  for (const size_t r : {0, 1, 2}) {
    INFO(ended[r].output);
    CHECK(ended[r].code == 0);
  }
}
TEST_CASE("rank: dies in a group" * doctest::skip()) {
  const Group g = init();
  const auto safe = g.new_group({2, 0, 1}), doomed = g.new_group({1, 3});
  if (g.rank() == 3) raise(SIGKILL);
  const double begin = ranks::now();
  if (g.rank() == 1) {
    // While it waits for the first member's memory, and in a collective.
    expect(error_of<DistError>([&] { doomed->process_group().allocate(1000); }),
           {"rank 1 of this group, rank 3 of the job, (pid ", "died"});
    require(ranks::now() - begin < 2 * ranks::kPatience, "noticed too late");
  }
  check_works(*safe, 1);
}
