// Fd: a file descriptor with an owner.
#pragma once

#include <utility>

namespace lockstep::dist {

class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& o) noexcept : fd_(std::exchange(o.fd_, -1)) {}
  Fd& operator=(Fd&& o) noexcept {
    std::swap(fd_, o.fd_);
    o.reset();
    return *this;
  }
  ~Fd() { reset(); }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void reset();

  /// Forked children of this process get another file under its number: they would keep a
  /// connection open that the process's end must close. (Children that call exec are served by
  /// O_CLOEXEC.)
  Fd& keep_from_children();

 private:
  int fd_ = -1;
};

}  // namespace lockstep::dist
