// lockstep-run when something goes wrong: failures, restarts, signals, readers who do not read, and
// nothing left behind.
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#include <cstddef>

#include <lockstep/distributed/data_parallel.h>
#include <lockstep/distributed/group.h>
#include <lockstep/distributed/on_main.h>
#include <lockstep/nn/linear.h>
#include <lockstep/optim/sgd.h>
#include <lockstep/tensor/ops.h>
#include <lockstep/tensor/random.h>

#include "launches.h"
#include "temporary_folder.h"

using namespace launches;

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

TEST_CASE("of failures noticed together, the first to end is taken for the cause") {
  const Background job(2,
                       "echo pid=$$; [ $RANK = 1 ] && { sleep 0.3; kill -KILL $$; }; sleep 0.6; "
                       "exit 3");
  job.wait_until("pid=", 2);
  kill(job.pid, SIGSTOP);
  std::this_thread::sleep_for(std::chrono::milliseconds(900 * ranks::kPatience));
  kill(job.pid, SIGCONT);
  CHECK(job.wait().code == 128 + SIGKILL);
  CHECK(contains(job.output(), "lockstep-run: rank 1 (pid"));
  CHECK(!contains(job.output(), "lockstep-run: rank 0 (pid"));
}

// Its peers wait for rank LOCKSTEP_TEST_CAUSE, which ends in one of several ways and places, and then end
// before it has ended, at the same time, or after it.
TEST_CASE("rank: ends while others wait" * doctest::skip()) {
  using namespace lockstep;
  const std::string way = std::getenv("LOCKSTEP_TEST_WAY"),
                    place = std::getenv("LOCKSTEP_TEST_PLACE"),
                    cause = std::getenv("LOCKSTEP_TEST_CAUSE"),
                    backend = std::getenv("LOCKSTEP_TEST_BACKEND"), rank = std::getenv("RANK");
  const bool is_cause = rank == cause;
  const auto end = [&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    if (way == "exits") _exit(7);
    if (way == "crashes") kill(getpid(), SIGSEGV);
    throw std::runtime_error("of its own");
  };
  if (backend == "shm+gloo") setenv("LOCKSTEP_HOST_ID", rank == "2" ? "b" : "a", 1);
  try {
    if (is_cause && place == "init") end();
    const auto group = dist::init({.backend = backend});
    dist::DistributedDataParallel net{nn::Linear{4, 4}, group};
    net.module().weight.register_hook([&](const Tensor&) -> Tensor {
      if (is_cause && place == "backward") end();
      return {};
    });
    Tensor t = ones({8});
    group.all_reduce(t);
    if (is_cause && place == "collective") end();
    for (;;) {
      group.all_reduce(t);
      net(ones({2, 4})).sum().backward();
    }
  } catch (const DistError& e) {
    std::printf("told: %s\n", e.what());
    std::fflush(stdout);
    if (rank != "1") _exit(1);
    std::abort();                        // what an uncaught exception does
  } catch (const std::runtime_error&) {  // its handles were unwound: the group is aborted
    std::this_thread::sleep_for(std::chrono::milliseconds(300));  // say it dumps its core
    _exit(9);
  }
}

TEST_CASE("lockstep-run blames the rank that failed, not those that it took along") {
  const std::string self = std::filesystem::read_symlink("/proc/self/exe");
  struct Way {
    std::string name, cause;
    int code;
  };
  std::vector<std::string> backends{"shm"};
#ifdef LOCKSTEP_HAS_GLOO
  backends.insert(backends.end(), {"gloo", "shm+gloo"});
#endif
  for (const std::string& backend : backends)
    for (const std::string place : {"init", "collective", "backward"})
      for (const Way& way :
           {Way{"exits", "0", 7}, {"crashes", "2", 128 + SIGSEGV}, {"throws", "1", 9}}) {
        const Ended e =
            run({"-n", "3", self, "--test-case=rank: ends while others wait", "--no-skip"},
                {{"LOCKSTEP_TEST_WAY", way.name},
                 {"LOCKSTEP_TEST_PLACE", place},
                 {"LOCKSTEP_TEST_CAUSE", way.cause},
                 {"LOCKSTEP_TEST_BACKEND", backend}});
        INFO(backend, ", ", place, ", ", way.name, ": ", e.output);
        CHECK(e.code == way.code);
        CHECK(contains(e.output, "lockstep-run: rank " + way.cause + " (pid"));
      }
}

TEST_CASE("lockstep-run blames a rank that was taken along where no other fails") {
  const Ended e = run({"-n", "2", "--grace", "0.2", "sh", "-c",
                       "[ $RANK = 0 ] && exec sleep 60; python3 -c 'import os, socket, struct\n"
                       "s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
                       "to = chr(0) + os.environ[\"LOCKSTEP_FAILURE_SOCKET\"]\n"
                       "s.sendto(b\"noise\", to)\n"
                       "s.sendto(struct.pack(\"=qq\", 0x4c4f434b4e4f5445, 1), to)'; exit 6"});
  CHECK(e.code == 6);
  CHECK(contains(e.output, "lockstep-run: rank 1 (pid"));
}

TEST_CASE("lockstep-run ends a stopped rank without waiting for the grace period") {
  const double begin = ranks::now();
  const Ended e = run_script(
      2, "[ $RANK = 1 ] && kill -STOP $$; sleep 0.3; [ $RANK = 0 ] && exit 5; exec sleep 60",
      {"--grace", "30"});
  CHECK(e.code == 5);
  CHECK(ranks::now() - begin < 8 * ranks::kPatience);
}

// Runs lockstep-run where the kernel answers some system calls with an error, as an older one or a
// container's filter does.
Ended run_filtered(int error, const std::vector<std::string>& arguments) {
  std::vector<sock_filter> filter{BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr))};
  for (const long call : {SYS_close_range, SYS_pidfd_open, SYS_pidfd_send_signal}) {
    filter.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<unsigned>(call), 0, 1));
    filter.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<unsigned>(error)));
  }
  filter.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
  const sock_fprog program{static_cast<unsigned short>(filter.size()), filter.data()};
  std::vector<std::string> all = command_line(arguments);
  std::vector<char*> words;
  for (std::string& word : all) words.push_back(word.data());
  words.push_back(nullptr);
  const int file = ranks::new_file();
  const pid_t pid = fork();
  if (pid == 0) {
    dup2(file, 1);
    dup2(file, 2);
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
        prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0)
      execv(words[0], words.data());
    _exit(99);
  }
  Ended e = ranks::wait_for(pid, ranks::now() + 10 * ranks::kPatience);
  e.output = ranks::read_all(file);
  close(file);
  return e;
}

TEST_CASE("lockstep-run works where close_range and pidfds are missing or refused") {
  for (const int error : {ENOSYS, EPERM}) {
    CAPTURE(error);
    const int stray = open("/dev/null", O_RDONLY);
    const Ended e = run_filtered(error, {"-n", "2", "ls", "/proc/self/fd"});
    close(stray);
    CHECK(!e.hung);
    CHECK(e.code == 0);
    CHECK(sorted_lines(e.output) == "[0] 0\n[0] 1\n[0] 2\n[0] 3\n[1] 0\n[1] 1\n[1] 2\n[1] 3\n");
    const Ended failed =
        run_filtered(error, {"-n", "2", "sh", "-c", "[ $RANK = 1 ] && exit 4; exec sleep 60"});
    CHECK(failed.code == 4);
    // The watchdog kills the ranks of a launcher that is gone.
    const Ended killed = run_filtered(
        error, {"-n", "1", "sh", "-c", "sleep 100 & echo pid=$! pid=$$; kill -KILL $PPID; wait"});
    CHECK(killed.signal == SIGKILL);
    std::vector<pid_t> pids;
    const std::regex number("pid=([0-9]+)");
    for (std::sregex_iterator it(killed.output.begin(), killed.output.end(), number), end;
         it != end; ++it)
      pids.push_back(std::stoi((*it)[1]));
    CHECK(all_end(pids, 3));
  }
}

TEST_CASE("lockstep-run names the limit where descriptors or processes run out") {
  const auto limited = [](const std::string& limit, const std::string& n) {
    const int file = ranks::new_file();
    const pid_t pid =
        ranks::start({"sh", "-c", limit + "; exec " + launcher() + " -n " + n + " true"}, file, {});
    Ended e = ranks::wait_for(pid, ranks::now() + 10 * ranks::kPatience);
    e.output = ranks::read_all(file);
    close(file);
    return e;
  };
  const Ended hard = limited("ulimit -n 40", "30");
  CHECK(hard.code == 127);
  CHECK(contains(hard.output, "ulimit -n"));
  const Ended soft = limited("ulimit -S -n 40", "30");  // which the launcher may raise
  CHECK(soft.code == 0);
  CHECK(soft.output == "");
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

TEST_CASE("nothing outlives a killed launcher, shells in between and deaf programs included") {
  const Background job(
      2,
      "sh -c \"trap '' TERM INT HUP; echo pid=\\$\\$; while :; do sleep 0.05; done; true\"; true");
  job.wait_until("pid=", 2);
  const std::vector<pid_t> pids = job.pids();
  REQUIRE(pids.size() == 2);
  kill(job.pid, SIGKILL);
  CHECK(job.wait().signal == SIGKILL);
  CHECK(all_end(pids, 3));
}

TEST_CASE("a stopped launcher goes on where it was; killed while stopped it leaves nothing") {
  const Background job(2, "echo pid=$$; sleep 0.3; seq 20000; exit 4", {"--no-prefix"});
  job.wait_until("pid=", 2);
  kill(job.pid, SIGSTOP);
  std::this_thread::sleep_for(std::chrono::milliseconds(600));  // the ranks fill their pipes
  kill(job.pid, SIGCONT);
  CHECK(job.wait().code == 4);
  CHECK(contains(job.output(), "\n20000\n"));

  const Background killed(2, "echo pid=$$; exec sleep 100");
  killed.wait_until("pid=", 2);
  kill(killed.pid, SIGSTOP);
  kill(killed.pid, SIGKILL);
  CHECK(killed.wait().signal == SIGKILL);
  CHECK(all_end(killed.pids(), 3));
}

TEST_CASE("a rank may close its output, and who left its group may keep it") {
  const double begin = ranks::now();
  CHECK(run_script(2, "exec >&- 2>&-; sleep 0.1; exit $((RANK * 6))").code == 6);
  const Background job(1, "setsid sleep 30 & echo pid=$!; exit 3");
  CHECK(job.wait().code == 3);
  // One that never stops writing.
  const Background noisy(1, "setsid yes & echo pid=$! >&2; sleep 0.2; exit 5",
                         {"--filter-ranks", "0"});
  CHECK(noisy.wait().code == 5);
  CHECK(ranks::now() - begin < 10 * ranks::kPatience);
  for (const auto* left : {&job, &noisy}) {
    REQUIRE(!left->pids().empty());
    kill(left->pids()[0], SIGKILL);
  }
}

TEST_CASE("100 MB of output arrive whole") {
  const Ended e = run({"-n", "2", "--no-prefix", "sh", "-c",
                       "exec head -c 50000000 /dev/zero | tr '\\0' x | fold -w 1000"});
  CHECK(e.code == 0);
  CHECK(std::count(e.output.begin(), e.output.end(), 'x') == 100000000);
}

TEST_CASE("many ranks that end at once") {
  CHECK(run({"-n", "64", "true"}).code == 0);
  CHECK(run({"-n", "64", "false"}).code == 1);
}

TEST_CASE("a reader who does not read delays output, not the end of the others") {
  int ends[2];
  REQUIRE(pipe2(ends, O_CLOEXEC) == 0);
  const TemporaryFolder folder;
  const pid_t pid = ranks::start(
      command_line({"-n", "2", "sh", "-c",
                    "if [ $RANK = 0 ]; then echo $$ > " + (folder / "pid") +
                        "; exec yes; fi; while [ ! -s " + (folder / "pid") +
                        " ]; do sleep 0.01; done; sleep 0.3; echo the reason >&2; exit 9"}),
      ends[1], {});
  close(ends[1]);
  const double deadline = ranks::now() + 10 * ranks::kPatience;
  std::string text;
  while ((text = get_file(folder / "pid")).empty() || text.back() != '\n') {
    ranks::require(ranks::now() < deadline, "rank 0 never started");
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  CHECK(all_end({std::stoi(text)}, 5));
  // Then somebody reads.
  std::string output;
  char buffer[1 << 16];
  for (ssize_t n; (n = read(ends[0], buffer, sizeof buffer)) > 0;)
    output.append(buffer, static_cast<size_t>(n));
  close(ends[0]);
  CHECK(ranks::wait_for(pid, ranks::now() + 10 * ranks::kPatience).code == 9);
  CHECK(contains(output, "\n[0] y\n"));
  CHECK(contains(output, "its last lines:\n  the reason\n"));
}

TEST_CASE("output that nobody will read keeps no launcher from a signal") {
  int ends[2];
  REQUIRE(pipe2(ends, O_CLOEXEC) == 0);
  const pid_t pid = ranks::start(
      command_line({"--grace", "0.2", "sh", "-c", "yes | head -n 100000"}), ends[1], {});
  close(ends[1]);
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  kill(pid, SIGTERM);
  const Ended e = ranks::wait_for(pid, ranks::now() + 10 * ranks::kPatience);
  close(ends[0]);
  CHECK(!e.hung);
}

TEST_CASE("signals that the launcher was started with ignored stay ignored") {
  const int file = ranks::new_file();
  const pid_t pid = ranks::start({"sh", "-c",
                                  "trap '' HUP; exec " + launcher() +
                                      " --grace 0.1 -n 2 sh -c 'echo ready; sleep 0.5; echo done'"},
                                 file, {});
  const double deadline = ranks::now() + 10 * ranks::kPatience;
  while (sorted_lines(ranks::read_all(file)) != "[0] ready\n[1] ready\n") {
    ranks::require(ranks::now() < deadline, "the ranks are not ready: " + ranks::read_all(file));
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  kill(pid, SIGHUP);
  CHECK(ranks::wait_for(pid, deadline).code == 0);
  CHECK(sorted_lines(ranks::read_all(file)) == "[0] done\n[0] ready\n[1] done\n[1] ready\n");
  close(file);
  // Without SIGCHLD no death would be noticed.
  const int other = ranks::new_file();
  const pid_t deaf = ranks::start(
      {"env", "--ignore-signal=CHLD", launcher(), "-n", "2", "sh", "-c", "exit 3"}, other, {});
  CHECK(ranks::wait_for(deaf, ranks::now() + 10 * ranks::kPatience).code == 3);
  close(other);
}

TEST_CASE("--max-restarts: all ranks start again, each time reported") {
  const TemporaryFolder folder;
  const Ended e = run_script(
      2,
      "echo attempt $LOCKSTEP_ATTEMPT/$TORCHELASTIC_RESTART_COUNT/$TORCHELASTIC_MAX_RESTARTS; "
      "[ $LOCKSTEP_ATTEMPT = 2 ] && exit 0; here=" +
          folder.path().string() +
          "/$LOCKSTEP_ATTEMPT; if [ $RANK = 0 ]; then touch $here; exec sleep 60; fi; "
          "while [ ! -e $here ]; do sleep 0.01; done; exit 3",
      {"--max-restarts", "5", "--log-dir", folder / "logs"});
  CHECK(e.code == 0);
  CHECK(contains(e.output, "failed with exit code 3"));
  CHECK(contains(e.output, "lockstep-run: restarting (1 of 5)\n"));
  CHECK(contains(e.output, "lockstep-run: restarting (2 of 5)\n"));
  CHECK(!contains(e.output, "(3 of 5)"));
  for (const std::string attempt : {"0", "1", "2"})
    for (const std::string rank : {"0", "1"})
      CHECK(get_file(folder / ("logs/attempt_" + attempt + "/rank_" + rank + ".out")) ==
            "attempt " + attempt + "/" + attempt + "/5\n");
}

TEST_CASE("restarts come to an end, and are not for wrong usage or signals") {
  const auto restarts = [](const Ended& e) {
    const std::string text = "lockstep-run: restarting (";
    int n = 0;
    for (size_t at = 0; (at = e.output.find(text, at)) != std::string::npos; ++at) ++n;
    return n;
  };
  const Ended always = run_script(2, "exit 7", {"--max-restarts", "3"});
  CHECK(always.code == 7);
  CHECK(restarts(always) == 3);
  for (const int code : {2, 126, 127}) {
    const Ended usage = run_script(2, "exit " + std::to_string(code), {"--max-restarts", "3"});
    CHECK(usage.code == code);
    CHECK(restarts(usage) == 0);
    CHECK(contains(usage.output, "not restarted: exit code " + std::to_string(code)));
  }
  const Ended missing = run({"--max-restarts", "3", "-n", "2", "./no-such-program"});
  CHECK(missing.code == 127);
  CHECK(restarts(missing) == 0);

  const Background told(2, "echo pid=$$; exec sleep 100", {"--max-restarts", "3"});
  told.wait_until("pid=", 2);
  kill(told.pid, SIGTERM);
  const Ended e = told.wait();
  CHECK(e.code == 128 + SIGTERM);
  CHECK(!contains(told.output(), "restarting"));
  CHECK(all_end(told.pids(), 3));
}

TEST_CASE("a signal that kills a rank is a failure to restart after") {
  const Ended e =
      run_script(2, "[ $LOCKSTEP_ATTEMPT = 0 ] && kill -KILL $$; exit 0", {"--max-restarts", "1"});
  CHECK(e.code == 0);
  CHECK(contains(e.output, "was killed by signal 9"));
  CHECK(contains(e.output, "restarting (1 of 1)"));
}

// Four epochs of one step, saved each; in its first attempt rank 1 may be made to die in the third.
TEST_CASE("rank: trains" * doctest::skip()) {
  using namespace lockstep;
  const std::string folder = std::getenv("LOCKSTEP_TEST_FOLDER");
  const auto saved = [&](int epoch) { return folder + "/" + std::to_string(epoch); };
  const auto group = dist::init();
  manual_seed(3);
  nn::Linear net{3, 2};
  int epoch = 0;  // the last one that is complete
  while (std::filesystem::exists(saved(epoch + 1))) ++epoch;
  if (epoch > 0) net.load(saved(epoch));
  std::printf("attempt %s goes on after epoch %d\n", std::getenv("LOCKSTEP_ATTEMPT"), epoch);
  dist::DistributedDataParallel ddp{net, group};
  optim::SGD opt{net.parameters(), {.lr = 0.1}};
  while (++epoch <= 4) {
    if (epoch == 3 && group.rank() == 1 && std::getenv("LOCKSTEP_TEST_DIES") &&
        std::getenv("LOCKSTEP_ATTEMPT") == std::string("0"))
      kill(getpid(), SIGKILL);
    const float v = static_cast<float>(epoch + 10 * group.rank());
    const Tensor x = tensor<float>({v, 0.5f, -v}).reshape({1, 3});  // [1, 3]
    opt.zero_grad();
    square(ddp(x)).mean().backward();
    opt.step();
    dist::run_on_main(group, [&] { net.save(saved(epoch)); });
  }
}

TEST_CASE("a restarted job that saves its epochs ends where an undisturbed one does") {
  const TemporaryFolder whole, disturbed;
  const std::string self = std::filesystem::read_symlink("/proc/self/exe");
  const auto train = [&](const TemporaryFolder& folder, bool dies) {
    std::map<std::string, std::string> variables{{"LOCKSTEP_TEST_FOLDER", folder.path()}};
    if (dies) variables["LOCKSTEP_TEST_DIES"] = "1";
    return run({"-n", "2", "--max-restarts", "1", self, "--test-case=rank: trains", "--no-skip"},
               variables);
  };
  const Ended undisturbed = train(whole, false);
  CHECK(undisturbed.code == 0);
  CHECK(!contains(undisturbed.output, "restarting"));
  const Ended restarted = train(disturbed, true);
  CHECK(restarted.code == 0);
  CHECK(contains(restarted.output, "restarting (1 of 1)"));
  CHECK(contains(restarted.output, "[1] attempt 1 goes on after epoch 2\n"));
  REQUIRE(!get_file(whole / "4").empty());
  CHECK(get_file(whole / "4") == get_file(disturbed / "4"));
  CHECK(get_file(whole / "3") != get_file(whole / "4"));
}
