// lockstep-run, as its users meet it: exit codes, output, signals, and nothing left behind.
#include <doctest/doctest.h>

#include <fcntl.h>
#include <sys/ioctl.h>

#include <regex>
#include <sstream>

#include <lockstep/distributed/group.h>

#include "ranks.h"

using ranks::Ended;

namespace {

std::string launcher() {
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe");
  return self.parent_path().parent_path() / "lockstep-run";
}

std::vector<std::string> command_line(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), launcher());
  return arguments;
}

Ended run(std::vector<std::string> arguments,
          const std::map<std::string, std::string>& variables = {}) {
  const int file = ranks::new_file();
  const pid_t pid = ranks::start(command_line(std::move(arguments)), file, variables);
  Ended e = ranks::wait_for(pid, ranks::now() + 20 * ranks::kPatience);
  e.output = ranks::read_all(file);
  close(file);
  CHECK(!e.hung);
  return e;
}

// n ranks that each run a shell script.
Ended run_script(int n, const std::string& script, std::vector<std::string> options = {}) {
  options.insert(options.end(), {"-n", std::to_string(n), "sh", "-c", script});
  return run(options);
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

std::string sorted_lines(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  std::sort(lines.begin(), lines.end());
  std::string all;
  for (const std::string& line : lines) all += line + "\n";
  return all;
}

// Whether a process runs; a zombie that nobody reaps does not.
bool runs(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string stat;
  if (!std::getline(file, stat)) return false;
  return stat.substr(stat.rfind(')') + 2, 1) != "Z";
}

bool all_end(const std::vector<pid_t>& pids, double seconds) {
  const double deadline = ranks::now() + seconds * ranks::kPatience;
  for (;;) {
    bool any = false;
    for (const pid_t pid : pids) any |= runs(pid);
    if (!any || ranks::now() > deadline) return !any;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

// A launcher that runs in the background, and the numbers that its ranks have printed so far.
struct Background {
  int file = ranks::new_file();
  pid_t pid;

  Background(int n, const std::string& script, std::vector<std::string> options = {}) {
    options.insert(options.end(), {"-n", std::to_string(n), "sh", "-c", script});
    pid = ranks::start(command_line(options), file, {});
  }
  ~Background() { close(file); }
  std::string output() const { return ranks::read_all(file); }
  void wait_until(const std::string& part, int times) const {
    const double deadline = ranks::now() + 10 * ranks::kPatience;
    for (;;) {
      const std::string text = output();
      int n = 0;
      for (size_t at = 0; (at = text.find(part, at)) != std::string::npos; ++at) ++n;
      if (n >= times) return;
      ranks::require(ranks::now() < deadline, "the ranks never said " + part + ": " + text);
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  }
  std::vector<pid_t> pids() const {
    const std::string text = output();
    const std::regex number("pid=([0-9]+)");
    std::vector<pid_t> all;
    for (std::sregex_iterator it(text.begin(), text.end(), number), end; it != end; ++it)
      all.push_back(std::stoi((*it)[1]));
    return all;
  }
  Ended wait() const { return ranks::wait_for(pid, ranks::now() + 15 * ranks::kPatience); }
};

}  // namespace

TEST_CASE("exit codes") {
  CHECK(run_script(2, "exit 0").code == 0);
  CHECK(run_script(3, "exit 0").output == "");
  CHECK(run_script(2, "exit $((RANK * 3))").code == 3);
  CHECK(run_script(2, "[ $RANK = 1 ] && kill -KILL $$; exit 0").code == 128 + SIGKILL);
  CHECK(run_script(2, "[ $RANK = 0 ] && kill -SEGV $$; exit 0").code == 128 + SIGSEGV);
}

TEST_CASE("usage errors") {
  CHECK(run({}).code == 2);
  CHECK(run({"-n", "0", "true"}).code == 2);
  CHECK(run({"-n", "two", "true"}).code == 2);
  CHECK(run({"-n", "2x", "true"}).code == 2);
  CHECK(run({"--bogus", "true"}).code == 2);
  CHECK(run({"-n", "2", "--filter-ranks", "2", "true"}).code == 2);
  CHECK(run({"--master-port", "70000", "true"}).code == 2);
  const Ended help = run({"--help"});
  CHECK(help.code == 0);
  CHECK(contains(help.output, "lockstep-run [options] program [arguments]"));
  const Ended missing = run({"-n", "2", "./no-such-program"});
  CHECK(missing.code == 127);
  CHECK(contains(missing.output, "cannot start ./no-such-program: No such file"));
}

TEST_CASE("the program's own options stay its own") {
  CHECK(run({"-n", "1", "sh", "-c", "printf '%s ' $0 $1 $2", "-n", "7", "--help"}).output ==
        "[0] -n 7 --help \n");
  CHECK(run({"-n", "1", "--", "echo", "--", "-n"}).output == "[0] -- -n\n");
}

TEST_CASE("whole lines carry their rank") {
  CHECK(sorted_lines(run_script(2, "echo out; echo err >&2; printf unfinished").output) ==
        "[0] err\n[0] out\n[0] unfinished\n[1] err\n[1] out\n[1] unfinished\n");
  CHECK(run_script(2, "echo a b", {"--no-prefix"}).output == "a b\na b\n");
  CHECK(run_script(3, "echo $RANK", {"--filter-ranks", "0,2"}).output.size() ==
        std::string("[0] 0\n[2] 2\n").size());
  // Much output from all at once, in pieces that are no lines.
  const Ended much = run_script(
      3, "i=0; while [ $i -lt 4000 ]; do echo \"abcdefghijklmnopqrstuvwxyz-$i\"; i=$((i+1)); done");
  std::istringstream in(much.output);
  int lines = 0, next[3] = {}, bad = 0;
  for (std::string line; std::getline(in, line); ++lines) {
    const int rank = line.size() > 1 ? line[1] - '0' : -1;
    const bool known = rank >= 0 && rank < 3;
    if (known) {
      std::string expected = "[0] abcdefghijklmnopqrstuvwxyz-";
      expected[1] = line[1];
      expected += std::to_string(next[rank]++);
      bad += line != expected;
    } else {
      ++bad;
    }
  }
  CHECK(lines == 12000);
  CHECK(bad == 0);
}

TEST_CASE("variables") {
  const Ended e = run_script(
      2,
      "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $LOCKSTEP_RANK/$LOCKSTEP_WORLD_SIZE "
      "$MASTER_ADDR $OMP_NUM_THREADS $LOCKSTEP_NUM_THREADS; [ -n \"$TORCHELASTIC_RUN_ID\" ] && [ "
      "$MASTER_PORT -gt 0 ]");
  CHECK(e.code == 0);
  CHECK(contains(e.output, "[0] 0/2 0/2 0/2 127.0.0.1 "));
  CHECK(contains(e.output, "[1] 1/2 1/2 1/2 127.0.0.1 "));
  const auto threads = [](const std::map<std::string, std::string>& variables) {
    return run({"-n", "2", "--filter-ranks", "0", "--no-prefix", "sh", "-c",
                "echo $OMP_NUM_THREADS/$LOCKSTEP_NUM_THREADS"},
               variables)
        .output;
  };
  const std::string share =
      std::to_string(std::max<size_t>(1, std::thread::hardware_concurrency() / 2));
  CHECK(threads({}) == share + "/" + share + "\n");
  CHECK(threads({{"OMP_NUM_THREADS", "5"}}) == "5/\n");
  CHECK(run({"-n", "1", "--master-port", "1234", "sh", "-c", "echo $MASTER_PORT"}).output ==
        "[0] 1234\n");
}

TEST_CASE("--dry-run starts nothing and prints a line per rank that a shell would take") {
  const Ended e = run({"-n", "2", "--dry-run", "touch", "/nowhere/it's here"});
  CHECK(e.code == 0);
  CHECK(contains(e.output, " RANK=1 WORLD_SIZE=2 "));
  CHECK(contains(e.output, "touch '/nowhere/it'\\''s here'\n"));
}

TEST_CASE("the ranks share a secret that no command line shows") {
  const Ended one = run_script(2, "echo \"$LOCKSTEP_TOKEN\"", {"--no-prefix"});
  std::istringstream lines(one.output);
  std::string a, b;
  lines >> a >> b;
  CHECK(std::regex_match(a, std::regex("[0-9a-f]{32}")));
  CHECK(a == b);
  CHECK(!contains(run_script(2, "echo \"$LOCKSTEP_TOKEN\"", {"--no-prefix"}).output, a));
  CHECK(!contains(run_script(1, "tr '\\0' ' ' </proc/$PPID/cmdline").output, "TOKEN="));
  CHECK(!contains(run({"--dry-run", "-n", "2", "true"}).output, "TOKEN"));
  CHECK(run({"-n", "1", "--no-prefix", "sh", "-c", "echo $LOCKSTEP_TOKEN"},
            {{"LOCKSTEP_TOKEN", "the user's"}})
            .output == "the user's\n");
}

TEST_CASE("--log-dir keeps each rank's output") {
  const std::string folder =
      std::filesystem::temp_directory_path() / ("launcher_test_" + std::to_string(getpid()));
  CHECK(run_script(2, "echo out $RANK; echo err $RANK >&2", {"--log-dir", folder}).code == 0);
  for (const std::string r : {"0", "1"})
    for (const std::string kind : {"out", "err"}) {
      std::ifstream file(folder + "/attempt_0/rank_" + r + "." + kind);
      std::string line;
      std::getline(file, line);
      CHECK(line == kind + " " + r);
    }
  std::filesystem::remove_all(folder);
}

TEST_CASE("the first failure wins, is reported, and stops the others") {
  const double begin = ranks::now();
  const Ended e =
      run_script(3, "if [ $RANK = 1 ]; then echo about to fail >&2; exit 7; fi; exec sleep 60");
  CHECK(e.code == 7);
  CHECK(std::regex_search(
      e.output, std::regex("lockstep-run: rank 1 \\(pid [0-9]+\\) failed with exit code 7")));
  CHECK(contains(e.output, "its last lines:\n  about to fail\n"));
  CHECK(!contains(e.output, "rank 0 (pid"));
  CHECK(ranks::now() - begin < 3 * ranks::kPatience);
}

TEST_CASE("--grace: who ignores SIGTERM is killed") {
  const double begin = ranks::now();
  const Ended e = run_script(
      2, "if [ $RANK = 1 ]; then sleep 0.2; exit 5; fi; trap '' TERM; while :; do sleep 0.05; done",
      {"--grace", "0.5"});
  CHECK(e.code == 5);
  CHECK(ranks::now() - begin > 0.6);
  CHECK(ranks::now() - begin < 4 * ranks::kPatience);
}

TEST_CASE("nothing outlives a launcher that is killed") {
  const Background job(2, "sleep 100 & echo pid=$! pid=$$; wait");
  job.wait_until("pid=", 4);
  const std::vector<pid_t> pids = job.pids();
  REQUIRE(pids.size() == 4);
  for (const pid_t pid : pids) CHECK(runs(pid));
  kill(job.pid, SIGKILL);
  CHECK(job.wait().signal == SIGKILL);
  CHECK(all_end(pids, 3));
}

TEST_CASE("what a rank leaves in its group ends with it") {
  const Background job(1, "sleep 100 & echo pid=$!; exit 0");
  const Ended e = job.wait();
  CHECK(e.code == 0);
  CHECK(e.seconds < 5 * ranks::kPatience);
  REQUIRE(job.pids().size() == 1);
  CHECK(all_end(job.pids(), 3));
}

TEST_CASE("signals are forwarded") {
  const Background job(2,
                       "trap 'echo usr1' USR1; trap 'echo saved; exit 0' TERM; echo ready; while "
                       ":; do sleep 0.02; done");
  job.wait_until("ready", 2);
  kill(job.pid, SIGUSR1);
  job.wait_until("usr1", 2);
  kill(job.pid, SIGTERM);
  const Ended e = job.wait();
  CHECK(e.code == 0);
  CHECK(contains(job.output(), "[0] saved"));
  CHECK(contains(job.output(), "[1] saved"));

  const Background plain(2, "echo pid=$$; exec sleep 100");
  plain.wait_until("pid=", 2);
  kill(plain.pid, SIGINT);
  CHECK(plain.wait().code == 128 + SIGINT);
  CHECK(all_end(plain.pids(), 3));

  const Background deaf(1, "trap '' TERM INT; echo pid=$$; while :; do sleep 0.02; done",
                        {"--grace", "60"});
  deaf.wait_until("pid=", 1);
  kill(deaf.pid, SIGTERM);
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  kill(deaf.pid, SIGTERM);  // the second time at once
  CHECK(deaf.wait().code == 128 + SIGKILL);
}

TEST_CASE("ranks inherit no stray descriptors") {
  const int stray = open("/dev/null", O_RDONLY);  // not closed by exec
  REQUIRE(stray > 2);
  const Ended e = run({"-n", "2", "ls", "/proc/self/fd"});  // 3 is the folder that it reads
  close(stray);
  CHECK(sorted_lines(e.output) == "[0] 0\n[0] 1\n[0] 2\n[0] 3\n[1] 0\n[1] 1\n[1] 2\n[1] 3\n");
}

TEST_CASE("on a terminal rank 0 keeps it, and the others' prefixes have colour") {
  const int terminal = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
  REQUIRE(terminal >= 0);
  REQUIRE(grantpt(terminal) == 0);
  REQUIRE(unlockpt(terminal) == 0);
  const int side = open(ptsname(terminal), O_RDWR | O_NOCTTY | O_CLOEXEC);
  REQUIRE(side >= 0);
  const pid_t pid = ranks::start(
      command_line(
          {"-n", "2", "sh", "-c",
           "if [ $RANK = 0 ]; then [ -t 1 ] && printf '10%%\\r20%%\\r'; else echo hello; fi"}),
      side, {});
  const Ended e = ranks::wait_for(pid, ranks::now() + 10 * ranks::kPatience);
  CHECK(e.code == 0);
  char buffer[4096];
  fcntl(terminal, F_SETFL, O_NONBLOCK);
  const ssize_t n = read(terminal, buffer, sizeof buffer);
  const std::string text(buffer, static_cast<size_t>(std::max<ssize_t>(n, 0)));
  CHECK(contains(text, "10%\r20%\r"));
  CHECK(contains(text, "\033[32m[1]\033[0m hello"));
  close(side);
  close(terminal);
}

TEST_CASE("rank: meet" * doctest::skip()) {
  const auto g = lockstep::dist::init();
  ranks::require(g.backend() == "shm" && g.size() == 3, "not the launcher's ranks");
  g.barrier();
}

TEST_CASE("ranks of lockstep-run meet") {
  const std::string self = std::filesystem::read_symlink("/proc/self/exe");
  const Ended e = run({"-n", "3", self, "--test-case=rank: meet", "--no-skip"});
  CHECK(e.code == 0);
  CHECK(contains(e.output, "[2] [doctest] test cases: 1 | 1 passed"));
}
