// Store's inside: connections to the server, one per call under way, and the server itself on the
// rank that serves.
#pragma once

#include <mutex>

#include <lockstep/distributed/peer_error.h>
#include <lockstep/distributed/store.h>
#include <lockstep/distributed/store/data.h>
#include <lockstep/distributed/store/server.h>
#include <lockstep/distributed/store/wait_board.h>

namespace lockstep::dist {

class Store::Client {
 public:
  explicit Client(Credentials mine, Milliseconds timeout)
      : mine_(std::move(mine)), timeout_(timeout) {}
  ~Client();

  /// Takes the address for the job's; invalid and errno when that is taken.
  bool serve(const SocketAddress& where);

  enum class Contact { open, closed, refused, met };
  /// One attempt to connect to what may be the job's server. `why` tells how it failed. Throws
  /// DistError when it is the job's server, and this process is none of its ranks.
  Contact contact(const SocketAddress& where, Milliseconds patience, Clock::time_point deadline,
                  std::string& why);

  /// Sends a request and returns the body of the answer.
  struct Answer {
    store_wire::Reply kind;
    std::string body;
  };
  Answer ask(StoreRequest request);
  /// Sends one that has no answer, if that can be done at once.
  void tell(const StoreRequest& request);

  const Origin& origin() const { return origin_; }
  const Credentials& mine() const { return mine_; }
  Milliseconds timeout() const { return timeout_; }
  const SocketAddress& server_address() const { return server_address_; }
  const SocketAddress& local_address() const { return local_address_; }
  WaitBoard& waits() { return waits_; }
  StoreServer* server() const { return server_.get(); }
  /// Why the server is gone; empty while it is not.
  std::string gone() const;
  bool server_left() const;
  bool server_is_silent() const;

 private:
  Fd open(const SocketAddress& where, bool main, Milliseconds patience, Clock::time_point deadline,
          std::string& why, Contact& how);
  Fd take_connection(Clock::time_point deadline);
  void give_back(Fd connection);
  enum class Loss { none, left, died, silent };
  [[noreturn]] void lose_server(Loss how);

  /// Blocks until the connection has something to read; false when the deadline has passed or
  /// another call has found that the server is gone.
  bool has_news(int connection, Clock::time_point deadline) const;

  const Origin origin_;
  Credentials mine_;
  Milliseconds timeout_;
  ServerId server_id_ = 0;
  std::unique_ptr<StoreServer> server_;
  SocketAddress server_address_, local_address_;
  mutable std::mutex mutex_;
  std::vector<Fd> idle_;  // the first one that was opened is the main one
  int main_ = -1;         // its descriptor
  Loss loss_ = Loss::none;

  WaitBoard waits_;

  std::mutex tell_mutex_;
  Fd tell_connection_;        // of its own, so that no message waits behind an answer
  bool tell_failed_ = false;  // it could not be opened, or broke
};

}  // namespace lockstep::dist
