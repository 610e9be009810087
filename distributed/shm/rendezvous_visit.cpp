// The other ranks' side of a meeting: connect to rank 0, which may start later than we do,
// introduce ourselves, and wait for what it hands out.
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <thread>

#include <lockstep/distributed/limits.h>
#include <lockstep/distributed/shm/rendezvous.h>

namespace lockstep::dist {

namespace {

class RendezvousClient {
 public:
  explicit RendezvousClient(const MeetingPoint& point)
      : point_(point), deadline_(deadline_after(point.timeout)) {}

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
    LOCKSTEP_CHECK(socket_, DistError, "init: cannot make a socket: ", error_text(errno));
    socket_.keep_from_children();
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    point_.name.copy(address.sun_path + 1, sizeof address.sun_path - 1);
    const auto length =
        static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + point_.name.size());
    if (connect(socket_.get(), reinterpret_cast<sockaddr*>(&address), length) != 0) {
      LOCKSTEP_CHECK(errno != EPROTOTYPE, DistError,
                     "init: the meeting point is held by another program (", point_.where, ")");
      return false;  // nobody listens yet, or the backlog is full: retried
    }
    LOCKSTEP_CHECK(peer_pid(socket_.get()) >= 0, DistError,
                   "init: the meeting point is held by another user (", point_.where,
                   "); choose another MASTER_PORT");
    return true;
  }

  bool introduce() {
    Message hello(Message::hello);
    hello.rank = point_.rank;
    hello.size = point_.size;
    hello.layout = shared_layout();
    return send_message(socket_.get(), hello);
  }

  // False when the connection was closed before this rank was registered, by a rank 0 that was
  // closing its socket or by a stranger: retried.
  bool wait_for_welcome() {
    bool registered = false;
    std::string status = point_.missing_text({0});
    for (;;) {
      // Rank 0 decides at its own deadline, which may be a little later than ours.
      const Clock::time_point until =
          registered ? deadline_ + std::chrono::milliseconds(500) : deadline_;
      const int left = milliseconds_until(until);
      LOCKSTEP_CHECK(left > 0, DistError, "init: ", status);
      if (!readable(socket_.get(), left)) continue;
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
    try {
      LOCKSTEP_CHECK(files.size() == 1, OutOfMemory, "init: rank ", point_.rank,
                     " cannot receive the shared memory: ", error_text(EMFILE));
      meeting_.file = std::move(files[0]);
      meeting_.memory = Segment::map(meeting_.file.get(), welcome.bytes);
      lock_byte(meeting_.file.get(), point_.rank);
    } catch (const OutOfMemory& e) {
      send_message(socket_.get(), Message(Message::out_of_memory, e.what()));
      throw;
    } catch (const Error& e) {
      send_message(socket_.get(), Message(Message::refused, e.what()));
      throw;
    }
    meeting_.links.push_back(std::move(socket_));
  }

  const MeetingPoint& point_;
  Clock::time_point deadline_;
  Fd socket_;
  Meeting meeting_;
};

}  // namespace

Meeting visit_meeting(const MeetingPoint& point) { return RendezvousClient(point).meet(); }

}  // namespace lockstep::dist
