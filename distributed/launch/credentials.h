// Messages on Unix sockets with the sender's process and user, as the kernel knows them.
#pragma once

#include <sys/socket.h>
#include <sys/types.h>

#include <cstddef>

namespace lockstep::dist {

/// From now on each message that this socket receives says who sent it.
bool receive_credentials(int socket);

struct Received {
  ssize_t bytes;  // 0 at the end of a connection; -1: nothing is there, or an error
  ucred sender;   // pid 0 where the kernel did not say
};
/// Receives one message into a buffer of `size` bytes; the rest of a longer one is lost.
Received receive(int socket, void* buffer, size_t size);

}  // namespace lockstep::dist
