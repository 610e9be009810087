// Outlet: one of the launcher's own output streams. What cannot be written at once waits here, so
// that a reader that has stopped delays output, and neither signals nor the reaping of ranks.
#pragma once

#include <string>
#include <string_view>

namespace lockstep::dist {

class Outlet {
 public:
  explicit Outlet(int fd) : fd_(fd) {}

  int fd() const { return fd_; }
  /// Whether output is queued; its sources should pause until it has been written.
  bool congested() const { return !waiting_.empty(); }
  /// Writes what can be written without waiting, and keeps the rest. When nobody reads any more it
  /// is dropped.
  void put(std::string_view text);
  void flush();

 private:
  int fd_;
  std::string waiting_;
};

}  // namespace lockstep::dist
