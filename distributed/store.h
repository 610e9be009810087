// Store: a few small values that all processes of a job share, over TCP. Rank 0 keeps them; who is
// let in must know the job's token (store/handshake.h). Ranks meet through it, and backends
// exchange addresses, the reasons of errors and who is gone.
//
//   auto store = dist::meet(environment, timeout);      // one per job; or a Store of your own
//   store->set("address/3", "10.0.0.3:4711");
//   std::string other = store->get("address/0");        // waits for it
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/distributed/environment.h>
#include <lockstep/distributed/process_group.h>

namespace lockstep::dist {

class WaitBoard;

struct StoreOptions {
  std::string address = "127.0.0.1";  // a name or a number
  int port = 0;                       // 0, for the rank that serves: any free one
  int rank = 0, size = 1;             // rank 0 serves
  std::string run_id = {};
  int attempt = 0;
  std::string token = {};
  Milliseconds timeout = std::chrono::seconds(60);  // of connecting, and of calls that name none
};

/// Keys have at most 1 KiB, values 1 MiB, all together 64 MiB. Calls are thread-safe, and each has
/// its own deadline. They throw DistError with the address and the key when the time is over, when
/// the server is gone, and when a limit is passed; and in a forked child, always.
class LOCKSTEP_API Store {
 public:
  /// Rank 0 serves and connects to itself; the others connect, and try again until the timeout.
  /// Throws DistError when the port is taken, when nobody answers in time, and when this process is
  /// refused.
  explicit Store(const StoreOptions& options);
  /// Says goodbye: this rank has left, it did not die.
  ~Store();
  Store(const Store&) = delete;

  int rank() const;
  int size() const;
  int port() const;
  /// "10.0.0.1:29500", the server's.
  std::string where() const;
  /// This host's numeric address, as seen on the way to the server.
  std::string local_address() const;

  /// Waits until all ranks have connected. Throws DistError that names who is missing.
  void join(Milliseconds timeout);

  void set(const std::string& key, std::string value);
  /// set() that waits for no answer: some microseconds. What the server does not take at once is
  /// dropped, and nobody hears of it.
  void tell(const std::string& key, std::string value);
  /// Sets it unless it is there; returns what stands.
  std::string set_once(const std::string& key, std::string value);
  /// Waits until the key is there. A timeout of 0 means the store's own.
  std::string get(const std::string& key, Milliseconds timeout = Milliseconds(0));
  /// All of them in one exchange.
  std::vector<std::string> get_all(const std::vector<std::string>& keys,
                                   Milliseconds timeout = Milliseconds(0));
  /// Nothing when it is not there by then.
  std::optional<std::string> try_get(const std::string& key,
                                     Milliseconds timeout = Milliseconds(0));
  /// What stands under each key now; nothing where it is not there.
  std::vector<std::optional<std::string>> look_up(const std::vector<std::string>& keys);
  void wait(const std::vector<std::string>& keys, Milliseconds timeout = Milliseconds(0));
  /// Adds to a number, which is 0 when it is not there; returns the sum.
  int64_t add(const std::string& key, int64_t amount);
  /// Whether it was there.
  bool remove(const std::string& key);

  /// A rank whose connection is lost, or that said goodbye.
  struct Lost {
    int rank = 0;
    int64_t pid = 0;
    bool left = false;    // it said goodbye
    bool silent = false;  // it serves the store, which does not answer any more
    Milliseconds since{0};
    /// "rank 1 (pid 7) died: its connection was closed", "rank 1 has left", "rank 0 does not
    /// answer: ...".
    std::string text() const;
  };
  /// Those that are gone, by rank. Without its server it is rank 0 that is gone, and nothing is
  /// thrown.
  std::vector<Lost> lost();

  /// Where ranks that are blocked in collectives look for deadlocks (store/wait_board.h).
  WaitBoard& waits();

  /// At its end the server, if it is here, waits so long for the others to leave first: they may
  /// want to read what is in it.
  void expect_readers(Milliseconds at_most = Milliseconds(1500));

 private:
  friend std::shared_ptr<Store> meet(const Environment& env, Milliseconds timeout);
  class Client;
  void join(Milliseconds rest, Milliseconds of);  // what is left of a time that messages name
  explicit Store(std::unique_ptr<Client> client);
  std::unique_ptr<Client> client_;
};

/// Meets all ranks of the environment over TCP and returns their store. Rank 0 takes the first free
/// port of MASTER_PORT (29500 where it is unset) .. MASTER_PORT + 16; the others try these until a
/// handshake fits, past whatever else listens there. On one host it is loopback alone; otherwise
/// the interface that reaches MASTER_ADDR. The token is LOCKSTEP_TOKEN; without one rank 0 warns.
/// Throws DistError, on every rank that waits, when some are missing at the deadline.
LOCKSTEP_API std::shared_ptr<Store> meet(const Environment& env, Milliseconds timeout);

}  // namespace lockstep::dist
