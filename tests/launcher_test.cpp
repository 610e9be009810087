// lockstep-run, as its users meet it: exit codes, options, output, variables.
#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/stat.h>

#include <lockstep/distributed/group.h>

#include "launches.h"
#include "temporary_folder.h"

using namespace launches;

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
  CHECK(run({"--bind", "everywhere", "true"}).code == 2);
  CHECK(run({"--tee", "1", "true"}).code == 2);
  CHECK(run({"--max-restarts", "-1", "true"}).code == 2);
  CHECK(run({"--standalone", "--master-port", "1234", "true"}).code == 2);
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

TEST_CASE("--log-dir keeps each rank's output, --tee says what is shown as well") {
  const TemporaryFolder folder;
  const auto shown = [&](std::vector<std::string> options) {
    options.insert(options.end(), {"--log-dir", folder / "logs"});
    const Ended e = run_script(2, "echo out $RANK; echo err $RANK >&2", options);
    CHECK(e.code == 0);
    for (const std::string r : {"0", "1"})
      for (const std::string kind : {"out", "err"})
        CHECK(get_file(folder / ("logs/attempt_0/rank_" + r + "." + kind)) ==
              kind + " " + r + "\n");
    std::filesystem::remove_all(folder / "logs");
    return sorted_lines(e.output);
  };
  CHECK(shown({}) == "[0] err 0\n[0] out 0\n[1] err 1\n[1] out 1\n");
  CHECK(shown({"--tee", "3"}) == shown({}));
  CHECK(shown({"--tee", "2"}) == "[0] err 0\n[1] err 1\n");
  CHECK(shown({"--tee", "1", "--filter-ranks", "1"}) == "[1] out 1\n");
  CHECK(shown({"--tee", "0"}) == "");
  put_file(folder / "file", "");
  const Ended bad = run({"--log-dir", folder / "file", "true"});
  CHECK(bad.code == 127);
  CHECK(contains(bad.output, "file/attempt_0/rank_0.out"));
}

TEST_CASE("--log-dir: a log file that takes no more says so") {
  const TemporaryFolder folder;
  const int file = ranks::new_file();
  const pid_t pid =
      ranks::start({"sh", "-c",
                    "(ulimit -f 8; exec " + launcher() + " --log-dir " + folder.path().string() +
                        " sh -c 'seq 5000; echo hello') | grep -v '\\] [0-9]'"},
                   file, {});
  CHECK(ranks::wait_for(pid, ranks::now() + 10 * ranks::kPatience).code == 0);
  CHECK(ranks::read_all(file) ==
        "[0] lockstep-run: this stream's log file ends here: File too large\n[0] hello\n");
  close(file);
}

TEST_CASE("--log-dir follows no symbolic link below the folder, and waits for no FIFO") {
  const TemporaryFolder folder;
  put_file(folder / "precious", "untouched");
  const auto refused = [&](const std::string& why) {
    const Ended e = run({"--log-dir", folder / "logs", "echo", "hello"});
    CHECK(e.code == 127);
    CHECK(contains(e.output, "logs/attempt_0/rank_0.out"));
    CHECK(contains(e.output, why));
    CHECK(get_file(folder / "precious") == "untouched");
    std::filesystem::remove_all(folder / "logs");
  };
  std::filesystem::create_directories(folder / "logs/attempt_0");
  std::filesystem::create_symlink(folder / "precious", folder / "logs/attempt_0/rank_0.out");
  refused("symbolic link");
  std::filesystem::create_directories(folder / "logs");
  std::filesystem::create_symlink(folder.path(), folder / "logs/attempt_0");
  refused("symbolic link");
  std::filesystem::create_directories(folder / "logs/attempt_0");
  REQUIRE(mkfifo((folder / "logs/attempt_0/rank_0.out").c_str(), 0666) == 0);
  refused("No such device");
  // The folder itself may be one.
  std::filesystem::create_directories(folder / "real");
  std::filesystem::create_symlink(folder / "real", folder / "logs");
  CHECK(run({"--log-dir", folder / "logs", "echo", "hello"}).code == 0);
  CHECK(get_file(folder / "real/attempt_0/rank_0.out") == "hello\n");
}

TEST_CASE("lockstep-run writes lines of 4 MiB whole, and cuts longer ones between characters") {
  const auto line_of = [](int characters) {  // of three bytes each
    return run({"-n", "1", "--no-prefix", "sh", "-c",
                "yes \u3042 | head -n " + std::to_string(characters) + " | tr -d '\\n'; echo"})
        .output;
  };
  const std::string whole = line_of(150000);
  CHECK(whole.size() == 450001);
  CHECK(std::count(whole.begin(), whole.end(), '\n') == 1);
  const std::string cut = line_of(1500000);  // 4.3 MiB
  const std::string mark = " [cut]\n";
  const size_t at = cut.find(mark);
  REQUIRE(at != std::string::npos);
  CHECK(at % 3 == 0);
  CHECK(at > (4 << 20) - 4);
  CHECK(cut.size() == 4500001 + mark.size());
}

// Descriptors 0-2 would be the next pipes and sockets, and what ranks print would be read there. In a
// process namespace, so that nothing else can be signalled.
TEST_CASE("lockstep-run with closed standard descriptors runs all ranks to their end") {
  std::vector<std::string> alone{"unshare", "--pid", "--fork", "--kill-child", "--mount-proc"};
  if (geteuid() != 0) alone.insert(alone.begin() + 1, {"--user", "--map-root-user"});
  const auto in_namespace = [&](const std::string& script) {
    std::vector<std::string> command = alone;
    command.insert(command.end(), {"sh", "-c", script});
    const int file = ranks::new_file();
    const pid_t pid = ranks::start(command, file, {});
    const Ended e = ranks::wait_for(pid, ranks::now() + 10 * ranks::kPatience);
    close(file);
    return e;
  };
  if (in_namespace("true").code != 0) {
    MESSAGE("skipped: this user may not make a process namespace");
    return;
  }
  for (const std::string closed : {"<&-", ">&-", "2>&-", "<&- >&- 2>&-"}) {
    CAPTURE(closed);
    const TemporaryFolder folder;
    const Ended e =
        in_namespace("exec " + launcher() +
                     " -n 2 sh -c 'head -c 2000 /dev/urandom; echo text >&2; sleep 0.1; "
                     "cat; touch " +
                     folder.path().string() + "/$RANK' " + closed);
    CHECK(!e.hung);
    CHECK(e.code == 0);
    CHECK(std::filesystem::exists(folder / "0"));
    CHECK(std::filesystem::exists(folder / "1"));
  }
}

TEST_CASE("long options may be spelled with underscores, and values given by =") {
  CHECK(run({"--nproc_per_node=2", "--no_prefix", "echo", "--nproc_per_node"}).output ==
        "--nproc_per_node\n--nproc_per_node\n");
  CHECK(run({"--nproc-per-node", "2", "--filter_ranks", "1", "--standalone", "--nnodes=1", "echo"})
            .output == "[1] \n");
  CHECK(!contains(run({"--help"}).output, "nproc_per_node"));
}

TEST_CASE("-n auto and gpu") {
  const std::string processors = std::to_string(std::thread::hardware_concurrency());
  CHECK(run({"-n", "auto", "--filter-ranks", "0", "sh", "-c", "echo $WORLD_SIZE"}).output ==
        "[0] " + processors + "\n");
  const std::string here = std::filesystem::read_symlink("/proc/self/exe").parent_path();
  const auto on_gpus = [&](const std::string& n) {
    return run({"-n", "gpu", "--no-prefix", "sh", "-c", "echo $RANK/$WORLD_SIZE"},
               {{"LD_LIBRARY_PATH", here + "/fake_cuda"}, {"LOCKSTEP_FAKE_DEVICES", n}});
  };
  CHECK(sorted_lines(on_gpus("3").output) == "0/3\n1/3\n2/3\n");
  const Ended none = on_gpus("0");
  CHECK(none.code == 2);
  CHECK(contains(none.output, "gpu needs a CUDA device, and this process sees none"));
}

TEST_CASE("several nodes: numbers, the common run id, and what they need") {
  const auto node = [](const std::string& number, std::vector<std::string> more = {}) {
    more.insert(more.begin(), {"-n", "2", "--nnodes", "3", "--node-rank", number, "--master-addr",
                               "10.0.0.7", "--no-prefix"});
    more.insert(
        more.end(),
        {"sh", "-c",
         "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $GROUP_RANK/$GROUP_WORLD_SIZE "
         "$MASTER_ADDR:$MASTER_PORT $LOCKSTEP_RUN_ID \"$LOCKSTEP_TOKEN\""});
    return run(more, {{"LOCKSTEP_TOKEN", "sesame"}});
  };
  const std::string second = sorted_lines(node("1").output);
  std::smatch found;
  REQUIRE(std::regex_search(second, found,
                            std::regex("10.0.0.7:29400 (lockstep-[0-9a-f]{16}) sesame")));
  const std::string tail = " 10.0.0.7:29400 " + found[1].str() + " sesame\n";
  CHECK(second == "2/6 0/2 1/3" + tail + "3/6 1/2 1/3" + tail);
  CHECK(sorted_lines(node("2").output) == "4/6 0/2 2/3" + tail + "5/6 1/2 2/3" + tail);
  CHECK(!contains(node("2", {"--master-port", "29401"}).output, found[1].str()));
  CHECK(contains(node("0", {"--run-id", "tuesday"}).output, ":29400 tuesday sesame"));
  CHECK(contains(node("0", {"--rdzv_id", "friday"}).output, ":29400 friday sesame"));
  CHECK(sorted_lines(node("1", {"--filter-ranks", "3"}).output) == "3/6 1/2 1/3" + tail);

  const auto error = [](std::vector<std::string> arguments) {
    const Ended e = run(std::move(arguments));
    CHECK(e.code == 2);
    return e.output;
  };
  CHECK(contains(error({"--nnodes", "2", "--master-addr", "h", "true"}), "needs --node-rank"));
  CHECK(contains(error({"--nnodes", "2", "--node-rank", "0", "true"}), "need --master-addr"));
  const std::vector<std::string> two{"--nnodes", "2", "--master-addr", "h", "--node-rank"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), two.begin(), two.end());
    more.push_back("true");
    return error(more);
  };
  CHECK(contains(with({"2"}), "--node-rank must be less than --nnodes, got 2 of 2"));
  CHECK(contains(with({"0", "--master-port", "0"}), "need one --master-port"));
  CHECK(contains(with({"0", "--max-restarts", "1"}), "--max-restarts works on one node"));
  CHECK(contains(with({"0", "--standalone"}), "--standalone"));
}

TEST_CASE("the job's token: new for each job, the same for its ranks, never shown") {
  const auto token = [](const std::map<std::string, std::string>& variables) {
    return run({"-n", "2", "--no-prefix", "sh", "-c", "echo $LOCKSTEP_TOKEN"}, variables).output;
  };
  const std::string first = token({}), second = token({});
  REQUIRE(first.size() == 2 * 65);
  CHECK(first.substr(0, 65) == first.substr(65));
  CHECK(std::regex_match(first.substr(0, 64), std::regex("[0-9a-f]{64}")));
  CHECK(first != second);
  CHECK(token({{"LOCKSTEP_TOKEN", "mine"}}) == "mine\nmine\n");
  CHECK(contains(run({"--dry-run", "true"}).output, " LOCKSTEP_TOKEN=... "));
  CHECK(!contains(run({"--dry-run", "true"}, {{"LOCKSTEP_TOKEN", "mine"}}).output, "mine"));
  // Each node would make another.
  const std::vector<std::string> node{
      "--nnodes", "2",  "--node-rank",           "0", "--master-addr", "10.0.0.7",
      "sh",       "-c", "echo =$LOCKSTEP_TOKEN="};
  const Ended without = run(node);
  CHECK(contains(without.output, "[0] ==\n"));
  CHECK(contains(without.output, "lockstep-run: LOCKSTEP_TOKEN is not set"));
  CHECK(!contains(run(node, {{"LOCKSTEP_TOKEN", "mine"}}).output, "is not set"));
}

TEST_CASE("--bind core") {
  const int n = static_cast<int>(std::thread::hardware_concurrency());
  const std::string show = "grep Cpus_allowed_list /proc/self/status; echo $OMP_NUM_THREADS";
  const auto bound = [&](int ranks) { return run_script(ranks, show, {"--bind", "core"}).output; };
  const std::string all = run_script(1, show).output;
  CHECK(bound(1) == all);
  // One processor each.
  const std::string each = bound(n);
  std::smatch found;
  std::vector<std::string> seen;
  const std::regex line("Cpus_allowed_list:\t([0-9]+)\n");
  for (std::sregex_iterator it(each.begin(), each.end(), line), end; it != end; ++it)
    seen.push_back((*it)[1]);
  std::sort(seen.begin(), seen.end());
  CHECK(seen.size() == static_cast<size_t>(n));
  CHECK(std::unique(seen.begin(), seen.end()) == seen.end());
  for (int r = 0; r < n; ++r) CHECK(contains(each, "[" + std::to_string(r) + "] 1\n"));
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
