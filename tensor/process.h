// Fork detection, and the number of threads that may run the program's code. After fork() the child has
// copies of its parent's objects, but neither its threads nor its rank; an Origin tells an object
// whether it is in the process that made it.
#pragma once

#include <cstdint>
#include <functional>

#include <lockstep/tensor/export.h>

namespace lockstep {

/// A member of objects that own threads, locks or connections, which a forked child must neither
/// use nor destroy: it leaks them.
class LOCKSTEP_API Origin {
 public:
  Origin();
  bool is_here() const;

 private:
  uint64_t process_;
};

/// Counts the calling thread as one of the library's: while this lives it runs none of the
/// program's code. May be nested.
class LOCKSTEP_API LibraryThread {
 public:
  LibraryThread();
  ~LibraryThread();
  LibraryThread(const LibraryThread&) = delete;
};
/// The same for threads that another library has started for this one (by > 0) or ended (by < 0).
LOCKSTEP_API void count_library_threads(int by);
/// How many other threads of this process may run the program's code; 1 where the system does not
/// say how many there are.
LOCKSTEP_API int foreign_threads();

/// Runs f, on this thread, with signals blocked; threads that it starts inherit that, so they take
/// none of the program's. What a thread does to itself (SIGSEGV, SIGABRT, ...) and SIGPROF stay as
/// they are.
LOCKSTEP_API void with_signals_blocked(const std::function<void()>& f);

}  // namespace lockstep
