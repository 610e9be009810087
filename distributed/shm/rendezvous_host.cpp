// Rank 0's side of a rendezvous: it listens, refuses strangers, and when all are there hands out
// the memory. One poll loop serves all connections, so one that sends nothing delays no other.
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <random>
#include <thread>

#include <lockstep/distributed/limits.h>
#include <lockstep/distributed/log.h>
#include <lockstep/distributed/shm/rendezvous.h>

namespace lockstep::dist {

namespace {

constexpr size_t kMostUnregistered = 256;

class RendezvousServer {
 public:
  explicit RendezvousServer(const MeetingPoint& point);
  Meeting meet(size_t bytes);

 private:
  struct Registered {
    Fd socket;
    bool there() const { return static_cast<bool>(socket); }
  };

  void wait_for_ranks();
  void accept_connections();
  /// True when the connection is dealt with: registered or refused.
  bool register_client(Fd& client);
  void check_connection(int rank);
  void report();
  std::vector<int> missing() const;
  void tell_all(const Message& message) const;
  void hand_out(int rank, const Message& welcome, int file) const;
  [[noreturn]] void give_up(const std::string& text) const;

  const MeetingPoint& point_;
  Fd listener_;
  std::vector<Fd> unregistered_;        // connected, and not yet registered
  std::vector<Registered> registered_;  // by rank
  Clock::time_point start_ = Clock::now();
  Clock::time_point next_report_;
  bool logged_ = false;
};

RendezvousServer::RendezvousServer(const MeetingPoint& point)
    : point_(point), registered_(static_cast<size_t>(point.size)) {
  listener_ = Fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  listener_.keep_from_children();
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  point.name.copy(address.sun_path + 1, sizeof address.sun_path - 1);
  const auto length =
      static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + point.name.size());
  const bool bound =
      listener_ && bind(listener_.get(), reinterpret_cast<sockaddr*>(&address), length) == 0;
  LOCKSTEP_CHECK(bound || errno != EADDRINUSE, DistError,
                 "init: the meeting point is in use: another job of this user is starting with ",
                 point.where,
                 "; give one of them another MASTER_PORT, or start it with lockstep-run");
  LOCKSTEP_CHECK(bound && listen(listener_.get(), 1024) == 0, DistError,
                 "init: cannot listen for the other ranks: ", error_text(errno));
}

std::vector<int> RendezvousServer::missing() const {
  std::vector<int> ranks;
  for (int r = 1; r < point_.size; ++r)
    if (!registered_[static_cast<size_t>(r)].there()) ranks.push_back(r);
  return ranks;
}

void RendezvousServer::tell_all(const Message& message) const {
  for (const Registered& g : registered_)
    if (g.there()) send_message(g.socket.get(), message);
}

void RendezvousServer::give_up(const std::string& text) const {
  tell_all(Message(Message::refused, text));
  fail<DistError>(text);
}

// The clients must be able to say who is missing, should this process end first.
void RendezvousServer::report() {
  const Clock::time_point now = Clock::now();
  if (now < next_report_) return;
  next_report_ = now + std::min<Clock::duration>(std::chrono::seconds(1), point_.timeout / 4);
  const std::string text = point_.missing_text(missing());
  tell_all(Message(Message::status, text));
  if (!logged_ && now - start_ >= std::chrono::seconds(5)) {
    logged_ = true;
    log_info(str_cat("still waiting: ", text));
  }
}

void RendezvousServer::accept_connections() {
  for (;;) {
    Fd socket(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    const int error = errno;
    if (!socket && (error == EMFILE || error == ENFILE))
      give_up(str_cat("init: rank 0 cannot take another rank's connection: ", error_text(error)));
    if (!socket) return;
    socket.keep_from_children();
    if (peer_pid(socket.get()) < 0) continue;  // another user's
    if (unregistered_.size() == kMostUnregistered) unregistered_.erase(unregistered_.begin());
    unregistered_.push_back(std::move(socket));
  }
}

bool RendezvousServer::register_client(Fd& client) {
  Message hello;
  std::vector<Fd> files;
  const Received got = receive_message(client.get(), hello, files);
  if (got == Received::nothing) return false;
  if (got != Received::message || hello.kind != Message::hello) return true;  // noise
  if (hello.layout != shared_layout())
    give_up(str_cat("init: rank ", hello.rank,
                    " runs another build of liblockstep than rank 0, with another layout of the "
                    "shared memory; start all ranks with one build"));
  if (hello.size != point_.size)
    give_up(str_cat("init: WORLD_SIZE differs: it is ", point_.size, " on rank 0 and ", hello.size,
                    " on rank ", hello.rank));
  const bool known = hello.rank >= 1 && hello.rank < point_.size;
  if (!known || registered_[static_cast<size_t>(hello.rank)].there()) {
    const std::string why =
        known ? " is there already: two processes have this rank" : " is not one of this job";
    send_message(client.get(), Message(Message::refused, str_cat("init: rank ", hello.rank, why,
                                                                 " (", point_.where, ")")));
    return true;
  }
  send_message(client.get(), Message(Message::registered));
  registered_[static_cast<size_t>(hello.rank)] = {std::move(client)};
  return true;
}

void RendezvousServer::check_connection(int rank) {
  const Registered& client = registered_[static_cast<size_t>(rank)];
  Message message;
  std::vector<Fd> none;
  if (receive_message(client.socket.get(), message, none) == Received::closed)
    give_up(str_cat("init: rank ", rank, " (pid ", peer_pid(client.socket.get()),
                    ") ended while the ranks met"));
}

void RendezvousServer::wait_for_ranks() {
  const Clock::time_point deadline = start_ + bounded(point_.timeout);
  next_report_ = start_ + point_.timeout / 4;
  while (!missing().empty()) {
    std::vector<pollfd> polled{{listener_.get(), POLLIN, 0}};
    for (const Fd& s : unregistered_) polled.push_back({s.get(), POLLIN, 0});
    std::vector<int> ranks;
    for (int r = 1; r < point_.size; ++r)
      if (registered_[static_cast<size_t>(r)].there()) {
        polled.push_back({registered_[static_cast<size_t>(r)].socket.get(), POLLIN, 0});
        ranks.push_back(r);
      }
    const Clock::time_point now = Clock::now();
    if (now >= deadline) give_up(str_cat("init: ", point_.missing_text(missing())));
    poll(polled.data(), polled.size(), milliseconds_until(std::min(deadline, next_report_)));
    for (size_t i = 0; i < ranks.size(); ++i)
      if (polled[1 + unregistered_.size() + i].revents) check_connection(ranks[i]);
    std::erase_if(unregistered_, [&](Fd& s) { return register_client(s); });
    if (polled[0].revents) accept_connections();
    report();
  }
}

// A descriptor that is under way counts against the user's limit until it is taken, and the packet
// is then refused: it is sent again.
void RendezvousServer::hand_out(int rank, const Message& welcome, int file) const {
  const int socket = registered_[static_cast<size_t>(rank)].socket.get();
  const Clock::time_point deadline =
      deadline_after(std::min<Milliseconds>(point_.timeout, std::chrono::seconds(30)));
  while (!send_message(socket, welcome, std::span(&file, 1))) {
    const int error = errno;
    const bool later = error == ETOOMANYREFS || error == EAGAIN || error == ENOBUFS;
    if (!later || Clock::now() >= deadline)
      give_up(
          str_cat("init: cannot hand the shared memory to rank ", rank, ": ", error_text(error)));
    std::this_thread::sleep_for(Milliseconds(1));
  }
}

Meeting RendezvousServer::meet(size_t bytes) {
  Meeting meeting;
  std::random_device random;
  meeting.number = uint64_t{random()} << 32 | random();
  wait_for_ranks();
  try {
    meeting.file = Segment::make_file(bytes);
    meeting.memory = Segment::map(meeting.file.get(), bytes);
    lock_byte(meeting.file.get(), 0);
  } catch (const OutOfMemory& e) {
    tell_all(Message(Message::out_of_memory, e.what()));
    throw;
  } catch (const Error& e) {
    give_up(e.what());
  }
  Message welcome(Message::welcome);
  welcome.bytes = bytes;
  welcome.tag = meeting.number;
  for (int r = 1; r < point_.size; ++r) hand_out(r, welcome, meeting.file.get());
  for (Registered& g : registered_) meeting.links.push_back(std::move(g.socket));
  return meeting;
}

}  // namespace

Meeting host_meeting(const MeetingPoint& point, size_t bytes) {
  return RendezvousServer(point).meet(bytes);
}

}  // namespace lockstep::dist
