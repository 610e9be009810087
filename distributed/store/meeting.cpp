// The meeting of ranks over TCP. The launcher's own store may hold MASTER_PORT, and anything else
// the ports after it, so a list of ports is tried and only a handshake decides.
#include <algorithm>
#include <cerrno>
#include <charconv>
#include <thread>

#include <lockstep/distributed/limits.h>
#include <lockstep/distributed/log.h>
#include <lockstep/distributed/shm/rendezvous.h>
#include <lockstep/distributed/store/client.h>
#include <lockstep/tensor/warning.h>

namespace lockstep::dist {

namespace {

constexpr int kDefaultPort = 29500, kMorePorts = 16;

int master_port(const Environment& env) {
  if (env.master_port.empty()) return kDefaultPort;
  int port = 0;
  const char* end = env.master_port.data() + env.master_port.size();
  const auto [stop, error] = std::from_chars(env.master_port.data(), end, port);
  LOCKSTEP_CHECK(error == std::errc() && stop == end && port >= 1 && port <= 65535, DistError,
                 "init: MASTER_PORT must be a port of 1 .. 65535, got \"", env.master_port, "\"");
  return port;
}

// Where rank 0 listens: the interface that MASTER_ADDR names, if that is here and reaches farther
// than this host; else all.
SocketAddress place_to_listen(const Environment& env, const SocketAddress& master, int port) {
  SocketAddress where = master;
  if (!env.one_host && master.is_loopback()) return any_address(port);
  where.set_port(0);
  if (!listen_at(where)) where = any_address(port);
  where.set_port(port);
  return where;
}

}  // namespace

std::shared_ptr<Store> meet(const Environment& env, Milliseconds timeout) {
  LOCKSTEP_CHECK(env.one_host || !env.master_addr.empty(), DistError,
                 "init: ranks on several hosts meet at rank 0's host: set MASTER_ADDR to its name "
                 "or address");
  open_standard_descriptors();
  const Clock::time_point deadline = deadline_after(timeout);
  const int first = master_port(env), last = std::min(first + kMorePorts, 65535);
  const SocketAddress master =
      env.one_host ? loopback_address(first) : resolve(env.master_addr, first)[0];
  auto client = std::make_unique<Store::Client>(Credentials{.run_id = env.run_id,
                                                            .attempt = env.attempt,
                                                            .rank = env.rank,
                                                            .size = env.size,
                                                            .token = env.token},
                                                timeout);
  std::string why;
  bool open = false;

  if (env.rank == 0) {
    if (env.token.empty())
      warn(
          "init: LOCKSTEP_TOKEN is not set, so whoever reaches rank 0's port can join the job; set "
          "it to the same secret on all ranks");
    SocketAddress where = place_to_listen(env, master, first);
    for (int port = first; port <= last && !client->server(); ++port) {
      where.set_port(port);
      if (client->serve(where)) break;
      LOCKSTEP_CHECK(errno == EADDRINUSE || errno == EACCES, DistError, "init: cannot listen at ",
                     where.text(), ": ", error_text(errno));
    }
    LOCKSTEP_CHECK(client->server(), DistError, "init: no port of ", first, " .. ", last,
                   " is free on rank 0's host; choose another MASTER_PORT");
    SocketAddress own = client->server()->address();
    if (own.host() == any_address(0).host() || own.host() == "0.0.0.0")
      own = loopback_address(own.port());
    open = client->contact(own, Milliseconds(5000), deadline + std::chrono::seconds(5), why) ==
           Store::Client::Contact::open;
    LOCKSTEP_CHECK(open, DistError, "init: rank 0 cannot reach its own store: ", why,
                   client->server()->trouble());
    log_info(str_cat("the store is at ", client->server()->address().text()));
  }

  const Clock::time_point start = Clock::now();
  Milliseconds patience(300), pause(10);
  std::string refusals;
  bool logged = false;
  while (!open) {
    std::string refused;
    SocketAddress where = master;
    for (int port = first; port <= last && !open; ++port) {
      where.set_port(port);
      const auto result = client->contact(where, patience, deadline, why);
      open = result == Store::Client::Contact::open;
      if (result == Store::Client::Contact::refused || result == Store::Client::Contact::met)
        refused += str_cat("; ", why);
      if (Clock::now() >= deadline) break;
    }
    if (open) break;
    if (!refused.empty()) refusals = refused;
    const std::string missing =
        missing_text(env.size, {0}, timeout, str_cat(master.text(), " .. ", last, refusals));
    LOCKSTEP_CHECK(Clock::now() < deadline, DistError, "init: ", missing);
    if (!logged && Clock::now() - start >= std::chrono::seconds(5)) {
      logged = true;
      log_info(str_cat("still waiting: ", missing));
    }
    std::this_thread::sleep_for(std::min(pause, Milliseconds(milliseconds_until(deadline))));
    pause = std::min(pause * 2, Milliseconds(200));
    patience = std::min(patience * 2, Milliseconds(2000));
  }
  std::shared_ptr<Store> store(new Store(std::move(client)));
  store->join(std::max(Milliseconds(milliseconds_until(deadline)), Milliseconds(1)), timeout);
  // The others may still be using it when rank 0 is done already.
  store->expect_readers(std::chrono::seconds(3));
  return store;
}

}  // namespace lockstep::dist
