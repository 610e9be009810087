// The launcher's decisions that need no running rank.
#include <lockstep/distributed/launch/plan.h>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include <lockstep/distributed/fd.h>
#include <lockstep/distributed/hash.h>
#include <lockstep/tensor/quota.h>
#include <lockstep/tensor/error.h>

namespace lockstep::dist {

namespace {

const char* get(const char* variable) {
  const char* value = std::getenv(variable);
  return value && *value ? value : nullptr;
}

std::string hex(const unsigned char* bytes, size_t n) {
  std::string text;
  for (size_t i = 0; i < n; ++i) {
    text += "0123456789abcdef"[bytes[i] >> 4];
    text += "0123456789abcdef"[bytes[i] & 15];
  }
  return text;
}

// A unique run id.
std::string new_run_id() {
  return str_cat("lockstep-", getpid(), "-",
                 std::chrono::system_clock::now().time_since_epoch().count());
}

// A run id that all nodes compute alike: a hash of the options that they share.
std::string common_run_id(const LaunchOptions& options) {
  const uint64_t hash = hash_of(str_cat(options.master_addr, ":", options.master_port));
  unsigned char bytes[sizeof hash];
  for (size_t i = 0; i < sizeof hash; ++i)
    bytes[i] = static_cast<unsigned char>(hash >> (8 * (sizeof hash - 1 - i)));
  return str_cat("lockstep-", hex(bytes, sizeof bytes));
}

std::string new_token() {
  unsigned char bytes[32];
  size_t n = 0;
  while (n < sizeof bytes) {
    const ssize_t got = getrandom(bytes + n, sizeof bytes - n, 0);
    LOCKSTEP_CHECK(got > 0 || errno == EINTR, DistError,
                   "launch: cannot make a token: ", std::strerror(errno));
    n += static_cast<size_t>(std::max<ssize_t>(got, 0));
  }
  return hex(bytes, sizeof bytes);
}

// A free TCP port of the loopback interface.
int free_port() {
  const Fd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  auto* where = reinterpret_cast<sockaddr*>(&address);
  const bool bound = socket && bind(socket.get(), where, length) == 0 &&
                     getsockname(socket.get(), where, &length) == 0;
  return bound ? ntohs(address.sin_port) : 29500;  // without a loopback interface it is not used
}

void check(const LaunchOptions& o) {
  LOCKSTEP_CHECK(!o.command.empty(), ValueError, "launch: names no program");
  LOCKSTEP_CHECK(o.ranks >= 1, ValueError, "launch: needs at least one rank, got ", o.ranks);
  LOCKSTEP_CHECK(o.nodes >= 1 && o.node_rank >= 0 && o.node_rank < o.nodes, ValueError,
                 "launch: --node-rank must be less than --nnodes, got ", o.node_rank, " of ",
                 o.nodes);
  for (const int r : o.filter_ranks)
    LOCKSTEP_CHECK(r >= 0 && r < o.world_size(), ValueError, "launch: --filter-ranks: there is no ",
                   "rank ", r, " among ", o.world_size());
  if (o.nodes == 1) return;
  LOCKSTEP_CHECK(!o.master_addr.empty(), ValueError, "launch: ", o.nodes,
                 " nodes need --master-addr, the host of rank 0");
  LOCKSTEP_CHECK(o.master_port != 0, ValueError, "launch: ", o.nodes,
                 " nodes need one --master-port; a free one would be known to one node only");
  LOCKSTEP_CHECK(o.max_restarts == 0, ValueError, "launch: --max-restarts works on one node, not ",
                 o.nodes, ", since a launcher knows only its own ranks; let the cluster start the ",
                 "job again on every node, under another --run-id");
}

}  // namespace

bool user_has_token() { return get("LOCKSTEP_TOKEN"); }

LaunchPlan make_plan(const LaunchOptions& options) {
  check(options);
  LaunchPlan plan;
  plan.run_id = options.run_id;
  if (plan.run_id.empty()) plan.run_id = options.nodes > 1 ? common_run_id(options) : new_run_id();
  // A token made here would be unknown to the other nodes.
  if (options.nodes == 1 && !user_has_token()) plan.token = new_token();
  plan.places = places(options.bind, options.ranks, allowed_processors());
  const int busy =
      std::max(1, lockstep::detail::cpu_quota() / options.ranks);  // threads of a rank that have time to run
  for (Place& place : plan.places) place.threads = std::min(place.threads, busy);
  return plan;
}

std::vector<RankPlan> plan_ranks(const LaunchOptions& options, const LaunchPlan& plan,
                                 int attempt) {
  const char *threads = get("LOCKSTEP_NUM_THREADS"), *omp = get("OMP_NUM_THREADS");
  const std::string master = options.master_addr.empty() ? "127.0.0.1" : options.master_addr;
  const int port = options.master_port ? options.master_port : free_port();
  const int size = options.world_size();
  std::vector<RankPlan> all;
  for (int local_rank = 0; local_rank < options.ranks; ++local_rank) {
    const Place& place = plan.places[static_cast<size_t>(local_rank)];
    RankPlan p;
    p.rank = options.node_rank * options.ranks + local_rank;
    p.processors = place.processors;
    const auto set = [&](const auto&... parts) { p.variables.push_back(str_cat(parts...)); };
    for (const char* prefix : {"LOCKSTEP_", ""}) {
      set(prefix, "RANK=", p.rank);
      set(prefix, "WORLD_SIZE=", size);
      set(prefix, "LOCAL_RANK=", local_rank);
      set(prefix, "LOCAL_WORLD_SIZE=", options.ranks);
    }
    set("LOCKSTEP_RUN_ID=", plan.run_id);
    set("LOCKSTEP_ATTEMPT=", attempt);
    if (!plan.token.empty()) set("LOCKSTEP_TOKEN=", plan.token);
    set("MASTER_ADDR=", master);
    set("MASTER_PORT=", port);
    set("GROUP_RANK=", options.node_rank);
    set("GROUP_WORLD_SIZE=", options.nodes);
    set("ROLE_RANK=", p.rank);
    set("ROLE_WORLD_SIZE=", size);
    set("ROLE_NAME=default");
    set("TORCHELASTIC_RUN_ID=", plan.run_id);
    set("TORCHELASTIC_RESTART_COUNT=", attempt);
    set("TORCHELASTIC_MAX_RESTARTS=", options.max_restarts);
    set("TORCHELASTIC_USE_AGENT_STORE=False");
    if (!threads && !omp) set("LOCKSTEP_NUM_THREADS=", place.threads);
    if (!omp) set("OMP_NUM_THREADS=", threads ? std::string(threads) : str_cat(place.threads));
    all.push_back(std::move(p));
  }
  return all;
}

namespace {
std::string quoted(const std::string& word) {
  const bool plain = !word.empty() && std::all_of(word.begin(), word.end(), [](char c) {
    return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') ||
           std::string_view("_-./=:,+@%").find(c) != std::string_view::npos;
  });
  if (plain) return word;
  std::string text = "'";
  for (const char c : word) text += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return text + "'";
}
}  // namespace

std::string plan_text(const LaunchOptions& options, const std::vector<RankPlan>& ranks) {
  std::string text;
  for (const RankPlan& rank : ranks) {
    for (size_t i = 0; i < rank.processors.size(); ++i)
      text += str_cat(i == 0 ? "taskset -c " : ",", rank.processors[i]);
    text += rank.processors.empty() ? "env" : " env";
    for (const std::string& variable : rank.variables)
      text += variable.starts_with("LOCKSTEP_TOKEN=") ? " LOCKSTEP_TOKEN=..."
                                                      : str_cat(" ", quoted(variable));
    for (const std::string& word : options.command) text += str_cat(" ", quoted(word));
    text += '\n';
  }
  return text;
}

}  // namespace lockstep::dist
