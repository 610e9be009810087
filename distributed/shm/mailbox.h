// Mailbox: how later memory gets from one rank's process to others. Each rank listens on an
// abstract Unix socket named after the job and the rank; whoever hands out memory connects to each
// taker, and leaves one message with the descriptor there. Both ends check that the other is the
// same user's; noise is dropped.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <lockstep/distributed/shm/peers.h>
#include <lockstep/distributed/shm/wire.h>

namespace lockstep::dist {

class Mailbox {
 public:
  /// `job` is the name of the job's meeting point. Throws DistError when somebody holds the name.
  Mailbox(const std::string& job, int rank);

  /// Why nothing more can come from a rank; empty while it lives.
  using Lost = std::function<std::string(int rank)>;
  /// Makes memory of `bytes` bytes and gives it to all members but the first, which is this rank. A
  /// member that is lost is left out. Throws OutOfMemory, there and here, when there is none, and
  /// DistError when a member's box stays full until the deadline.
  std::shared_ptr<Segment> hand_out(const std::vector<int>& members, uint64_t tag, size_t bytes,
                                    Clock::time_point deadline, const Lost& lost);
  /// What rank `from` handed out under this tag.
  std::shared_ptr<Segment> take(int from, uint64_t tag, size_t bytes, Clock::time_point deadline,
                                const Lost& lost);

 private:
  struct Kept {
    Message message;
    Fd file;
  };
  std::string name_of(int rank) const { return str_cat(job_, "-", rank); }
  bool deliver(int rank, const Message& message, std::span<const int> descriptors);
  void receive();

  std::string job_;
  int rank_;
  Fd listener_;
  Fd spare_;  // a descriptor to give up where none is left, so that the takers can be told
  std::mutex mutex_;
  std::vector<Fd> callers_;  // connected, and not yet heard
  std::vector<Kept> kept_;   // heard, and not yet asked for
};

}  // namespace lockstep::dist
