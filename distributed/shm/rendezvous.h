// The rendezvous of a job's ranks on one host. Rank 0 listens on an abstract Unix socket, whose
// name no file system knows and no crash leaves behind; the others connect, and get the file of the
// shared memory. Each rank locks one byte of that file: the kernel releases the lock when the
// process ends, however it ends, and gives it to no child, so a byte without a lock is a rank that
// died. Later memory comes through a socket on which each rank listens (mailbox.h).
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
  uint64_t number = 0;  // of this meeting, drawn by rank 0: no other one has it
  Fd file;              // of the memory, with the ranks' locks. The process must open it only here:
                        // closing any other descriptor of it would release the lock
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

/// Locks the byte of `rank`; throws DistError where the system refuses.
void lock_byte(int file, int rank);
/// Whether another process holds that lock.
bool byte_is_locked(int file, int rank);

/// A hash of what the layout of the shared memory depends on: builds that differ in it must not
/// meet.
uint64_t shared_layout();

// The two sides of it, up to the point where a rank has everything; join() lets all confirm it.
Meeting host_meeting(const MeetingPoint& point, size_t bytes);
Meeting visit_meeting(const MeetingPoint& point);

}  // namespace lockstep::dist
