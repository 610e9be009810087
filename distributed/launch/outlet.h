// Outlet: one of the launcher's own output streams. What cannot be written at once waits here, so
// that somebody who has stopped reading delays output but neither signals nor deaths.
#pragma once

#include <string>
#include <string_view>

namespace lockstep::dist {

class Outlet {
 public:
  explicit Outlet(int fd) : fd_(fd) {}

  int fd() const { return fd_; }
  /// Whether something waits for the reader; who has more to say should wait too.
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
