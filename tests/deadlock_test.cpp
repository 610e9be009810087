// Ranks that wait for each other in different groups. Each pair of groups must end within a moment,
// on every rank, with an error that says who waits in which call; and what only looks like a
// deadlock must go on: ranks that are slow, stopped, blocked in something else, that poll, or that
// have another thread which makes the missing call.
#include <doctest/doctest.h>

#include <signal.h>
#include <unistd.h>

#include <functional>
#include <future>
#include <optional>
#include <thread>

#include <lockstep/lockstep.h>

#include "backends.h"
#include "texts.h"

using namespace lockstep;
using namespace lockstep::dist;
using ranks::require;

namespace {

struct Scene {
  std::string name;
  bool pairs;  // it sends and receives
  std::function<void(const Group&)> run;
};

Group child_of(const Group& g) { return Group(g.process_group().child()); }

void pause(int milliseconds) { std::this_thread::sleep_for(Milliseconds(milliseconds)); }

// What each rank calls must fail, soon, with an error that names the call of every rank of the
// cycle.
void deadlocks(const std::vector<std::string>& parts, const std::function<void()>& call) {
  const double begin = ranks::now();
  const std::string text = error_of<DistError>(call);
  ranks::below(begin, 3.5, "finding the deadlock");
  expect(text, {"deadlock: "});
  expect(text, parts);
}

struct Net : nn::Module {
  nn::Linear a{4, 4};
  Tensor forward(const Tensor& x) { return a(x); }
  LOCKSTEP_MODULE(Net, a)
};

std::vector<Scene> deadlock_scenes() {
  return {
      {"a group and its child", false,
       [](const Group& g) {
         const Group child = child_of(g);
         deadlocks({"rank 0 waits in all_reduce(sum) of f32 [3]", "for rank ", "waits in barrier"},
                   [&] { g.rank() == 0 ? g.all_reduce(ones({3})) : child.barrier(); });
       }},
      {"two children, after many calls that agree", false,
       [](const Group& g) {
         set_num_threads(2);
         data::Loader loader{data::TensorDataset{zeros({100, 4})}, {.workers = 2}};
         auto epoch = loader.epoch(0);
         const auto batch = epoch.begin();  // its workers are threads, and make no calls
         const Group a = child_of(g), b = child_of(g);
         for (int i = 0; i < 30; ++i) {
           a.all_reduce(ones({3}));
           b.all_gather(exp(ones({100000})).sum().reshape({1}));
         }
         deadlocks({"waits in broadcast of f32 [3], root 0", "waits in all_gather of f32 [2]"},
                   [&] {
                     if (g.rank() == 0) return void(b.all_gather(ones({2})));
                     a.broadcast(ones({3}), 0);
                   });
       }},
      {"one rank alone calls a collective before backward", false,
       [](const Group& g) {
         Net net;
         DistributedDataParallel ddp(net, g);
         deadlocks({"rank 0 waits in all_reduce(sum) of f32 [1]", "DDP"}, [&] {
           if (g.is_main()) g.all_reduce(ones({1}));
           ddp(ones({2, 4})).sum().backward();
         });
       }},
      {"a group of some ranks and the group of all", false,
       [](const Group& g) {
         const std::optional<Group> some = g.new_group({0, 1});
         if (g.rank() == 0) return deadlocks({"rank 0 waits in barrier"}, [&] { some->barrier(); });
         deadlocks({"rank 1 waits in all_reduce(max)"},
                   [&] { g.all_reduce(ones({1}), ReduceOp::max); });
       }},
      {"a cycle of three groups of two", false,
       [](const Group& g) {
         const std::optional<Group> groups[] = {g.new_group({0, 1}), g.new_group({1, 2}),
                                                g.new_group({2, 0})};
         deadlocks({"rank 0 waits in", "rank 1 waits in", "rank 2 waits in"},
                   [&] { groups[g.rank()]->barrier(); });
       }},
      {"waiting late for what was started early", false,
       [](const Group& g) {
         const Group a = child_of(g), b = child_of(g);
         const Tensor t = ones({3}), u = ones({3});
         WorkPtr work = g.rank() == 0 ? a.all_reduce_async(t) : b.all_reduce_async(t);
         g.barrier();
         deadlocks({"sequence number 1"}, [&] { work->wait(); });
       }},
      {"making a group, and a collective", false,
       [](const Group& g) {
         const Group child = child_of(g);
         deadlocks({"rank 0 waits in", "waits in barrier"}, [&] {
           g.rank() == 0 ? void(g.new_group({0, 1})) : child.barrier();
         });
       }},
      {"both receive first", true,
       [](const Group& g) {
         if (g.rank() > 1) return;
         deadlocks({"rank 0 waits in recv of f32 [3] from rank 1",
                    "rank 1 waits in recv of f32 [3] from rank 0"},
                   [&] { g.recv(ones({3}), 1 - g.rank()); });
       }},
      {"a send and a collective", true,
       [](const Group& g) {
         const Group child = child_of(g);
         if (g.rank() > 1) return deadlocks({}, [&] { child.barrier(); });
         deadlocks({"rank 0 waits in send of f32 [300000] to rank 1", "rank 1 waits in barrier"},
                   [&] { g.rank() == 0 ? g.send(ones({300000}), 1) : child.barrier(); });
       }},
  };
}

/// A dataset of one sample that calls f where it is made.
struct Calling {
  std::function<void()> f;
  int64_t size() const { return 1; }
  Tensor get(int64_t) const {
    f();
    return ones({1});
  }
};

constexpr int kLong = 2600;  // ms; much longer than it takes to find a deadlock

std::vector<Scene> lookalikes() {
  return {
      {"a slow rank, waited for in two groups", false,
       [](const Group& g) {
         const Group a = child_of(g), b = child_of(g);
         if (g.rank() == 0) pause(kLong);
         // Rank 1 waits in a for all; the last rank waits in b for rank 0 in a group that rank 1
         // enters later.
         const WorkPtr x = a.all_reduce_async(ones({1})), y = b.all_reduce_async(ones({1}));
         g.rank() == 1 ? (x->wait(), y->wait()) : (y->wait(), x->wait());
       }},
      {"a rank that computes", false,
       [](const Group& g) {
         const Group a = child_of(g);
         if (g.rank() == 0) {
           const Tensor t = ones({100000});
           for (const double begin = ranks::now(); ranks::now() - begin < kLong / 1000.0;) exp(t);
           a.barrier();
           return g.barrier();
         }
         a.barrier();
         g.barrier();
       }},
      {"a rank that polls", false,
       [](const Group& g) {
         const Group a = child_of(g), b = child_of(g);
         if (g.rank() == 0) {
           const WorkPtr work = a.all_reduce_async(ones({1}));
           for (const double begin = ranks::now(); ranks::now() - begin < kLong / 1000.0;) {
             require(!work->is_completed(), "too early");
             pause(5);
           }
           b.barrier();
           return work->wait();
         }
         b.barrier();
         a.all_reduce(ones({1}));
       }},
      {"another thread of a rank makes the missing call", false,
       [](const Group& g) {
         const Group a = child_of(g), b = child_of(g);
         if (g.rank() == 0) {
           std::thread other([&] {
             pause(kLong);
             b.barrier();
           });
           a.barrier();
           return other.join();
         }
         b.barrier();
         a.barrier();
       }},
      {"two threads of each rank, in any order", false,
       [](const Group& g) {
         const Group a = child_of(g), b = child_of(g);
         const auto run = [&](const Group& first, int late) {
           pause(late);
           first.barrier();
         };
         std::thread other(run, g.rank() == 0 ? a : b, g.rank() == 0 ? 0 : kLong);
         run(g.rank() == 0 ? b : a, g.rank() == 1 ? 0 : kLong);
         other.join();
       }},
      {"a thread of a nested run_local makes the missing call", false,
       [](const Group& g) {
         const Group a = child_of(g), b = child_of(g);
         if (g.rank() == 0)
           return run_local(2, [&](const Group& inner) {
             if (inner.rank() == 0) return a.barrier();
             pause(kLong);
             b.barrier();
           });
         b.barrier();
         a.barrier();
       }},
      {"a Loader's worker makes the missing call", false,
       [](const Group& g) {
         const Group a = child_of(g), b = child_of(g);
         if (g.rank() == 0) {
           data::Loader loader{Calling{[&] {
                                 pause(kLong);
                                 b.barrier();
                               }},
                               {.workers = 1}};
           auto epoch = loader.epoch(0);
           auto batch = epoch.begin();
           for (a.barrier(); batch != epoch.end();) ++batch;
           return;
         }
         b.barrier();
         a.barrier();
       }},
      {"a call with a timeout of its own gives up", false,
       [](const Group& g) {
         const Group a = child_of(g), b = child_of(g);
         if (g.rank() == 0) {
           expect(error_of<DistError>([&] { a.barrier({.timeout = Milliseconds(kLong)}); }),
                  {"did not arrive"});
           return b.barrier();
         }
         b.barrier();
         expect(error_of<DistError>([&] { a.barrier(); }), {"did not arrive"});
       }},
      {"a wait with a timeout of its own gives up", false,
       [](const Group& g) {
         const Group a = child_of(g), b = child_of(g);
         if (g.rank() == 0) {
           const WorkPtr work = a.all_reduce_async(ones({3}));
           expect(error_of<DistError>([&] { work->wait(Milliseconds(kLong)); }),
                  {"did not arrive"});
           return b.barrier();
         }
         b.barrier();
         expect(error_of<DistError>([&] { a.all_reduce(ones({3})); }), {"did not arrive"});
       }},
      {"a rank that is stopped for a while", false,
       [](const Group& g) {
         const Group a = child_of(g), b = child_of(g);
         // While it waits in a for rank 0. That one comes, and then waits in b for the stopped
         // rank.
         if (g.backend() != "local" && g.rank() == 1 && fork() == 0) {
           usleep(600'000);
           kill(getppid(), SIGSTOP);
           usleep(kLong * 1000);
           kill(getppid(), SIGCONT);
           _exit(0);
         }
         if (g.rank() != 1) pause(1000);
         a.barrier();
         b.barrier();
       }},
      {"a chain that ends in a rank blocked elsewhere", false,
       [](const Group& g) {
         const Group a = child_of(g), b = child_of(g);
         int ends[2];
         require(pipe(ends) == 0, "pipe");
         if (g.rank() == 0) {
           if (fork() == 0) {
             usleep(kLong * 1000);
             _exit(write(ends[1], "x", 1) == 1 ? 0 : 1);
           }
           char c;
           require(read(ends[0], &c, 1) == 1, "read");
         }
         a.barrier();
         b.barrier();
         close(ends[0]);
         close(ends[1]);
       }},
  };
}

void run_scene(const Group& g, const std::vector<Scene>& scenes, size_t which) {
  const Scene& s = scenes[which];
  if (s.pairs && g.backend() == "shm+gloo") return;
  try {
    s.run(g);
  } catch (const std::exception& e) {
    throw std::runtime_error(s.name + ": " + e.what());
  }
}

std::string failures_on(const std::string& backend, const std::string& test_case, size_t which) {
  return ranks::failures(
      backends::run(backend, 3, test_case, {.variables = {{"TEST_SCENE", std::to_string(which)}}}));
}

size_t scene() { return static_cast<size_t>(std::atoi(std::getenv("TEST_SCENE"))); }

}  // namespace

TEST_CASE("deadlock: ranks that wait for each other in different groups are told so") {
  const std::vector<Scene> scenes = deadlock_scenes();
  for (size_t i = 0; i < scenes.size(); ++i) {
    CAPTURE(scenes[i].name);
    run_local(3, [&](const Group& g) { run_scene(g, scenes, i); });
    for (const std::string& backend : backends::all()) {
      CAPTURE(backend);
      CHECK(failures_on(backend, "rank: deadlock", i) == "");
    }
  }
}
TEST_CASE("rank: deadlock" * doctest::skip()) {
  run_scene(backends::join(), deadlock_scenes(), scene());
}

TEST_CASE("deadlock: what only looks like one goes on") {
  const std::vector<Scene> scenes = lookalikes();
  for (size_t i = 0; i < scenes.size(); ++i) {
    CAPTURE(scenes[i].name);
    run_local(3, [&](const Group& g) { run_scene(g, scenes, i); });  // no other threads now
    std::vector<std::future<std::string>> failures;  // all at once: they sleep most of the time
    for (const std::string& backend : backends::all())
      failures.push_back(std::async(std::launch::async, failures_on, backend, "rank: goes on", i));
    for (size_t b = 0; b < failures.size(); ++b) {
      CAPTURE(backends::all()[b]);
      CHECK(failures[b].get() == "");
    }
  }
}
TEST_CASE("rank: goes on" * doctest::skip()) { run_scene(backends::join(), lookalikes(), scene()); }
