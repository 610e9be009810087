// Messages over SOCK_SEQPACKET sockets: sendmsg, recvmsg and SCM_RIGHTS.
#include <lockstep/distributed/shm/wire.h>

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>

namespace lockstep::dist {

namespace {
constexpr size_t kMostDescriptors = 253;  // the kernel's limit for one packet
}

bool send_message(int socket, const Message& message, std::span<const int> descriptors) {
  iovec data{const_cast<Message*>(&message), sizeof message};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMostDescriptors)] = {};
  msghdr packet{};
  packet.msg_iov = &data;
  packet.msg_iovlen = 1;
  if (!descriptors.empty()) {
    packet.msg_control = control;
    packet.msg_controllen = CMSG_SPACE(descriptors.size_bytes());
    cmsghdr* head = CMSG_FIRSTHDR(&packet);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(descriptors.size_bytes());
    std::memcpy(CMSG_DATA(head), descriptors.data(), descriptors.size_bytes());
  }
  ssize_t n;
  do n = sendmsg(socket, &packet, MSG_NOSIGNAL | MSG_DONTWAIT);
  while (n < 0 && errno == EINTR);
  return n == static_cast<ssize_t>(sizeof message);
}

Received receive_message(int socket, Message& message, std::vector<Fd>& descriptors) {
  iovec data{&message, sizeof message};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMostDescriptors)];
  msghdr packet{};
  packet.msg_iov = &data;
  packet.msg_iovlen = 1;
  packet.msg_control = control;
  packet.msg_controllen = sizeof control;
  ssize_t n;
  do n = recvmsg(socket, &packet, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  while (n < 0 && errno == EINTR);
  if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return Received::nothing;
  if (n <= 0) return Received::closed;
  std::vector<Fd> came;  // closed again if the packet is no good
  for (cmsghdr* head = CMSG_FIRSTHDR(&packet); head; head = CMSG_NXTHDR(&packet, head)) {
    if (head->cmsg_level != SOL_SOCKET || head->cmsg_type != SCM_RIGHTS) continue;
    for (size_t at = 0; at + sizeof(int) <= head->cmsg_len - CMSG_LEN(0); at += sizeof(int)) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(head) + at, sizeof fd);
      came.emplace_back(fd);
    }
  }
  // Where no descriptor is free those that came along are dropped, which MSG_CTRUNC tells; the
  // message itself is whole, and its reader sees what is missing.
  const bool whole = n == static_cast<ssize_t>(sizeof message) && !(packet.msg_flags & MSG_TRUNC);
  if (!whole || message.magic != Message::kMagic || message.version != Message::kVersion)
    return Received::noise;
  message.text[sizeof message.text - 1] = '\0';
  std::move(came.begin(), came.end(), std::back_inserter(descriptors));
  return Received::message;
}

int peer_pid(int socket) {
  ucred who{};
  socklen_t length = sizeof who;
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &who, &length) != 0 || who.uid != geteuid())
    return -1;
  return who.pid;
}

bool readable(int socket, int milliseconds) {
  pollfd p{socket, POLLIN, 0};
  return poll(&p, 1, milliseconds) > 0;
}

}  // namespace lockstep::dist
