// Rank 0's side of a meeting: it listens, refuses strangers, and when all are there hands out the
// memory and the life lines. One poll loop serves everybody, so a guest that says nothing holds up
// nobody.
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <random>

#include <lockstep/distributed/log.h>
#include <lockstep/distributed/shm/rendezvous.h>

namespace lockstep::dist {

namespace {

constexpr size_t kMostStrangers = 256;

class Host {
 public:
  explicit Host(const MeetingPoint& point);
  Meeting meet(size_t bytes);

 private:
  struct Guest {
    Fd socket, life;
    bool there() const { return static_cast<bool>(socket); }
  };

  void wait_for_guests();
  void accept_strangers();
  /// True when the stranger is one no more: taken in or sent away.
  bool greet(Fd& stranger);
  void hear(int rank);
  void report();
  std::vector<int> missing() const;
  void tell_all(const Message& message) const;
  [[noreturn]] void give_up(const std::string& text) const;

  const MeetingPoint& point_;
  Fd listener_;
  std::vector<Fd> strangers_;  // connected, and not yet heard
  std::vector<Guest> guests_;  // by rank
  Clock::time_point start_ = Clock::now();
  Clock::time_point next_report_;
  bool logged_ = false;
};

Host::Host(const MeetingPoint& point) : point_(point), guests_(static_cast<size_t>(point.size)) {
  listener_ = Fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
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
                 "init: cannot listen for the other ranks: ", std::strerror(errno));
}

std::vector<int> Host::missing() const {
  std::vector<int> ranks;
  for (int r = 1; r < point_.size; ++r)
    if (!guests_[static_cast<size_t>(r)].there()) ranks.push_back(r);
  return ranks;
}

void Host::tell_all(const Message& message) const {
  for (const Guest& g : guests_)
    if (g.there()) send_message(g.socket.get(), message);
}

void Host::give_up(const std::string& text) const {
  tell_all(Message(Message::refused, text));
  fail<DistError>(text);
}

// The guests must be able to say who is missing, should this process end first.
void Host::report() {
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

void Host::accept_strangers() {
  for (;;) {
    Fd socket(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket) return;
    if (peer_pid(socket.get()) < 0) continue;  // another user's
    if (strangers_.size() == kMostStrangers) strangers_.erase(strangers_.begin());
    strangers_.push_back(std::move(socket));
  }
}

bool Host::greet(Fd& stranger) {
  Message hello;
  std::vector<Fd> lines;
  const Received got = receive_message(stranger.get(), hello, lines);
  if (got == Received::nothing) return false;
  if (got != Received::message || hello.kind != Message::hello || lines.size() != 1)
    return true;  // noise
  if (hello.size != point_.size)
    give_up(str_cat("init: WORLD_SIZE differs: it is ", point_.size, " on rank 0 and ", hello.size,
                    " on rank ", hello.rank));
  const bool known = hello.rank >= 1 && hello.rank < point_.size;
  if (!known || guests_[static_cast<size_t>(hello.rank)].there()) {
    const std::string why =
        known ? " is there already: two processes have this rank" : " is not one of this job";
    send_message(stranger.get(), Message(Message::refused, str_cat("init: rank ", hello.rank, why,
                                                                   " (", point_.where, ")")));
    return true;
  }
  send_message(stranger.get(), Message(Message::registered));
  guests_[static_cast<size_t>(hello.rank)] = {std::move(stranger), std::move(lines[0])};
  return true;
}

void Host::hear(int rank) {
  const Guest& guest = guests_[static_cast<size_t>(rank)];
  Message message;
  std::vector<Fd> none;
  if (receive_message(guest.socket.get(), message, none) == Received::closed)
    give_up(str_cat("init: rank ", rank, " (pid ", peer_pid(guest.socket.get()),
                    ") ended while the ranks met"));
}

void Host::wait_for_guests() {
  const Clock::time_point deadline = start_ + point_.timeout;
  next_report_ = start_ + point_.timeout / 4;
  while (!missing().empty()) {
    std::vector<pollfd> polled{{listener_.get(), POLLIN, 0}};
    for (const Fd& s : strangers_) polled.push_back({s.get(), POLLIN, 0});
    std::vector<int> ranks;
    for (int r = 1; r < point_.size; ++r)
      if (guests_[static_cast<size_t>(r)].there()) {
        polled.push_back({guests_[static_cast<size_t>(r)].socket.get(), POLLIN, 0});
        ranks.push_back(r);
      }
    const Clock::time_point now = Clock::now();
    if (now >= deadline) give_up(str_cat("init: ", point_.missing_text(missing())));
    const auto until =
        std::chrono::ceil<Milliseconds>(std::min(deadline, next_report_) - now).count();
    poll(polled.data(), polled.size(), static_cast<int>(std::max<long>(until, 0)));
    for (size_t i = 0; i < ranks.size(); ++i)
      if (polled[1 + strangers_.size() + i].revents) hear(ranks[i]);
    std::erase_if(strangers_, [&](Fd& s) { return greet(s); });
    if (polled[0].revents) accept_strangers();
    report();
  }
}

Meeting Host::meet(size_t bytes) {
  int line[2];
  LOCKSTEP_CHECK(pipe2(line, O_CLOEXEC) == 0, DistError,
                 "init: cannot make a pipe: ", std::strerror(errno));
  guests_[0].life = Fd(line[0]);
  Meeting meeting;
  meeting.life = Fd(line[1]);
  std::random_device random;
  meeting.number = uint64_t{random()} << 32 | random();
  wait_for_guests();

  Fd file;
  try {
    file = Segment::make_file(bytes);
    meeting.memory = Segment::map(file.get(), bytes);
  } catch (const OutOfMemory& e) {
    tell_all(Message(Message::out_of_memory, e.what()));
    throw;
  }
  // To each the memory and the life lines of all ranks but its own.
  for (int r = 1; r < point_.size; ++r) {
    std::vector<int> descriptors{file.get()};
    for (int other = 0; other < point_.size; ++other)
      if (other != r) descriptors.push_back(guests_[static_cast<size_t>(other)].life.get());
    Message welcome(Message::welcome);
    welcome.bytes = bytes;
    welcome.tag = meeting.number;
    send_message(guests_[static_cast<size_t>(r)].socket.get(), welcome, descriptors);
  }
  guests_[0].life.reset();
  for (Guest& g : guests_) {
    meeting.lives.push_back(std::move(g.life));
    meeting.links.push_back(std::move(g.socket));
  }
  return meeting;
}

}  // namespace

Meeting host_meeting(const MeetingPoint& point, size_t bytes) { return Host(point).meet(bytes); }

}  // namespace lockstep::dist
