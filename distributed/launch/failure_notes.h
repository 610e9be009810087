// FailureNotes: the launcher's end of failure_note.h: which ranks of one attempt a failure elsewhere
// has reached.
#pragma once

#include <string>
#include <vector>

#include <lockstep/distributed/fd.h>

namespace lockstep::dist {

class FailureNotes {
 public:
  /// Throws DistError when the socket cannot be made.
  FailureNotes();
  /// What the ranks find in their environment: "LOCKSTEP_FAILURE_SOCKET=...".
  const std::string& variable() const { return variable_; }
  /// Takes what has arrived. Datagrams of other users, or that are no notes, are ignored.
  void read();
  bool has(int rank) const;
  int fd() const { return socket_.get(); }

 private:
  Fd socket_;
  std::string variable_;
  std::vector<int64_t> ranks_;
};

}  // namespace lockstep::dist
