// How a rank tells lockstep-run that a failure elsewhere has reached it. All ranks of a job fail
// within moments of each other; the launcher blames one that has sent no note, whatever the order
// in which it learns of their ends.
//
// A note is one datagram to the abstract Unix socket that LOCKSTEP_FAILURE_SOCKET names.
#pragma once

#include <cstdint>

#include <lockstep/tensor/export.h>

namespace lockstep::dist {

struct FailureNote {
  static constexpr uint64_t kMagic = 0x4c4f434b4e4f5445;  // "LOCKNOTE"
  uint64_t magic = kMagic;
  int64_t rank = 0;
};

/// An operation of this rank's groups has failed because of a peer: it died, left, aborted, is late
/// or disagrees. Sends one note for each process, before the error reaches the program, so that it
/// is there however the program ends. Does nothing under other launchers.
LOCKSTEP_API void note_failed_peer() noexcept;
/// This rank has aborted a group for a failure of its own: it sends no note from here on.
LOCKSTEP_API void suppress_failure_note() noexcept;

}  // namespace lockstep::dist
