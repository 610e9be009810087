// What both sides of a meeting share, and the Peers that come out of it.
#include <lockstep/distributed/hash.h>
#include <lockstep/distributed/shm/rendezvous.h>

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

#include <lockstep/distributed/limits.h>
#include <lockstep/distributed/shm/mailbox.h>
#include <lockstep/distributed/shm/shared_area.h>

namespace lockstep::dist {

namespace {

class ProcessPeers final : public Peers {
 public:
  ProcessPeers(const MeetingPoint& point, Meeting meeting)
      : Peers(point.rank, point.size, meeting.memory),
        meeting_(std::move(meeting)),
        mailbox_(str_cat(point.name, "-", meeting_.number), point.rank) {}

  std::string lost(int rank) override {
    if (byte_is_locked(meeting_.file.get(), rank)) return {};
    return str_cat("(pid ", slot(rank).pid, ") died: its process has ended");
  }

  // No rank goes on before all have mapped the memory and filled their slots. The clients' side ...
  void report_ready(Clock::time_point deadline) {
    const int link = meeting_.links[0].get();
    send_message(link, Message(Message::ready));
    const Message answer = next_message(link, deadline, "rank 0");
    LOCKSTEP_CHECK(answer.kind != Message::out_of_memory, OutOfMemory, answer.text);
    LOCKSTEP_CHECK(answer.kind == Message::go, DistError, answer.text);
    meeting_.links.clear();
  }

  // ... and the server's.
  void wait_for_all(Clock::time_point deadline) {
    Message verdict(Message::go);
    for (int r = 1; r < size() && verdict.kind == Message::go; ++r) {
      try {
        const Message report = next_message(meeting_.links[static_cast<size_t>(r)].get(), deadline,
                                            str_cat("rank ", r));
        if (report.kind != Message::ready) verdict = report;
      } catch (const DistError& e) {
        verdict = Message(Message::refused, e.what());
      }
    }
    for (const Fd& link : meeting_.links)
      if (link) send_message(link.get(), verdict);
    LOCKSTEP_CHECK(verdict.kind != Message::out_of_memory, OutOfMemory, verdict.text);
    LOCKSTEP_CHECK(verdict.kind == Message::go, DistError, verdict.text);
    meeting_.links.clear();
  }

  std::shared_ptr<Segment> share(const std::vector<int>& members, uint64_t tag, size_t bytes,
                                 Clock::time_point deadline) override {
    const auto gone = [this](int r) { return lost(r); };
    return rank() == members[0] ? mailbox_.hand_out(members, tag, bytes, deadline, gone)
                                : mailbox_.take(members[0], tag, bytes, deadline, gone);
  }

 private:
  static Message next_message(int link, Clock::time_point deadline, std::string_view who) {
    Message message;
    std::vector<Fd> none;
    for (;;) {
      const int left = milliseconds_until(deadline);
      LOCKSTEP_CHECK(left > 0, DistError, "init: ", who, " did not confirm the meeting in time");
      if (!readable(link, left)) continue;
      const Received got = receive_message(link, message, none);
      LOCKSTEP_CHECK(got != Received::closed, DistError, "init: ", who,
                     " ended while the ranks met");
      if (got == Received::message) return message;
    }
  }

  Meeting meeting_;
  Mailbox mailbox_;
};

std::string key_of(const Environment& env) {
  return str_cat(env.run_id, "/", env.master_port, "/", env.attempt);
}

}  // namespace

MeetingPoint MeetingPoint::of(const Environment& env, Milliseconds timeout) {
  // The name has room for 107 characters, a run id may be longer.
  return {.name = str_cat("lockstep-", geteuid(), "-", hash_of(key_of(env))),
          .where = str_cat("MASTER_PORT ", env.master_port.empty() ? "unset" : env.master_port,
                           ", run id \"", env.run_id, "\", attempt ", env.attempt),
          .rank = env.rank,
          .size = env.size,
          .timeout = timeout};
}

std::string MeetingPoint::missing_text(const std::vector<int>& missing) const {
  return dist::missing_text(size, missing, timeout, str_cat("meeting on this host: ", where));
}

std::string missing_text(int size, const std::vector<int>& missing, Milliseconds within,
                         std::string_view where) {
  std::string ranks;
  for (size_t i = 0; i < missing.size() && i < 16; ++i) ranks += str_cat(i ? ", " : "", missing[i]);
  if (missing.size() > 16) ranks += ", ...";
  const bool many = missing.size() > 1;
  return str_cat(size - static_cast<int>(missing.size()), "/", size, " ranks joined within ",
                 static_cast<double>(within.count()) / 1000, " s: ", many ? "ranks " : "rank ",
                 ranks, many ? " are" : " is", " missing; did you start ", many ? "them" : "it",
                 " with srun? (", where, ")");
}

namespace {
struct flock byte_of(int rank) {
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  return lock;
}
}  // namespace

void lock_byte(int file, int rank) {
  struct flock mine = byte_of(rank);
  LOCKSTEP_CHECK(fcntl(file, F_SETLK, &mine) == 0, DistError, "init: rank ", rank,
                 " cannot lock its byte of the shared memory: ", error_text(errno));
}

bool byte_is_locked(int file, int rank) {
  struct flock theirs = byte_of(rank);
  return fcntl(file, F_GETLK, &theirs) != 0 || theirs.l_type != F_UNLCK;
}

uint64_t shared_layout() {
  uint64_t hash = 0;
  for (const size_t part :
       {sizeof(RankSlot), SharedArea::bytes_for(2), SharedArea::bytes_for(9), sizeof(Call),
        sizeof(Lane), sizeof(Mark), sizeof(Pair), sizeof(Record), sizeof(size_t), size_t{kLanes},
        kChunkBytes, size_t{kLongestWindow}, static_cast<size_t>(DType::boolean),
        static_cast<size_t>(CallKind::new_group)})
    hash = (hash ^ part) * 0x100000001B3;
  return hash;
}

std::unique_ptr<Peers> join(const Environment& env, size_t bytes, Milliseconds timeout) {
  LOCKSTEP_CHECK(env.size <= 250, DistError,
                 "init: backend shm serves at most 250 ranks on a host, got ", env.size);
  const MeetingPoint point = MeetingPoint::of(env, timeout);
  const Clock::time_point deadline = deadline_after(timeout) + std::chrono::seconds(1);
  Meeting meeting = env.rank == 0 ? host_meeting(point, bytes) : visit_meeting(point);
  auto peers = std::make_unique<ProcessPeers>(point, std::move(meeting));
  peers->fill_slot(getpid());
  if (env.rank == 0)
    peers->wait_for_all(deadline);
  else
    peers->report_ready(deadline);
  return peers;
}

}  // namespace lockstep::dist
