// Fd's close, and the table of descriptors that forked children do not get. It is a bit per number,
// so the handler of fork() allocates nothing and takes no lock.
#include <lockstep/distributed/fd.h>

#include <fcntl.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>

namespace lockstep::dist {

namespace {

constexpr int kMostDescriptors = 1 << 20;  // as many as Linux allows by default
std::atomic<uint64_t> kept[kMostDescriptors / 64];

// The numbers stay taken, for the child's copies of the owners to close.
void replace_in_child() {
  const int error = errno, nothing = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  for (int word = 0; word < kMostDescriptors / 64; ++word)
    for (uint64_t bits = kept[word].load(std::memory_order_relaxed); bits; bits &= bits - 1) {
      kept[word].store(0, std::memory_order_relaxed);
      const int fd = word * 64 + __builtin_ctzll(bits);
      if (nothing < 0 || dup3(nothing, fd, O_CLOEXEC) < 0) close(fd);
    }
  if (nothing >= 0) close(nothing);
  errno = error;
}

uint64_t bit_of(int fd) { return uint64_t{1} << (fd % 64); }

}  // namespace

Fd& Fd::keep_from_children() {
  static const int registered = pthread_atfork(nullptr, nullptr, replace_in_child);
  if (registered == 0 && fd_ >= 0 && fd_ < kMostDescriptors)
    kept[fd_ / 64].fetch_or(bit_of(fd_), std::memory_order_relaxed);
  return *this;
}

void Fd::reset() {
  if (fd_ < 0) return;
  if (fd_ < kMostDescriptors && kept[fd_ / 64].load(std::memory_order_relaxed) & bit_of(fd_))
    kept[fd_ / 64].fetch_and(~bit_of(fd_), std::memory_order_relaxed);
  ::close(std::exchange(fd_, -1));
}

}  // namespace lockstep::dist
