// Environment: one table of launchers, tried in order.
#include <lockstep/distributed/environment.h>

#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <initializer_list>
#include <optional>

#include <lockstep/tensor/error.h>

namespace lockstep::dist {

namespace {

struct Launcher {
  const char* name;
  const char *rank, *size, *local_rank, *local_size;  // variables
};
constexpr Launcher kLaunchers[] = {
    {"lockstep-run", "LOCKSTEP_RANK", "LOCKSTEP_WORLD_SIZE", "LOCKSTEP_LOCAL_RANK",
     "LOCKSTEP_LOCAL_WORLD_SIZE"},
    {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"},
    {"mpirun (Open MPI)", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
     "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"},
    {"mpiexec (PMI)", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
    {"srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", nullptr},
};

class Reader {
 public:
  explicit Reader(const GetVariable& get) : get_(get) {}

  const char* text(const char* name) const {
    const char* value = name ? get_(name) : nullptr;
    return value && *value ? value : nullptr;
  }
  std::string first_of(std::initializer_list<const char*> names) const {
    for (const char* name : names)
      if (const char* value = text(name)) return value;
    return {};
  }
  std::optional<int> number(const char* name) const {
    const char* value = text(name);
    if (!value) return std::nullopt;
    int n = 0;
    const char* end = value + std::string_view(value).size();
    const auto [stop, error] = std::from_chars(value, end, n);
    LOCKSTEP_CHECK(error == std::errc() && stop == end && n >= 0, DistError, "init: ", name,
                   " must be a number that is not negative, got \"", value, "\"");
    return n;
  }

 private:
  const GetVariable& get_;
};

bool is_loopback(std::string_view address) {
  return address == "localhost" || address == "::1" || address.substr(0, 4) == "127.";
}

// Whether this launcher started the process; the pair is checked.
bool started_by(const Launcher& launcher, const Reader& read, Environment& env) {
  const bool slurm = std::string_view(launcher.name) == "srun";
  const char *rank = read.text(launcher.rank), *size = read.text(launcher.size);
  // A batch script has SLURM_PROCID as well: only a step says how many tasks it has.
  if ((!rank && !size) || (slurm && !size)) return false;
  const auto half = [&](const char* set, const char* unset) {
    fail<DistError>("init: ", set, " is set but ", unset, " is not; a launcher sets both");
  };
  if (!rank) half(launcher.size, launcher.rank);
  if (!size) half(launcher.rank, launcher.size);
  env.rank = *read.number(launcher.rank);
  env.size = *read.number(launcher.size);
  LOCKSTEP_CHECK(env.size >= 1, DistError, "init: ", launcher.size, " must be at least 1, got ",
                 env.size);
  LOCKSTEP_CHECK(env.rank < env.size, DistError, "init: ", launcher.rank, " must be less than ",
                 launcher.size, ", got rank ", env.rank, " of ", env.size);
  env.launcher = launcher.name;
  return true;
}

// LOCAL_* where the launcher gives them; otherwise derived.
void read_host(const Launcher& launcher, const Reader& read, Environment& env) {
  const auto local_rank = read.number(launcher.local_rank),
             local_size = read.number(launcher.local_size);
  const auto nodes = launcher.local_size ? std::nullopt : read.number("SLURM_STEP_NUM_NODES");
  if (local_size)
    env.one_host = *local_size == env.size;
  else if (nodes)
    env.one_host = *nodes == 1;
  else
    env.one_host = env.master_addr.empty() || is_loopback(env.master_addr);
  env.local_size = local_size.value_or(env.one_host ? env.size : 1);
  env.local_rank = local_rank.value_or(env.one_host ? env.rank : 0);
  LOCKSTEP_CHECK(!local_size || *local_size >= 1, DistError, "init: ", launcher.local_size,
                 " must be at least 1");
  LOCKSTEP_CHECK(!local_rank || !local_size || *local_rank < *local_size, DistError,
                 "init: ", launcher.local_rank, " must be less than ", launcher.local_size,
                 ", got ", env.local_rank, " of ", env.local_size);
}

}  // namespace

Environment read_environment(const GetVariable& get) {
  const Reader read(get);
  Environment env;
  const Launcher* by = nullptr;
  for (const Launcher& launcher : kLaunchers)
    if (started_by(launcher, read, env)) {
      by = &launcher;
      break;
    }
  env.master_addr = read.first_of({"MASTER_ADDR"});
  env.master_port = read.first_of({"MASTER_PORT"});
  if (!by) return env;
  env.token = read.first_of({"LOCKSTEP_TOKEN"});
  env.host_id = read.first_of({"LOCKSTEP_HOST_ID"});
  if (by->rank == std::string_view("RANK") && !read.text("TORCHELASTIC_RUN_ID"))
    env.launcher = "RANK and WORLD_SIZE";
  env.run_id = read.first_of(
      {"LOCKSTEP_RUN_ID", "TORCHELASTIC_RUN_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"});
  if (by->size == std::string_view("SLURM_STEP_NUM_TASKS"))
    env.run_id = str_cat(read.first_of({"SLURM_JOB_ID"}), ".", read.first_of({"SLURM_STEP_ID"}));
  for (const char* name : {"LOCKSTEP_ATTEMPT", "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"})
    if (const auto n = read.number(name)) {
      env.attempt = *n;
      break;
    }
  read_host(*by, read, env);
  if (by->size == std::string_view("PMI_SIZE") && env.run_id.empty() && env.one_host)
    env.run_id = str_cat("mpiexec-", getppid());  // one proxy starts all ranks of a host
  return env;
}

Environment read_environment() {
  return read_environment([](const char* name) { return std::getenv(name); });
}

double join_timeout_seconds(const GetVariable& get) {
  const char* value = get("LOCKSTEP_JOIN_TIMEOUT");
  if (!value || !*value) return 60;
  double seconds = 0;  // from_chars: strtod would expect the locale's decimal point
  const std::string_view text = value;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), seconds);
  LOCKSTEP_CHECK(error == std::errc() && end == text.data() + text.size() &&
                     std::isfinite(seconds) && seconds > 0,
                 DistError,
                 "init: LOCKSTEP_JOIN_TIMEOUT must be a positive number of seconds, got \"", value,
                 "\"");
  return seconds;
}

}  // namespace lockstep::dist
