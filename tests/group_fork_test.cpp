// A rank that forks while groups, a store, loader workers and threads exist. The child ends in
// every way, uses what it must not use, or lives on when its parent dies: the parent, its group and
// its peers notice nothing of the child, and the parent's death at once.
#include <doctest/doctest.h>

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>

#include <lockstep/distributed/store.h>
#include <lockstep/lockstep.h>

#include "backends.h"
#include "texts.h"

using namespace lockstep;
using namespace lockstep::dist;
using ranks::require;

namespace {

double computed() { return exp(full({400000}, 0.5)).sum().item<double>(); }

void agree(const Group& g, int64_t n = 300) {
  const Tensor t = full({n}, g.rank() + 1.0);
  g.all_reduce(t);
  const double sum = g.size() * (g.size() + 1) / 2.0;
  require(t.sum().item<double>() == sum * static_cast<double>(n), "all_reduce");
}

// Waits for a child, and kills one that hangs.
int end_of(pid_t child) {
  for (int i = 0; i < 1000 * ranks::kPatience; ++i) {
    int status = 0;
    if (waitpid(child, &status, WNOHANG) == child) return status;
    usleep(10'000);
  }
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  throw std::runtime_error("the child hangs");
}

// The child's exit code is 0 where each call is refused at once, as one of a child.
void use_everything(const Group& g, Store& store, const WorkPtr& under_way) {
  const auto refused = [](const std::function<void()>& f) {
    expect(error_of<DistError>(f), {"forked child"});
  };
  const double begin = ranks::now();
  refused([&] { g.all_reduce(ones({3})); });
  refused([&] { g.barrier(); });
  refused([&] { g.new_group({0, 1}); });
  refused([&] { g.process_group().child(); });
  refused([&] { g.process_group().allocate(64); });
  refused([&] { under_way->wait(); });
  refused([&] { under_way->is_completed(); });
  refused([&] { store.get("key"); });
  refused([&] { store.set("key", "child"); });
  g.process_group().note("of a child");
  g.process_group().abort("by a child");
  g.destroy();
  require(computed() > 0, "a child cannot compute");
  Group alone;
  agree(alone);
  ranks::below(begin, 2, "being refused");
}

struct Ends {
  std::string name;
  std::function<void(const Group&, Store&, const WorkPtr&)> child;
  int signal = 0, code = 0;  // how it must end
};

std::vector<Ends> ends() {
  return {
      {"exit", [](auto&, auto&, auto&) { std::exit(0); }},
      {"_exit", [](auto&, auto&, auto&) { _exit(7); }, 0, 7},
      {"exec", [](auto&, auto&, auto&) { execl("/bin/true", "true", nullptr); }},
      {"killed", [](auto&, auto&, auto&) { raise(SIGKILL); }, SIGKILL},
      {"use",
       [](const Group& g, Store& s, const WorkPtr& w) {
         use_everything(g, s, w);
         std::exit(0);
       }},
      {"unwind",
       [](const Group& g, auto&, auto&) {
         try {
           const Group own = g;
           throw 1;
         } catch (int) {
         }
         std::exit(0);
       }},
      {"a grandchild",
       [](const Group& g, Store& s, const WorkPtr& w) {
         const pid_t child = fork();
         if (child == 0) {
           use_everything(g, s, w);
           std::exit(0);
         }
         std::exit(end_of(child));
       }},
  };
}

}  // namespace

TEST_CASE("rank: children end" * doctest::skip()) {
  set_num_threads(2);
  const double sum = computed();  // starts the pool
  Group g = backends::join();
  const Group child_group(g.process_group().child());
  Store store({.port = 0, .rank = 0, .size = 1, .run_id = "own"});
  store.set("key", "parent");
  agree(g);
  for (const Ends& e : ends()) {
    const Tensor t = full({200000}, 1.0);
    // One that no child may complete, or fail.
    const WorkPtr under_way = child_group.all_reduce_async(t);
    const pid_t child = g.rank() == 0 ? fork() : 1;
    if (child == 0) {
      try {
        e.child(g, store, under_way);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "child, %s: %s\n", e.name.c_str(), error.what());
      }
      _exit(99);
    }
    if (g.rank() == 0) {
      const int status = end_of(child);
      require(e.signal ? WIFSIGNALED(status) && WTERMSIG(status) == e.signal
                       : WIFEXITED(status) && WEXITSTATUS(status) == e.code,
              str_cat("child, ", e.name, ": status ", status));
    }
    under_way->wait();
    require(t.data<float>()[7] == static_cast<float>(g.size()), "what was under way");
    for (int i = 0; i < 20; ++i) agree(g, 1 + 5000 * i);
    agree(child_group);
    require(store.get("key") == "parent", "the store");
    require(computed() == sum, "the pool");
  }
  g.destroy();
}
TEST_CASE("a child may end in any way") {
  for (const std::string& backend : backends::all()) {
    CAPTURE(backend);
    CHECK(ranks::failures(backends::run(backend, 3, "rank: children end", {.deadline = 60})) == "");
  }
}

// The child goes back through the test's frames, with all that lives on its stack, and out of main.
TEST_CASE("rank: returns from main" * doctest::skip()) {
  set_num_threads(2);
  computed();
  const Group g = backends::join();
  data::Loader loader{data::TensorDataset{zeros({1000, 4})}, {.batch_size = 10, .workers = 2}};
  auto epoch = loader.epoch(0);
  auto batch = epoch.begin();
  agree(g);
  const pid_t child = g.rank() == 0 ? fork() : 1;
  if (child == 0) return;
  if (g.rank() == 0) {
    const int status = end_of(child);
    require(WIFEXITED(status) && WEXITSTATUS(status) == 0, str_cat("status ", status));
  }
  for (int i = 0; i < 20; ++i) agree(g);
  int64_t batches = 0;
  for (; batch != epoch.end(); ++batch) ++batches;
  require(batches == 100, str_cat(batches, " batches"));
}
TEST_CASE("a child may return from main") {
  for (const std::string& backend : backends::all()) {
    CAPTURE(backend);
    CHECK(ranks::failures(backends::run(backend, 2, "rank: returns from main")) == "");
  }
}

// Its child lives for as long as the test lets it.
TEST_CASE("rank: dies before its child" * doctest::skip()) {
  const Group g = backends::join();
  agree(g);
  if (g.rank() == std::atoi(std::getenv("TEST_VICTIM"))) {
    if (fork() == 0) {
      fclose(stdout);
      for (const double begin = ranks::now(); ranks::now() - begin < 8 * ranks::kPatience;)
        usleep(50'000);
      _exit(0);
    }
    raise(SIGKILL);
  }
  const double begin = ranks::now();
  const std::string text = error_of<DistError>([&] {
    for (;;) agree(g);
  });
  ranks::below(begin, 2.5, "noticing the death");
  expect(text, {str_cat("rank ", std::getenv("TEST_VICTIM"))});
}
TEST_CASE("a child does not hide its parent's death") {
  for (const std::string& backend : backends::all())
    for (const int victim : {0, 1}) {
      CAPTURE(backend);
      CAPTURE(victim);
      const auto ended = backends::run(backend, 3, "rank: dies before its child",
                                       {.variables = {{"TEST_VICTIM", std::to_string(victim)}}});
      for (const auto& e : ended) {
        INFO(e.output);
        if (e.rank == victim)
          CHECK(e.signal == SIGKILL);
        else
          CHECK(e.code == 0);
      }
    }
}

TEST_CASE("groups of threads: a child of one rank ends, and uses what it must not") {
  run_local(3, [](const Group& g) {
    set_num_threads(2);
    agree(g);
    for (const bool uses : {false, true}) {
      const pid_t child = g.rank() == 1 ? fork() : 1;
      if (child == 0) {
        bool refused = true;
        if (uses)
          refused = contains(error_of<DistError>([&] { g.all_reduce(ones({3})); }), "forked child");
        _exit(refused && computed() > 0 ? 0 : 1);
      }
      if (g.rank() == 1) require(end_of(child) == 0, "the child");
      for (int i = 0; i < 20; ++i) agree(g, 1 + 5000 * i);
    }
  });
}
