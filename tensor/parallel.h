// The thread pool of all ops. Work is cut into blocks whose bounds do not depend on the number of
// threads, so neither do results. Blocks run on the calling thread and on pool threads.
#pragma once

#include <cstdint>
#include <functional>

#include <lockstep/tensor/export.h>

namespace lockstep {

/// How many threads ops started from this thread may use, itself included. Default:
/// LOCKSTEP_NUM_THREADS, else OMP_NUM_THREADS, else the processors that this process may run on, or
/// as many as its control groups' CPU quota keeps busy if these are fewer.
LOCKSTEP_API int get_num_threads();
/// Sets it for this thread (ranks as threads each have their own); n >= 1.
LOCKSTEP_API void set_num_threads(int n);

/// Calls f(begin, end) for consecutive blocks of `block` indices (the last may be shorter) of [0,
/// n), in any order and on any thread. An exception of f is rethrown here once no block runs any
/// more; blocks that have not begun are skipped. A nested call runs on the calling thread alone.
/// Where the system refuses more threads, fewer are used.
LOCKSTEP_API void parallel_for(int64_t n, int64_t block,
                               const std::function<void(int64_t, int64_t)>& f);

}  // namespace lockstep
