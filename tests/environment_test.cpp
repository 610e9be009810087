// What launch variables mean, launcher by launcher, and what is refused; ranks that such variables
// have started really meet.
#include <doctest/doctest.h>

#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdio>
#include <map>

#include <lockstep/distributed/environment.h>
#include <lockstep/distributed/group.h>
#include <lockstep/tensor/error.h>
#include <lockstep/tensor/ops.h>

#include "texts.h"

using namespace lockstep;
using namespace lockstep::dist;

namespace {

using Variables = std::map<std::string, std::string>;

Environment read(const Variables& v) {
  return read_environment([&](const char* name) -> const char* {
    const auto it = v.find(name);
    return it == v.end() ? nullptr : it->second.c_str();
  });
}

std::string error_of(const Variables& v) {
  try {
    read(v);
  } catch (const DistError& e) {
    return e.what();
  }
  return "no error";
}

}  // namespace

TEST_CASE("nothing set is a group of one") {
  const Environment env = read({});
  CHECK(env.rank == 0);
  CHECK(env.size == 1);
  CHECK(env.one_host);
  CHECK(env.launcher == "no launcher");
}

TEST_CASE("MASTER_ADDR without RANK is a group of one") {
  CHECK(read({{"MASTER_ADDR", "10.0.0.7"}, {"MASTER_PORT", "29500"}}).size == 1);
}

TEST_CASE("torchrun") {
  const Environment env = read({{"RANK", "3"},
                                {"WORLD_SIZE", "4"},
                                {"LOCAL_RANK", "1"},
                                {"LOCAL_WORLD_SIZE", "2"},
                                {"MASTER_ADDR", "127.0.0.1"},
                                {"MASTER_PORT", "29500"},
                                {"TORCHELASTIC_RUN_ID", "job"},
                                {"TORCHELASTIC_RESTART_COUNT", "2"}});
  CHECK(env.launcher == "torchrun");
  CHECK(env.rank == 3);
  CHECK(env.size == 4);
  CHECK(env.local_rank == 1);
  CHECK(env.local_size == 2);
  CHECK(!env.one_host);  // LOCAL_WORLD_SIZE says more than a loopback address
  CHECK(env.run_id == "job");
  CHECK(env.attempt == 2);
  CHECK(env.master_port == "29500");
}

TEST_CASE("lockstep-run's variables come before all others") {
  const Environment env = read({{"LOCKSTEP_RANK", "1"},
                                {"LOCKSTEP_WORLD_SIZE", "2"},
                                {"LOCKSTEP_LOCAL_RANK", "1"},
                                {"LOCKSTEP_LOCAL_WORLD_SIZE", "2"},
                                {"RANK", "5"},
                                {"WORLD_SIZE", "8"},
                                {"LOCKSTEP_RUN_ID", "a"},
                                {"TORCHELASTIC_RUN_ID", "b"}});
  CHECK(env.launcher == "lockstep-run");
  CHECK(env.rank == 1);
  CHECK(env.size == 2);
  CHECK(env.run_id == "a");
}

TEST_CASE("RANK and WORLD_SIZE alone: one host exactly if MASTER_ADDR is unset or loopback") {
  const Variables two{{"RANK", "1"}, {"WORLD_SIZE", "2"}};
  const auto with = [&](const char* address) {
    Variables v = two;
    v["MASTER_ADDR"] = address;
    return read(v);
  };
  CHECK(read(two).one_host);
  CHECK(read(two).local_rank == 1);
  CHECK(with("localhost").one_host);
  CHECK(with("127.0.0.1").one_host);
  CHECK(with("::1").one_host);
  CHECK(!with("10.0.0.7").one_host);
  CHECK(with("10.0.0.7").local_rank == 0);
}

TEST_CASE("mpirun, mpiexec and srun") {
  const Environment ompi = read({{"OMPI_COMM_WORLD_RANK", "1"},
                                 {"OMPI_COMM_WORLD_SIZE", "4"},
                                 {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                                 {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"},
                                 {"PMIX_NAMESPACE", "17"},
                                 {"PMI_RANK", "9"},
                                 {"PMI_SIZE", "10"}});
  CHECK(ompi.launcher == "mpirun (Open MPI)");
  CHECK(ompi.size == 4);
  CHECK(ompi.one_host);
  CHECK(ompi.run_id == "17");

  const Environment pmi = read(
      {{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "2"}});
  CHECK(pmi.size == 2);
  CHECK(pmi.one_host);
  CHECK(!pmi.run_id.empty());

  const Environment srun = read({{"SLURM_PROCID", "2"},
                                 {"SLURM_STEP_NUM_TASKS", "4"},
                                 {"SLURM_LOCALID", "2"},
                                 {"SLURM_STEP_NUM_NODES", "1"},
                                 {"SLURM_JOB_ID", "77"},
                                 {"SLURM_STEP_ID", "3"},
                                 {"MASTER_ADDR", "node7"}});
  CHECK(srun.launcher == "srun");
  CHECK(srun.rank == 2);
  CHECK(srun.one_host);
  CHECK(srun.run_id == "77.3");
  CHECK(!read({{"SLURM_PROCID", "2"}, {"SLURM_STEP_NUM_TASKS", "4"}, {"SLURM_STEP_NUM_NODES", "2"}})
             .one_host);
}

TEST_CASE("a Slurm step on several nodes, and one that was requeued") {
  const Environment env = read({{"SLURM_PROCID", "5"},
                                {"SLURM_STEP_NUM_TASKS", "8"},
                                {"SLURM_LOCALID", "1"},
                                {"SLURM_STEP_NUM_NODES", "2"},
                                {"SLURM_NTASKS", "64"},
                                {"SLURM_RESTART_COUNT", "3"}});
  CHECK(env.rank == 5);
  CHECK(env.size == 8);
  CHECK(env.local_rank == 1);
  CHECK(!env.one_host);
  CHECK(env.attempt == 3);
}

TEST_CASE("a batch script without srun is a group of one") {
  CHECK(read({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}, {"SLURM_LOCALID", "0"}}).size == 1);
  CHECK(read({{"SLURM_JOB_ID", "7"}, {"SLURM_NNODES", "2"}, {"SLURM_NTASKS", "8"}}).size == 1);
}

TEST_CASE("a run id is one that all hosts agree on, and the token and the host's id are read") {
  const Environment pmi = read({{"PMI_RANK", "1"}, {"PMI_SIZE", "4"}, {"MPI_LOCALNRANKS", "2"}});
  CHECK(!pmi.one_host);
  CHECK(pmi.run_id.empty());
  const Environment env = read({{"RANK", "1"},
                                {"WORLD_SIZE", "2"},
                                {"LOCKSTEP_TOKEN", "a secret"},
                                {"LOCKSTEP_HOST_ID", "rack 7"}});
  CHECK(env.token == "a secret");
  CHECK(env.host_id == "rack 7");
}

TEST_CASE("half-set pairs name what is missing") {
  CHECK(contains(error_of({{"RANK", "0"}}), "WORLD_SIZE is not"));
  CHECK(contains(error_of({{"WORLD_SIZE", "2"}}), "RANK is not"));
  CHECK(contains(error_of({{"OMPI_COMM_WORLD_RANK", "0"}}), "OMPI_COMM_WORLD_SIZE is not"));
  CHECK(contains(error_of({{"PMI_SIZE", "2"}}), "PMI_RANK is not"));
  CHECK(contains(error_of({{"SLURM_STEP_NUM_TASKS", "2"}}), "SLURM_PROCID is not"));
  CHECK(contains(error_of({{"OMPI_COMM_WORLD_SIZE", "2"}}), "OMPI_COMM_WORLD_RANK is not"));
  CHECK(contains(error_of({{"PMI_RANK", "2"}}), "PMI_SIZE is not"));
  CHECK(contains(error_of({{"RANK", ""}, {"WORLD_SIZE", "2"}}), "RANK is not"));
  CHECK(contains(error_of({{"LOCKSTEP_RANK", "0"}, {"RANK", "0"}, {"WORLD_SIZE", "1"}}),
                 "LOCKSTEP_WORLD_SIZE is not"));
}

TEST_CASE("numbers that are none, and ranks beyond the size, name the variable") {
  CHECK(contains(error_of({{"RANK", "one"}, {"WORLD_SIZE", "2"}}), "RANK must be a number"));
  CHECK(contains(error_of({{"RANK", "1x"}, {"WORLD_SIZE", "2"}}), "\"1x\""));
  CHECK(contains(error_of({{"RANK", "-1"}, {"WORLD_SIZE", "2"}}), "RANK must be a number"));
  CHECK(contains(error_of({{"RANK", "0"}, {"WORLD_SIZE", "2.5"}}), "WORLD_SIZE must be a number"));
  CHECK(contains(error_of({{"RANK", "0"}, {"WORLD_SIZE", "99999999999"}}),
                 "WORLD_SIZE must be a number"));
  CHECK(contains(error_of({{"RANK", "0"}, {"WORLD_SIZE", "0"}}), "WORLD_SIZE must be at least 1"));
  CHECK(contains(error_of({{"RANK", "2"}, {"WORLD_SIZE", "2"}}),
                 "RANK must be less than WORLD_SIZE"));
  CHECK(contains(
      error_of(
          {{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "2"}, {"LOCAL_WORLD_SIZE", "2"}}),
      "LOCAL_RANK must be less than LOCAL_WORLD_SIZE"));
  CHECK(
      contains(error_of({{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"TORCHELASTIC_RESTART_COUNT", "x"}}),
               "TORCHELASTIC_RESTART_COUNT"));
}

TEST_CASE("the variable that an error names is the launcher's own") {
  CHECK(contains(error_of({{"SLURM_PROCID", "2"}, {"SLURM_STEP_NUM_TASKS", "2"}}),
                 "SLURM_PROCID must be less than SLURM_STEP_NUM_TASKS, got rank 2 of 2"));
  CHECK(contains(error_of({{"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "4(x2)"}}),
                 "SLURM_STEP_NUM_TASKS must be a number"));
  CHECK(contains(
      error_of(
          {{"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "2"}, {"SLURM_STEP_NUM_NODES", "one"}}),
      "SLURM_STEP_NUM_NODES must be a number"));
  CHECK(contains(error_of({{"OMPI_COMM_WORLD_RANK", "3"}, {"OMPI_COMM_WORLD_SIZE", "2"}}),
                 "OMPI_COMM_WORLD_RANK must be less than OMPI_COMM_WORLD_SIZE"));
  CHECK(contains(error_of({{"PMI_RANK", "0x1"}, {"PMI_SIZE", "2"}}), "PMI_RANK must be a number"));
  CHECK(contains(error_of({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", " 0"}}),
                 "LOCAL_RANK must be a number"));
  CHECK(contains(error_of({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"LOCAL_WORLD_SIZE", "0"}}),
                 "LOCAL_WORLD_SIZE must be at least 1"));
}

TEST_CASE("LOCKSTEP_JOIN_TIMEOUT") {
  const auto seconds = [](const char* value) {
    return join_timeout_seconds([=](const char*) { return value; });
  };
  CHECK(seconds(nullptr) == 60);
  CHECK(seconds("2.5") == 2.5);
  CHECK_THROWS_AS(seconds("soon"), DistError);
  CHECK_THROWS_AS(seconds("0"), DistError);
  CHECK_THROWS_AS(seconds("-1"), DistError);
}

// What tests/interop.sh starts under real launchers: one line, and a sum whose terms differ by rank
// and element.
TEST_CASE("rank: report" * doctest::skip()) {
  const Environment env = read_environment();
  const Group group = init();
  Tensor t = tensor<float>({1, 10, 100}) * static_cast<float>(group.rank() + 1);
  group.all_reduce(t);
  const auto sum = t.to_vector<float>();
  std::printf("report: launcher=%s rank=%d/%d local=%d/%d attempt=%d sum=%g,%g,%g\n",
              env.launcher.c_str(), group.rank(), group.size(), group.local_rank(), env.local_size,
              env.attempt, sum[0], sum[1], sum[2]);
}

namespace {

const std::string kSelf = std::filesystem::read_symlink("/proc/self/exe");
const std::vector<std::string> kReport{kSelf, "--test-case=rank: report", "--no-skip"};

// "report: launcher=... rank=R/2 ..." of each of two ranks, as it must be.
void check_reports(const std::string& output, const std::string& launcher) {
  for (int r = 0; r < 2; ++r) {
    const std::string number = std::to_string(r);
    const std::string line = "report: launcher=" + launcher + " rank=" + number +
                             "/2 local=" + number + "/2 attempt=0 sum=3,30,300\n";
    INFO(output);
    CHECK(contains(output, line));
  }
}

// Two ranks in these variables, in which % stands for the rank.
std::string output_of_two(const Variables& variables) {
  std::vector<pid_t> pids;
  const int file = ranks::new_file();
  for (int r = 0; r < 2; ++r) {
    Variables own = variables;
    for (auto& [name, value] : own)
      if (value == "%") value = std::to_string(r);
    pids.push_back(ranks::start(kReport, file, own));
  }
  const double deadline = ranks::now() + 20 * ranks::kPatience;
  for (const pid_t pid : pids) CHECK(ranks::wait_for(pid, deadline).code == 0);
  const std::string output = ranks::read_all(file);
  close(file);
  return output;
}

}  // namespace

TEST_CASE("ranks of a Slurm step meet, MASTER_ADDR or not") {
  Variables step{{"SLURM_PROCID", "%"},  {"SLURM_STEP_NUM_TASKS", "2"},
                 {"SLURM_LOCALID", "%"}, {"SLURM_STEP_NUM_NODES", "1"},
                 {"SLURM_STEP_ID", "0"}, {"SLURM_JOB_ID", std::to_string(getpid())},
                 {"SLURM_NTASKS", "2"}};
  check_reports(output_of_two(step), "srun");
  step["MASTER_ADDR"] = "10.255.255.1";  // the step is on one host, wherever that points
  step["MASTER_PORT"] = "29500";
  check_reports(output_of_two(step), "srun");
}

TEST_CASE("ranks of mpiexec's variables meet") {
  check_reports(output_of_two({{"PMI_RANK", "%"},
                               {"PMI_SIZE", "2"},
                               {"MPI_LOCALRANKID", "%"},
                               {"MPI_LOCALNRANKS", "2"}}),
                "mpiexec (PMI)");
}

TEST_CASE("on one host MASTER_PORT may be taken, as torchrun's own store takes it") {
  const int store = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  auto* where = reinterpret_cast<sockaddr*>(&address);
  REQUIRE(bind(store, where, length) == 0);
  REQUIRE(listen(store, 1) == 0);
  REQUIRE(getsockname(store, where, &length) == 0);
  check_reports(output_of_two({{"RANK", "%"},
                               {"WORLD_SIZE", "2"},
                               {"LOCAL_RANK", "%"},
                               {"LOCAL_WORLD_SIZE", "2"},
                               {"MASTER_ADDR", "127.0.0.1"},
                               {"MASTER_PORT", std::to_string(ntohs(address.sin_port))},
                               {"TORCHELASTIC_RUN_ID", "none"},
                               {"TORCHELASTIC_RESTART_COUNT", "0"}}),
                "torchrun");
  close(store);
}

TEST_CASE("ranks of Open MPI's mpirun meet") {
  const auto mpirun = [](std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), "mpirun");
    const int file = ranks::new_file();
    ranks::Ended e;
    try {
      const pid_t pid = ranks::start(arguments, file, {});
      e = ranks::wait_for(pid, ranks::now() + 60 * ranks::kPatience);
      e.output = ranks::read_all(file);
    } catch (const std::exception& error) {
      e.output = error.what();
    }
    close(file);
    return e;
  };
  const ranks::Ended version = mpirun({"--version"});
  if (!contains(version.output, "Open MPI")) {
    MESSAGE("skipped: " << version.output);
    return;
  }
  std::vector<std::string> arguments{"--oversubscribe", "-n", "2"};
  if (geteuid() == 0) arguments.insert(arguments.begin(), "--allow-run-as-root");
  arguments.insert(arguments.end(), kReport.begin(), kReport.end());
  const ranks::Ended e = mpirun(arguments);
  CHECK(e.code == 0);
  check_reports(e.output, "mpirun (Open MPI)");
}
