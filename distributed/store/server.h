// StoreServer: what rank 0 runs for the job's Store: one thread, one poll loop, no lock on the data.
// Nobody can hold it up: sockets never block, whoever has not proved that it belongs to the job may
// send a few hundred bytes and has a few seconds, and what is kept is bounded.
#pragma once

#include <memory>
#include <string>
#include <thread>

#include <lockstep/distributed/fd.h>
#include <lockstep/distributed/store/handshake.h>
#include <lockstep/distributed/store/socket.h>

namespace lockstep::dist {

class StoreServer {
 public:
  /// Serves the job of `mine` on a listening socket.
  StoreServer(Fd listener, Credentials mine);
  /// Says goodbye to every client.
  ~StoreServer();
  StoreServer(const StoreServer&) = delete;

  const SocketAddress& address() const { return address_; }
  /// This host's address as ranks of other hosts see it; empty when none has come from elsewhere.
  std::string outward_address() const;
  /// "; the store cannot ..." when it has no descriptor for another connection; empty when all is well.
  std::string trouble() const;
  /// At its end the server then waits so long for the other ranks to leave first.
  void expect_readers(std::chrono::milliseconds at_most);

 private:
  class Loop;
  SocketAddress address_;
  std::shared_ptr<Loop> loop_;
  std::thread thread_;
};

}  // namespace lockstep::dist
