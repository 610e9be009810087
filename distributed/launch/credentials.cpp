#include <lockstep/distributed/launch/credentials.h>

#include <cerrno>
#include <cstring>

namespace lockstep::dist {

bool receive_credentials(int socket) {
  const int on = 1;
  return setsockopt(socket, SOL_SOCKET, SO_PASSCRED, &on, sizeof on) == 0;
}

Received receive(int socket, void* buffer, size_t size) {
  iovec data{buffer, size};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(ucred))];
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  Received got{-1, {0, static_cast<uid_t>(-1), static_cast<gid_t>(-1)}};
  while ((got.bytes = recvmsg(socket, &message, MSG_CMSG_CLOEXEC)) < 0 && errno == EINTR) {
  }
  for (cmsghdr* c = got.bytes < 0 ? nullptr : CMSG_FIRSTHDR(&message); c;
       c = CMSG_NXTHDR(&message, c))
    if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_CREDENTIALS)
      std::memcpy(&got.sender, CMSG_DATA(c), sizeof got.sender);
  return got;
}

}  // namespace lockstep::dist
