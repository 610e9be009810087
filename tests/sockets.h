// Plain sockets for tests that play the stranger.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <string>
#include <thread>
#include <vector>

namespace sockets {

inline sockaddr_in loopback(int port) {
  sockaddr_in a{};
  a.sin_family = AF_INET;
  a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  a.sin_port = htons(static_cast<uint16_t>(port));
  return a;
}

/// A connected socket, or -1.
inline int connect_to(int port) {
  const int s = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const sockaddr_in a = loopback(port);
  if (connect(s, reinterpret_cast<const sockaddr*>(&a), sizeof a) == 0) return s;
  close(s);
  return -1;
}

/// What comes within the time; with `to_end` only once the other side has closed.
inline std::string read_for(int socket, int milliseconds, bool to_end = false) {
  std::string all;
  for (;;) {
    pollfd p{socket, POLLIN, 0};
    if (poll(&p, 1, milliseconds) <= 0) return to_end ? "still open" : all;
    char buffer[4096];
    const ssize_t n = recv(socket, buffer, sizeof buffer, 0);
    if (n <= 0) return all;
    all.append(buffer, static_cast<size_t>(n));
  }
}

/// Listens on a free port of loopback; with `says` it accepts, and says that to everybody.
class Listener {
 public:
  explicit Listener(std::string says = {}) : says_(std::move(says)) {
    socket_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in a = loopback(0);
    socklen_t length = sizeof a;
    auto* where = reinterpret_cast<sockaddr*>(&a);
    if (bind(socket_, where, length) != 0 || listen(socket_, 64) != 0 ||
        getsockname(socket_, where, &length) != 0)
      return;
    port_ = ntohs(a.sin_port);
    if (!says_.empty())
      thread_ = std::thread([this] {
        for (int s; (s = accept(socket_, nullptr, nullptr)) >= 0;) {
          send(s, says_.data(), says_.size(), MSG_NOSIGNAL);
          taken_.push_back(s);
        }
      });
  }
  ~Listener() {
    shutdown(socket_, SHUT_RDWR);
    if (thread_.joinable()) thread_.join();
    for (const int s : taken_) close(s);
    close(socket_);
  }
  Listener(const Listener&) = delete;
  int port() const { return port_; }

 private:
  std::string says_;
  int socket_ = -1, port_ = -1;
  std::vector<int> taken_;
  std::thread thread_;
};

}  // namespace sockets
