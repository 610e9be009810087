// TCP sockets by poll(): every one is non-blocking.
#include <lockstep/distributed/store/socket.h>

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include <lockstep/distributed/limits.h>
#include <lockstep/tensor/error.h>
#include <lockstep/tensor/system_text.h>

namespace lockstep::dist {

namespace {

Fd new_socket(int family, int type) {
  Fd socket(::socket(family, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  socket.keep_from_children();
  return socket;
}

const sockaddr* raw(const SocketAddress& a) {
  return reinterpret_cast<const sockaddr*>(&a.storage);
}

template <class Step>
Io transfer(int socket, size_t size, short event, Clock::time_point deadline, Step step) {
  for (size_t done = 0; done < size;) {
    const ssize_t n = step(done);
    if (n > 0) {
      done += static_cast<size_t>(n);
      continue;
    }
    if (n == 0 || (errno != EAGAIN && errno != EINTR)) return Io::closed;
    const int left = milliseconds_until(deadline);
    if (left == 0) return Io::late;
    pollfd p{socket, event, 0};
    poll(&p, 1, left);
  }
  return Io::done;
}

}  // namespace

int SocketAddress::port() const {
  // sin_port and sin6_port lie in the same place.
  return ntohs(reinterpret_cast<const sockaddr_in&>(storage).sin_port);
}
void SocketAddress::set_port(int port) {
  reinterpret_cast<sockaddr_in&>(storage).sin_port = htons(static_cast<uint16_t>(port));
}

bool SocketAddress::is_loopback() const {
  if (storage.ss_family == AF_INET)
    return ntohl(reinterpret_cast<const sockaddr_in&>(storage).sin_addr.s_addr) >> 24 == 127;
  const auto& six = reinterpret_cast<const sockaddr_in6&>(storage).sin6_addr;
  if (IN6_IS_ADDR_V4MAPPED(&six)) return six.s6_addr[12] == 127;
  return storage.ss_family == AF_INET6 && IN6_IS_ADDR_LOOPBACK(&six);
}

std::string SocketAddress::host() const {
  char text[NI_MAXHOST] = "?";
  getnameinfo(raw(*this), length, text, sizeof text, nullptr, 0, NI_NUMERICHOST);
  // What an IPv6 socket calls ::ffff:10.0.0.1 is 10.0.0.1 to everybody else.
  const std::string_view mapped = "::ffff:";
  const std::string host = text;
  return host.starts_with(mapped) ? host.substr(mapped.size()) : host;
}

std::string SocketAddress::text() const {
  const std::string where = host();
  return where.find(':') == std::string::npos ? str_cat(where, ":", port())
                                              : str_cat("[", where, "]:", port());
}

SocketAddress SocketAddress::of_socket(int socket) {
  SocketAddress a;
  a.length = sizeof a.storage;
  if (getsockname(socket, reinterpret_cast<sockaddr*>(&a.storage), &a.length) != 0) a.length = 0;
  return a;
}

std::vector<SocketAddress> resolve(const std::string& host, int port) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  const int error = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  LOCKSTEP_CHECK(error == 0, DistError, "init: cannot resolve \"", host,
                 "\": ", resolver_text(error), "; is MASTER_ADDR right?");
  std::vector<SocketAddress> all;
  for (const addrinfo* a = found; a; a = a->ai_next) {
    SocketAddress one;
    std::memcpy(&one.storage, a->ai_addr, a->ai_addrlen);
    one.length = a->ai_addrlen;
    all.push_back(one);
  }
  freeaddrinfo(found);
  return all;
}

SocketAddress loopback_address(int port) {
  SocketAddress a;
  auto& four = reinterpret_cast<sockaddr_in&>(a.storage);
  four.sin_family = AF_INET;
  four.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  a.length = sizeof four;
  const Fd probe = new_socket(AF_INET, SOCK_DGRAM);
  if (!probe || bind(probe.get(), raw(a), a.length) != 0) {
    auto& six = reinterpret_cast<sockaddr_in6&>(a.storage);
    six = {};
    six.sin6_family = AF_INET6;
    six.sin6_addr = in6addr_loopback;
    a.length = sizeof six;
  }
  a.set_port(port);
  return a;
}

SocketAddress any_address(int port) {
  SocketAddress a;
  // One IPv6 socket serves both families; where there is no IPv6 it is IPv4.
  if (new_socket(AF_INET6, SOCK_STREAM)) {
    auto& six = reinterpret_cast<sockaddr_in6&>(a.storage);
    six.sin6_family = AF_INET6;
    six.sin6_addr = in6addr_any;
    a.length = sizeof six;
  } else {
    auto& four = reinterpret_cast<sockaddr_in&>(a.storage);
    four.sin_family = AF_INET;
    four.sin_addr.s_addr = htonl(INADDR_ANY);
    a.length = sizeof four;
  }
  a.set_port(port);
  return a;
}

Fd listen_at(const SocketAddress& where) {
  Fd socket = new_socket(where.storage.ss_family, SOCK_STREAM);
  const int on = 1, off = 0;
  if (!socket) return {};
  setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (where.storage.ss_family == AF_INET6)
    setsockopt(socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
  if (bind(socket.get(), raw(where), where.length) != 0 || listen(socket.get(), 1024) != 0) {
    const int error = errno;
    socket.reset();
    errno = error;
  }
  return socket;
}

Fd connect_to(const SocketAddress& where, Clock::time_point deadline, std::string& why) {
  Fd socket = new_socket(where.storage.ss_family, SOCK_STREAM);
  int error = socket ? 0 : errno;
  if (socket && connect(socket.get(), raw(where), where.length) != 0) error = errno;
  if (error == EINPROGRESS) {
    pollfd p{socket.get(), POLLOUT, 0};
    error = ETIMEDOUT;
    if (poll(&p, 1, milliseconds_until(deadline)) > 0) {
      socklen_t length = sizeof error;
      getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &length);
    }
  }
  if (error != 0) {
    why = str_cat(where.text(), ": ", error_text(error));
    return {};
  }
  // Among the ports that connecting takes may be the very one that is asked for: a socket that is
  // connected to itself is no server.
  if (SocketAddress::of_socket(socket.get()).text() == where.text()) {
    why = str_cat(where.text(), ": nobody listens");
    return {};
  }
  const int on = 1;
  setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  return socket;
}

std::string address_towards(const SocketAddress& where) {
  // A datagram socket finds its route when it is connected; nothing is sent.
  const Fd socket = new_socket(where.storage.ss_family, SOCK_DGRAM);
  if (!socket || connect(socket.get(), raw(where), where.length) != 0) return {};
  return SocketAddress::of_socket(socket.get()).host();
}

Io send_all(int socket, std::string_view bytes, Clock::time_point deadline) {
  return transfer(socket, bytes.size(), POLLOUT, deadline, [&](size_t done) {
    return send(socket, bytes.data() + done, bytes.size() - done, MSG_NOSIGNAL);
  });
}

Io receive_all(int socket, std::span<char> bytes, Clock::time_point deadline) {
  return transfer(socket, bytes.size(), POLLIN, deadline, [&](size_t done) {
    return recv(socket, bytes.data() + done, bytes.size() - done, 0);
  });
}

}  // namespace lockstep::dist
