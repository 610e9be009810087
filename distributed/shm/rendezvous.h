// The meeting of a job's ranks on one host. Rank 0 listens on an abstract Unix socket, whose name
// no file system knows and no crash leaves behind; the others connect. There each rank gets the
// shared memory and the reading end of every other rank's life line: a pipe that only that rank
// holds open, so that its end of file is the notice of the rank's death. Later memory comes through
// a socket on which each rank listens (mailbox.h).
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <lockstep/distributed/environment.h>
#include <lockstep/distributed/shm/peers.h>
#include <lockstep/distributed/shm/wire.h>

namespace lockstep::dist {

/// What a rank has when all have met.
struct Meeting {
  std::shared_ptr<Segment> memory;
  uint64_t number = 0;    // of this meeting, drawn by rank 0: no other one has it
  Fd life;                // the writing end of this rank's own life line
  std::vector<Fd> lives;  // by rank: the reading ends of the others'
  std::vector<Fd> links;  // until all are ready: rank 0's to each rank, or the one to rank 0
};

/// Where and with whom to meet.
struct LOCKSTEP_API MeetingPoint {
  std::string name;   // of the abstract socket, without its leading zero byte
  std::string where;  // for messages
  int rank, size;
  Milliseconds timeout;

  static MeetingPoint of(const Environment& env, Milliseconds timeout);
  /// "1/2 ranks joined within 2 s: rank 1 is missing; did you start it with srun?"
  std::string missing_text(const std::vector<int>& missing) const;
};

/// "1/2 ranks joined within 1 s: rank 1 is missing; did you start it with srun? (WHERE)"
std::string missing_text(int size, const std::vector<int>& missing, Milliseconds within,
                         std::string_view where);

/// Joins the other ranks and shares `bytes` bytes of zeroed memory with them. Throws DistError, on
/// every rank that waits, when some are missing at the deadline; OutOfMemory on all when there is
/// no such memory.
LOCKSTEP_API std::unique_ptr<Peers> join(const Environment& env, size_t bytes,
                                         Milliseconds timeout);

// The two sides of it, up to the point where a rank has everything; join() lets all confirm it.
Meeting host_meeting(const MeetingPoint& point, size_t bytes);
Meeting visit_meeting(const MeetingPoint& point);

}  // namespace lockstep::dist
