// Messages between ranks of one host: one fixed record per packet of a Unix socket, and descriptors
// with it. A packet of any other size or without the magic is noise, so nobody can make us wait
// for, or allocate, more.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include <lockstep/distributed/fd.h>

namespace lockstep::dist {

struct Message {
  static constexpr uint64_t kMagic = 0x4C6F636B73746570;  // "Lockstep"
  static constexpr uint32_t kVersion = 2;
  enum Kind : uint32_t {
    hello = 1,
    registered,
    status,
    refused,
    out_of_memory,
    welcome,
    ready,
    go,
    share
  };

  uint64_t magic = kMagic;
  uint32_t version = kVersion;
  uint32_t kind = 0;
  int32_t rank = 0, size = 0;
  uint64_t tag = 0;
  uint64_t bytes = 0;
  uint64_t layout = 0;  // of the shared memory, as the sender's build of the library has it
  char text[1488] = {};

  Message() = default;
  Message(Kind kind, std::string_view words = {}) : kind(kind) {
    words.copy(text, sizeof text - 1);
  }
};

enum class Received { message, nothing, closed, noise };

/// Sends the message, with descriptors; false, and errno, when the peer is gone or takes no more
/// now.
bool send_message(int socket, const Message& message, std::span<const int> descriptors = {});
/// Takes the next packet without waiting; descriptors that came along are appended to
/// `descriptors`.
Received receive_message(int socket, Message& message, std::vector<Fd>& descriptors);
/// The other end's process id; throws nothing, returns -1 if it is another user's.
int peer_pid(int socket);
/// Waits until the socket has something to read or `milliseconds` are over; false then.
bool readable(int socket, int milliseconds);

}  // namespace lockstep::dist
