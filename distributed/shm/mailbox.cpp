// Mailbox's sockets. A connection may be used before it is accepted, so handing out waits for
// nobody who is slow.
#include <lockstep/distributed/shm/mailbox.h>

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <thread>

#include <lockstep/distributed/limits.h>

namespace lockstep::dist {

namespace {

constexpr size_t kMostCallers = 256;

struct Address {
  sockaddr_un name{};
  socklen_t length;
  explicit Address(const std::string& text) {
    name.sun_family = AF_UNIX;
    text.copy(name.sun_path + 1, sizeof name.sun_path - 1);
    length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 +
                                    std::min(text.size(), sizeof name.sun_path - 1));
  }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&name); }
};

Fd new_socket() { return Fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)); }

}  // namespace

Mailbox::Mailbox(const std::string& job, int rank)
    : job_(job), rank_(rank), listener_(new_socket()), spare_(new_socket()) {
  const Address address(name_of(rank));
  LOCKSTEP_CHECK(listener_ && bind(listener_.get(), address.get(), address.length) == 0 &&
                     listen(listener_.get(), 1024) == 0,
                 DistError, "init: rank ", rank, " cannot listen on its socket @", name_of(rank),
                 ": ", error_text(errno));
  listener_.keep_from_children();
}

// False when the box is full or its owner is gone: try again, or ask whether it is lost.
bool Mailbox::deliver(int rank, const Message& message, std::span<const int> descriptors) {
  Fd socket = new_socket();
  if (!socket && spare_) {
    spare_.reset();
    socket = new_socket();
  }
  const Address address(name_of(rank));
  if (!socket || connect(socket.get(), address.get(), address.length) != 0) return false;
  LOCKSTEP_CHECK(peer_pid(socket.get()) >= 0, DistError, "share: the socket @", name_of(rank),
                 " of rank ", rank, " is held by another user");
  return send_message(socket.get(), message, descriptors);
}

std::shared_ptr<Segment> Mailbox::hand_out(const std::vector<int>& members, uint64_t tag,
                                           size_t bytes, Clock::time_point deadline,
                                           const Lost& lost) {
  Fd file;
  Message message(Message::share);
  try {
    file = Segment::make_file(bytes);
  } catch (const OutOfMemory& e) {
    message = Message(Message::out_of_memory, e.what());
  }
  message.rank = rank_;
  message.tag = tag;
  message.bytes = bytes;
  const int descriptor = file.get();
  for (const int r : members) {
    if (r == rank_) continue;
    while (!deliver(r, message, std::span(&descriptor, file ? 1 : 0)) && lost(r).empty()) {
      LOCKSTEP_CHECK(Clock::now() < deadline, DistError, "share: rank ", r,
                     " did not take its memory in time");
      std::this_thread::sleep_for(Milliseconds(1));
    }
  }
  if (!spare_) spare_ = new_socket();
  LOCKSTEP_CHECK(file, OutOfMemory, message.text);
  return Segment::map(file.get(), bytes);
}

// Takes in what has come, or comes within a while. Another thread of this rank may be waiting for
// another communicator's memory, so everything is kept.
void Mailbox::receive() {
  std::vector<pollfd> polled{{listener_.get(), POLLIN, 0}};
  for (const Fd& c : callers_) polled.push_back({c.get(), POLLIN, 0});
  poll(polled.data(), polled.size(), 20);
  std::erase_if(callers_, [&](const Fd& caller) {
    Message message;
    std::vector<Fd> files;
    const Received got = receive_message(caller.get(), message, files);
    if (got == Received::nothing) return false;
    if (got == Received::message && message.kind == Message::share && files.size() != 1) {
      const Message sent = message;
      message =
          Message(Message::out_of_memory, str_cat("shared memory: cannot take what rank ",
                                                  sent.rank, " hands out: ", error_text(EMFILE)));
      message.rank = sent.rank;
      message.tag = sent.tag;
    }
    const bool shares = got == Received::message &&
                        (message.kind == Message::out_of_memory || message.kind == Message::share);
    if (shares) kept_.push_back({message, files.empty() ? Fd() : std::move(files[0])});
    return true;
  });
  for (;;) {
    Fd caller(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    const int error = errno;
    LOCKSTEP_CHECK(caller || (error != EMFILE && error != ENFILE), OutOfMemory,
                   "shared memory: rank ", rank_, " cannot take it: ", error_text(error));
    if (!caller) return;
    if (peer_pid(caller.get()) < 0) continue;  // another user's
    if (callers_.size() == kMostCallers) callers_.erase(callers_.begin());
    callers_.push_back(std::move(caller));
  }
}

std::shared_ptr<Segment> Mailbox::take(int from, uint64_t tag, size_t bytes,
                                       Clock::time_point deadline, const Lost& lost) {
  for (std::string why;;) {
    {
      std::lock_guard lock(mutex_);
      const auto it = std::find_if(kept_.begin(), kept_.end(), [&](const Kept& k) {
        return k.message.tag == tag && k.message.rank == from;
      });
      if (it != kept_.end()) {
        const Kept mine = std::move(*it);
        kept_.erase(it);
        LOCKSTEP_CHECK(mine.message.kind == Message::share, OutOfMemory, mine.message.text);
        LOCKSTEP_CHECK(mine.message.bytes == bytes, DistError, "share: rank ", from, " handed out ",
                       mine.message.bytes, " bytes, not ", bytes);
        return Segment::map(mine.file.get(), bytes);
      }
      // A message that was sent before the rank's end has been received by now.
      LOCKSTEP_CHECK(why.empty(), DistError, "share: rank ", from, " ", why);
      receive();
      receive();  // from those just accepted
    }
    why = lost(from);
    if (why.empty() && Clock::now() >= deadline) why = "did not hand out its memory in time";
  }
}

}  // namespace lockstep::dist
