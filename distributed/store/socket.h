// TCP sockets with deadlines: resolve, listen, connect, send, receive. Nothing here blocks longer
// than it is told to, and what fails says why.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <chrono>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <lockstep/distributed/deadline.h>
#include <lockstep/distributed/fd.h>

namespace lockstep::dist {

/// Where a socket is: an address of IPv4 or IPv6, and a port.
struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t length = 0;

  int port() const;
  void set_port(int port);
  bool is_loopback() const;
  std::string host() const;  // "127.0.0.1"
  std::string text() const;  // "127.0.0.1:29500", "[::1]:29500"

  static SocketAddress of_socket(int socket);  // this end's
};

/// All addresses of a name or a number. Throws DistError when there are none.
std::vector<SocketAddress> resolve(const std::string& host, int port);
/// The address of this host for itself: 127.0.0.1, or ::1 where there is no IPv4.
SocketAddress loopback_address(int port);
/// Every interface, for listening.
SocketAddress any_address(int port);

/// A listening socket that forked children do not keep, and that can take its port again right
/// after it was closed; invalid when the port is taken or the address is not ours, and errno says
/// which.
Fd listen_at(const SocketAddress& where);
/// A connected socket, non-blocking; invalid when that failed, and `why` says how.
Fd connect_to(const SocketAddress& where, Clock::time_point deadline, std::string& why);
/// This host's numeric address on the interface that reaches `where`; empty when none does.
std::string address_towards(const SocketAddress& where);

/// How sending or receiving ended.
enum class Io { done, closed, late };
Io send_all(int socket, std::string_view bytes, Clock::time_point deadline);
Io receive_all(int socket, std::span<char> bytes, Clock::time_point deadline);

}  // namespace lockstep::dist
