// What the library leaves behind on a thread that calls it, and in its process: nothing. The
// processors the thread may run on, its signal mask, the floating-point environment, the locale and
// the handlers of all signals are the same after training on a group as before; and no signal of
// the program ends up on a thread of the library.
#include <doctest/doctest.h>

#include <fenv.h>
#include <locale.h>
#include <sched.h>
#include <signal.h>

#include <atomic>
#include <cstring>
#include <string>

#include <lockstep/lockstep.h>

#include "backends.h"

using namespace lockstep;
using namespace lockstep::dist;
using ranks::require;

namespace {

struct Net : nn::Module {
  nn::Conv2d conv{1, 4, 3};
  nn::BatchNorm2d norm{4};
  nn::Linear out{4 * 6 * 6, 3};
  Tensor forward(const Tensor& x) { return out(relu(norm(conv(x))).flatten(1)); }
  LOCKSTEP_MODULE(Net, conv, norm, out)
};

struct Traces {
  cpu_set_t cpus;
  sigset_t mask;
  int rounding, raised_traps;
  std::string locale;
  void (*handlers[32])(int) = {};

  static Traces now() {
    Traces t;
    std::memset(&t.cpus, 0, sizeof t.cpus);
    require(sched_getaffinity(0, sizeof t.cpus, &t.cpus) == 0, "sched_getaffinity");
    pthread_sigmask(SIG_SETMASK, nullptr, &t.mask);
    t.rounding = fegetround();
    t.raised_traps = fegetexcept();
    t.locale = setlocale(LC_ALL, nullptr);
    for (int s = 1; s < 32; ++s) {
      struct sigaction action {};
      sigaction(s, nullptr, &action);
      t.handlers[s] = action.sa_handler;
    }
    return t;
  }
};

void check_alike(const Traces& a, const Traces& b) {
  require(CPU_EQUAL(&a.cpus, &b.cpus), "other processors");
  for (int s = 1; s < NSIG; ++s)
    require(sigismember(&a.mask, s) == sigismember(&b.mask, s),
            str_cat("signal ", s, " in the mask"));
  require(a.rounding == b.rounding && a.raised_traps == b.raised_traps,
          "the floating-point environment");
  require(a.locale == b.locale, "the locale");
  for (int s = 1; s < 32; ++s)
    require(a.handlers[s] == b.handlers[s], str_cat("the handler of signal ", s));
}

void train(const Group& g) {
  set_num_threads(2);
  Net net;
  DistributedDataParallel ddp(net, g);
  optim::SGD optimizer(net.parameters(), {.lr = 0.01});
  data::Loader loader{data::TensorDataset{randn({40, 1, 8, 8})}, {.batch_size = 10, .workers = 2}};
  for (const auto& [x] : loader.epoch(0)) {
    ddp(x).square().mean().backward();
    optimizer.step();
    optimizer.zero_grad();
  }
}

std::atomic<int> on_main_thread{0}, elsewhere{0};
thread_local bool is_main_thread = false;

}  // namespace

// Conv2d is the first op of this thread.
TEST_CASE("rank: leaves no trace" * doctest::skip()) {
  is_main_thread = true;
  struct sigaction action {};
  action.sa_handler = [](int) { ++(is_main_thread ? on_main_thread : elsewhere); };
  sigaction(SIGUSR1, &action, nullptr);
  sigset_t some;
  sigemptyset(&some);
  sigaddset(&some, SIGUSR2);
  pthread_sigmask(SIG_BLOCK, &some, nullptr);
  fesetround(FE_DOWNWARD);
  const Traces before = Traces::now();
  Group g = backends::join();
  train(g);
  check_alike(before, Traces::now());
  // While this thread blocks it, a signal to the process waits rather than go to another thread.
  sigaddset(&some, SIGUSR1);
  pthread_sigmask(SIG_BLOCK, &some, nullptr);
  kill(getpid(), SIGUSR1);
  g.barrier();
  std::this_thread::sleep_for(Milliseconds(50));
  require(on_main_thread == 0 && elsewhere == 0, "a thread of the library takes signals");
  sigdelset(&some, SIGUSR2);
  pthread_sigmask(SIG_UNBLOCK, &some, nullptr);
  require(on_main_thread == 1, "the signal is lost");
  g.destroy();
  check_alike(before, Traces::now());
}
TEST_CASE("a calling thread is as before") {
  for (const std::string& backend : backends::all()) {
    CAPTURE(backend);
    CHECK(ranks::failures(backends::run(backend, 2, "rank: leaves no trace")) == "");
  }
}
