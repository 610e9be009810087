// What launch variables mean, launcher by launcher, and what is refused.
#include <doctest/doctest.h>

#include <map>

#include <lockstep/distributed/environment.h>
#include <lockstep/tensor/error.h>

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

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
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
      {{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"MPI_LOCALRANKID", "0"}, {"MPI_LOCALNRANKS", "1"}});
  CHECK(pmi.size == 2);
  CHECK(!pmi.one_host);
  CHECK(!read({{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"MPI_LOCALNRANKS", "2"}}).run_id.empty());

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

TEST_CASE("a batch script without srun is a group of one") {
  CHECK(read({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}, {"SLURM_LOCALID", "0"}}).size == 1);
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
