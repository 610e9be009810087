// init, use, shutdown and init again in one process: any number of rounds, over every backend, with
// other world sizes, timeouts and backends from round to round; and a round that fails does not
// spoil the next.
#include <doctest/doctest.h>

#include <cstdlib>
#include <thread>

#include <lockstep/lockstep.h>

#include "backends.h"
#include "texts.h"

using namespace lockstep;
using namespace lockstep::dist;
using ranks::require;

namespace {

void set(const char* name, int value) { setenv(name, std::to_string(value).c_str(), 1); }

// One round on the group of all ranks and on one made from it; some rank always leaves late.
void round(const std::string& backend, int size, int number) {
  Group g = init({.backend = backend, .timeout = Milliseconds(20000 + number)});
  require(g.size() == size, "the size of this round");
  const Tensor t = full({100}, g.rank() + 1.0);
  g.all_reduce(t);
  require(t.data<float>()[3] == static_cast<float>(size * (size + 1) / 2), "all_reduce");
  if (number % 3 == 0) Group(g.process_group().child()).barrier();
  if (g.rank() == number % size) std::this_thread::sleep_for(Milliseconds(40));
  if (number % 2 == 0) g.destroy();  // else its last handle's destructor does
  set_default_group(nullptr, 0);
}

}  // namespace

TEST_CASE("rank: rounds" * doctest::skip()) {
  const std::string backend = std::getenv("TEST_BACKEND");
  int first = 0;
  for (int i = 0; i < 12; ++i) {
    round(backend, 3, i);
    if (i == 2) first = ranks::open_descriptors();
  }
  require(ranks::open_descriptors() <= first,
          str_cat("descriptors: ", first, ", at last ", ranks::open_descriptors()));
}
TEST_CASE("any number of rounds") {
  for (const std::string& backend : backends::all()) {
    CAPTURE(backend);
    CHECK(ranks::failures(backends::run(backend, 3, "rank: rounds", {.deadline = 40})) == "");
  }
}

// Rank 2 sits out every second round, and is at the next one long before the others.
TEST_CASE("rank: other sizes" * doctest::skip()) {
  const std::string backend = std::getenv("TEST_BACKEND");
  const int rank = std::atoi(std::getenv("RANK"));
  for (int i = 0; i < 6; ++i) {
    const int size = i % 2 ? 2 : 3;
    if (rank >= size) continue;
    set("WORLD_SIZE", size);
    set("TORCHELASTIC_RESTART_COUNT", i);
    if (backend != "shm+gloo") set("LOCAL_WORLD_SIZE", size);
    if (backend == "shm+gloo" && rank < 2) set("LOCAL_WORLD_SIZE", 2);
    round(backend, size, i);
  }
}
TEST_CASE("other world sizes between rounds") {
  for (const std::string& backend : backends::all()) {
    CAPTURE(backend);
    CHECK(ranks::failures(backends::run(backend, 3, "rank: other sizes", {.deadline = 40})) == "");
  }
}

// Backends and groups of threads follow each other, with what is in between.
TEST_CASE("rank: other backends" * doctest::skip()) {
  for (int i = 0; i < 2; ++i) {
    for (const std::string& backend : backends::all())
      if (backend != "shm+gloo") round(backend, 3, i);
    run_local(2, [](const Group& g) { g.barrier(); });
    require(default_group().size() == 1, "no group is left");
  }
}
TEST_CASE("other backends between rounds") {
  CHECK(ranks::failures(backends::run("gloo", 3, "rank: other backends", {.deadline = 40})) == "");
}

// The first round ends in an error, of a peer's abort, or of a rank that does not come.
TEST_CASE("rank: after a failure" * doctest::skip()) {
  const std::string backend = std::getenv("TEST_BACKEND");
  const int rank = std::atoi(std::getenv("RANK"));
  {
    const Group g = init({.backend = backend});
    if (rank == 1) {
      g.process_group().abort("on purpose");
    } else {
      expect(error_of<DistError>([&] {
               for (;;) g.barrier();
             }),
             {"on purpose"});
    }
    set_default_group(nullptr, 0);
  }
  round(backend, 3, 1);
  if (rank != 2)
    expect(error_of<DistError>(
               [&] { init({.backend = backend, .join_timeout = Milliseconds(1200)}); }),
           {"rank 2", "missing"});
  else
    std::this_thread::sleep_for(Milliseconds(2600));  // longer than the others try
  round(backend, 3, 2);
}
TEST_CASE("a round after one that failed") {
  for (const std::string& backend : backends::all()) {
    CAPTURE(backend);
    CHECK(ranks::failures(backends::run(backend, 3, "rank: after a failure", {.deadline = 40})) ==
          "");
  }
}
