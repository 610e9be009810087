// The launcher's decisions that need no running rank.
#include <lockstep/distributed/launch_plan.h>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sched.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>

#include <lockstep/distributed/fd.h>
#include <lockstep/tensor/error.h>

namespace lockstep::dist {

int processors() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  return std::max(1, CPU_COUNT(&set));
}

std::string make_run_id() {
  return str_cat("lockstep-", getpid(), "-",
                 std::chrono::system_clock::now().time_since_epoch().count());
}

std::string make_token() {
  unsigned char secret[16];
  LOCKSTEP_CHECK(getrandom(secret, sizeof secret, 0) == sizeof secret, DistError,
                 "lockstep-run: the system has no random numbers");
  std::string token;
  for (const unsigned char byte : secret)
    for (const int half : {byte >> 4, byte & 15}) token += "0123456789abcdef"[half];
  return token;
}

int free_port() {
  const Fd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  auto* where = reinterpret_cast<sockaddr*>(&address);
  const bool bound = socket && bind(socket.get(), where, length) == 0 &&
                     getsockname(socket.get(), where, &length) == 0;
  return bound ? ntohs(address.sin_port) : 29500;  // without a loopback nobody will use it
}

std::vector<std::string> rank_variables(const LaunchOptions& options, int rank,
                                        const std::string& run_id) {
  const int size = options.ranks;
  std::vector<std::string> variables;
  for (const char* prefix : {"LOCKSTEP_", ""}) {
    variables.push_back(str_cat(prefix, "RANK=", rank));
    variables.push_back(str_cat(prefix, "WORLD_SIZE=", size));
    variables.push_back(str_cat(prefix, "LOCAL_RANK=", rank));
    variables.push_back(str_cat(prefix, "LOCAL_WORLD_SIZE=", size));
  }
  variables.push_back(str_cat("LOCKSTEP_RUN_ID=", run_id));
  variables.push_back("LOCKSTEP_ATTEMPT=0");
  variables.push_back("MASTER_ADDR=127.0.0.1");
  variables.push_back(str_cat("MASTER_PORT=", options.master_port));
  variables.push_back("GROUP_RANK=0");
  variables.push_back("GROUP_WORLD_SIZE=1");
  variables.push_back(str_cat("ROLE_RANK=", rank));
  variables.push_back(str_cat("ROLE_WORLD_SIZE=", size));
  variables.push_back("ROLE_NAME=default");
  variables.push_back(str_cat("TORCHELASTIC_RUN_ID=", run_id));
  variables.push_back("TORCHELASTIC_RESTART_COUNT=0");
  variables.push_back("TORCHELASTIC_MAX_RESTARTS=0");
  variables.push_back("TORCHELASTIC_USE_AGENT_STORE=False");
  const char *threads = std::getenv("LOCKSTEP_NUM_THREADS"), *omp = std::getenv("OMP_NUM_THREADS");
  const int share = std::max(1, processors() / size);
  if (!threads && !omp) variables.push_back(str_cat("LOCKSTEP_NUM_THREADS=", share));
  if (!omp)
    variables.push_back(
        str_cat("OMP_NUM_THREADS=", threads ? std::string(threads) : std::to_string(share)));
  return variables;
}

namespace {
std::string quoted(const std::string& word) {
  const bool plain = !word.empty() && std::all_of(word.begin(), word.end(), [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) ||
           std::string_view("_-./=:,+@%").find(c) != std::string_view::npos;
  });
  if (plain) return word;
  std::string text = "'";
  for (const char c : word) text += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return text + "'";
}
}  // namespace

std::string plan_text(const LaunchOptions& options, const std::string& run_id) {
  std::string text;
  for (int r = 0; r < options.ranks; ++r) {
    text += "env";
    for (const std::string& variable : rank_variables(options, r, run_id))
      text += str_cat(" ", quoted(variable));
    for (const std::string& word : options.command) text += str_cat(" ", quoted(word));
    text += '\n';
  }
  return text;
}

}  // namespace lockstep::dist
