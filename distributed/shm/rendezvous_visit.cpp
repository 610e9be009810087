// The other ranks' side of a meeting: connect to rank 0, which may start later than we do,
// introduce ourselves, and wait for what it hands out.
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>

#include <lockstep/distributed/shm/rendezvous.h>

namespace lockstep::dist {

namespace {

class Visitor {
 public:
  explicit Visitor(const MeetingPoint& point)
      : point_(point), deadline_(Clock::now() + point.timeout) {}

  Meeting meet() {
    std::chrono::microseconds pause{200};
    for (;;) {
      if (connect_to_host() && introduce() && wait_for_welcome()) return std::move(meeting_);
      if (Clock::now() >= deadline_) fail<DistError>("init: ", point_.missing_text({0}));
      std::this_thread::sleep_for(pause);
      pause = std::min(pause * 2, std::chrono::microseconds(20000));
    }
  }

 private:
  bool connect_to_host() {
    socket_ = Fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    LOCKSTEP_CHECK(socket_, DistError, "init: cannot make a socket: ", std::strerror(errno));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    point_.name.copy(address.sun_path + 1, sizeof address.sun_path - 1);
    const auto length =
        static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + point_.name.size());
    if (connect(socket_.get(), reinterpret_cast<sockaddr*>(&address), length) != 0) {
      LOCKSTEP_CHECK(errno != EPROTOTYPE, DistError,
                     "init: the meeting point is held by another program (", point_.where, ")");
      return false;  // nobody listens yet, or too many are at the door
    }
    LOCKSTEP_CHECK(peer_pid(socket_.get()) >= 0, DistError,
                   "init: the meeting point is held by another user (", point_.where,
                   "); choose another MASTER_PORT");
    return true;
  }

  bool introduce() {
    int line[2];
    LOCKSTEP_CHECK(pipe2(line, O_CLOEXEC) == 0, DistError,
                   "init: cannot make a pipe: ", std::strerror(errno));
    const Fd reading(line[0]);
    meeting_.life = Fd(line[1]);
    Message hello(Message::hello);
    hello.rank = point_.rank;
    hello.size = point_.size;
    return send_message(socket_.get(), hello, std::span(line, 1));
  }

  // False when the other end went away before it took us in: a host that was just closing its door,
  // or a stranger. Then we knock again.
  bool wait_for_welcome() {
    bool registered = false;
    std::string status = point_.missing_text({0});
    for (;;) {
      // Rank 0 decides at its own deadline, which may be a little later than ours.
      const Clock::time_point until =
          registered ? deadline_ + std::chrono::milliseconds(500) : deadline_;
      const auto left = std::chrono::ceil<Milliseconds>(until - Clock::now()).count();
      LOCKSTEP_CHECK(left > 0, DistError, "init: ", status);
      if (!readable(socket_.get(), static_cast<int>(left))) continue;
      Message message;
      std::vector<Fd> files;
      switch (receive_message(socket_.get(), message, files)) {
        case Received::nothing:
          continue;
        case Received::closed:
          LOCKSTEP_CHECK(!registered, DistError, "init: rank 0 ended while the ranks met (",
                         point_.where, ")");
          return false;
        case Received::noise:
          fail<DistError>("init: the meeting point is held by another program (", point_.where,
                          ")");
        case Received::message:
          break;
      }
      if (message.kind == Message::registered) registered = true;
      if (message.kind == Message::status) status = message.text;
      if (message.kind == Message::refused) fail<DistError>(message.text);
      if (message.kind == Message::out_of_memory) fail<OutOfMemory>(message.text);
      if (message.kind == Message::welcome) {
        settle(message, std::move(files));
        return true;
      }
    }
  }

  void settle(const Message& welcome, std::vector<Fd> files) {
    meeting_.number = welcome.tag;
    // The memory, then a life line for every rank but this one.
    const bool complete = files.size() == static_cast<size_t>(point_.size);
    try {
      LOCKSTEP_CHECK(complete, OutOfMemory, "init: rank ", point_.rank,
                     " has not descriptors enough for ", point_.size,
                     " ranks; raise the limit (ulimit -n)");
      meeting_.memory = Segment::map(files[0].get(), welcome.bytes);
    } catch (const OutOfMemory& e) {
      send_message(socket_.get(), Message(Message::out_of_memory, e.what()));
      throw;
    }
    size_t next = 1;
    for (int r = 0; r < point_.size; ++r)
      meeting_.lives.push_back(r == point_.rank ? Fd() : std::move(files[next++]));
    meeting_.links.push_back(std::move(socket_));
  }

  const MeetingPoint& point_;
  Clock::time_point deadline_;
  Fd socket_;
  Meeting meeting_;
};

}  // namespace

Meeting visit_meeting(const MeetingPoint& point) { return Visitor(point).meet(); }

}  // namespace lockstep::dist
