// Ranks that run out of what the system allows them: an error that names the limit, on every rank
// and soon, and nothing left behind. And what the library asks of nobody: standard descriptors that
// are closed, a home, a writable folder, a port for a group of one.
#include <doctest/doctest.h>

#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <unistd.h>

#include <fstream>
#include <functional>

#include <lockstep/lockstep.h>

#include "backends.h"
#include "texts.h"

using namespace lockstep;
using namespace lockstep::dist;
using ranks::require;

namespace {

void limit(int resource, rlim_t value) {
  const rlimit both{value, value};
  require(setrlimit(static_cast<__rlimit_resource_t>(resource), &both) == 0, "setrlimit");
}

size_t address_space() {
  size_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * static_cast<size_t>(getpagesize());
}

void use(const Group& g) {
  const Tensor t = full({300}, 1.0);
  g.all_reduce(t);
  require(t.data<float>()[299] == static_cast<float>(g.size()), "all_reduce");
}

/// f must throw, within a moment, an error that has the parts.
void fails(const std::vector<std::string>& parts, const std::function<void()>& f) {
  const double begin = ranks::now();
  const std::string text = error_of<Error>(f);
  ranks::below(begin, 8, "the error");
  expect(text, parts);
}

struct Limit {
  std::string name;
  std::vector<std::string> backends;
  std::function<void(bool limited)> run;
};

std::vector<Limit> limits() {
  return {
      {"file size",
       {"shm", "shm+gloo"},
       [](bool limited) {
         if (limited) limit(RLIMIT_FSIZE, 100 << 10);
         fails({"ulimit -f"}, [] { use(backends::join()); });
       }},
      {"file size, of an allocation",
       {"shm"},
       [](bool limited) {
         if (limited) limit(RLIMIT_FSIZE, 64 << 20);
         const Group g = backends::join();
         fails(limited ? std::vector<std::string>{"ulimit -f"} : std::vector<std::string>{"memory"},
               [&] { g.process_group().allocate(size_t{65} << 20); });
         use(g);
       }},
      {"descriptors",
       {"shm", "gloo", "shm+gloo"},
       [](bool limited) {
         close_range(3, ~0U, 0);
         if (limited) limit(RLIMIT_NOFILE, 5);
         fails({limited ? "ulimit -n" : "rank 0"}, [] { use(backends::join()); });
       }},
      {"address space",
       {"shm"},
       [](bool limited) {
         if (limited) limit(RLIMIT_AS, address_space() + (6 << 20));
         fails({limited ? "ulimit -v" : "memory"}, [] { use(backends::join()); });
       }},
  };
}

bool is_limited() { return std::getenv("TEST_LIMITED") == std::string(std::getenv("RANK")); }

}  // namespace

TEST_CASE("rank: limited" * doctest::skip()) {
  signal(SIGXFSZ, SIG_DFL);
  limits()[static_cast<size_t>(std::atoi(std::getenv("TEST_LIMIT")))].run(is_limited());
}
TEST_CASE("a limit is named on the rank that meets it, and the others hear of it") {
  const std::vector<Limit> all = limits();
  for (size_t i = 0; i < all.size(); ++i)
    for (const std::string& backend : all[i].backends) {
      const std::vector<std::string> built = backends::all();
      if (std::count(built.begin(), built.end(), backend) == 0) continue;
      CAPTURE(all[i].name);
      CAPTURE(backend);
      CHECK(ranks::failures(backends::run(backend, 3, "rank: limited",
                                          {.variables = {{"TEST_LIMIT", std::to_string(i)},
                                                         {"TEST_LIMITED", "0"},
                                                         {"LOCKSTEP_JOIN_TIMEOUT", "6"}}})) == "");
    }
}

// Root may start any number of threads, so the rank becomes another user.
TEST_CASE("rank: no threads" * doctest::skip()) {
  if (geteuid() == 0) require(setresuid(65534, 65534, 65534) == 0, "setresuid");
  limit(RLIMIT_NPROC, 0);
  const std::string backend = std::getenv("TEST_BACKEND");
  if (backend == "shm") {
    Group g = backends::join();  // it has no threads of its own
    use(g);
    use(g);
    require(exp(full({1000000}, 0.0)).sum().item<double>() == 1e6, "computing alone");
    fails({"run_local", "ulimit -u"}, [] { run_local(3, [](const Group&) {}); });
  } else {
    // Rank 0 has no thread for the store, so the others do not find it.
    const bool serves = std::getenv("RANK") == std::string("0");
    fails({serves ? "cannot start the store's thread" : "rank 0 is missing"},
          [] { use(backends::join()); });
    if (serves) fails({"ulimit -u"}, [] { use(backends::join()); });
  }
}
TEST_CASE("without threads") {
  for (const std::string& backend : backends::all()) {
    CAPTURE(backend);
    CHECK(ranks::failures(backends::run(backend, 2, "rank: no threads",
                                        {.variables = {{"LOCKSTEP_JOIN_TIMEOUT", "6"}}})) == "");
  }
}

// Rank 0 hands out memory to 40 ranks, each of which is another user than root and has few
// descriptors.
TEST_CASE("rank: many ranks" * doctest::skip()) {
  if (geteuid() == 0) require(setresuid(65534, 65534, 65534) == 0, "setresuid");
  limit(RLIMIT_NOFILE, 64);
  const Group g = init();
  use(g);
  use(Group(g.process_group().child()));
}
TEST_CASE("many ranks with few descriptors") {
  CHECK(ranks::failures(ranks::run_ranks(40, "rank: many ranks", {.deadline = 60})) == "");
}

TEST_CASE("rank: closed" * doctest::skip()) {
  for (const char* fd = std::getenv("TEST_CLOSED"); *fd; ++fd) close(*fd - '0');
  const Group g = backends::join();
  for (int i = 0; i < 50; ++i) {
    std::printf("step %d\n", i);
    std::fflush(stdout);
    std::fprintf(stderr, "step %d\n", i);
    use(g);
  }
  for (int fd = 0; fd <= 2; ++fd) require(fcntl(fd, F_GETFD) >= 0, "closed");
}
TEST_CASE("what a rank prints into a closed descriptor reaches nobody") {
  for (const std::string& backend : backends::all())
    for (const char* closed : {"0", "1", "2", "012"}) {
      CAPTURE(backend);
      CAPTURE(closed);
      for (const auto& e :
           backends::run(backend, 2, "rank: closed", {.variables = {{"TEST_CLOSED", closed}}})) {
        INFO(e.output);
        CHECK(e.code == 0);
        CHECK(!e.hung);
      }
    }
}

// No folder is writable, there is no /dev/shm, and no HOME.
TEST_CASE("rank: bare" * doctest::skip()) {
  if (unshare(CLONE_NEWNS) == 0 && mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0) {
    umount2("/dev/shm", MNT_DETACH);
    mount("/", "/", nullptr, MS_BIND | MS_REC, nullptr);
    mount("none", "/", nullptr, MS_REMOUNT | MS_BIND | MS_RDONLY, nullptr);
  }
  unsetenv("HOME");
  setenv("TMPDIR", "/nonexistent", 1);
  limit(RLIMIT_MEMLOCK, 0);
  limit(RLIMIT_CORE, 0);
  const Group g = backends::join();
  use(g);
  g.process_group().allocate(1 << 20);
}
TEST_CASE("nothing is written, and nothing locked") {
  for (const std::string& backend : backends::all()) {
    CAPTURE(backend);
    CHECK(ranks::failures(backends::run(backend, 2, "rank: bare")) == "");
  }
}

#ifdef LOCKSTEP_HAS_GLOO
TEST_CASE("rank: alone" * doctest::skip()) {
  const int before = ranks::open_descriptors();
  for (const char* backend : {"gloo", "shm+gloo"}) {
    Group g = init({.backend = backend});
    require(g.size() == 1, "size");
    use(g);
    use(Group(g.process_group().child()));
    require(ranks::open_descriptors() == before, "a group of one opened something");
    set_default_group(nullptr, 0);
  }
}
TEST_CASE("a group of one opens no port and warns of no token") {
  const auto ended =
      ranks::run_ranks(1, "rank: alone", {.variables = {{"MASTER_ADDR", "127.0.0.1"}}});
  CHECK(ranks::failures(ended) == "");
  CHECK(!contains(ended[0].output, "TOKEN"));
}
#endif
