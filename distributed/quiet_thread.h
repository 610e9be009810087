// Threads of the library. They take no signals: a broken connection must not kill the process by
// SIGPIPE, and the program's handlers are for the program's threads.
#pragma once

#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include <lockstep/distributed/limits.h>
#include <lockstep/tensor/error.h>
#include <lockstep/tensor/process.h>

namespace lockstep::dist {

/// Throws DistError where the system allows no further thread; `what` names it.
template <class F>
std::thread quiet_thread(const std::string& what, F f) {
  std::thread thread;
  try {
    with_signals_blocked([&] {
      thread = std::thread([f = std::move(f)]() mutable {
        const LibraryThread counted;
        f();
      });
    });
  } catch (const std::system_error&) {
    fail<DistError>(thread_limit_text(what));
  }
  return thread;
}

}  // namespace lockstep::dist
