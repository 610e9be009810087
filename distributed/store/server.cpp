// The store's poll loop. A connection is a stranger until its handshake is done; then it may send
// one request at a time, and is read again only when it has taken the answer.
#include <lockstep/distributed/store/server.h>

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <list>
#include <mutex>

#include <lockstep/distributed/limits.h>
#include <lockstep/distributed/log.h>
#include <lockstep/distributed/quiet_thread.h>
#include <lockstep/distributed/shm/rendezvous.h>
#include <lockstep/distributed/store/data.h>
#include <lockstep/tensor/error.h>

namespace lockstep::dist {

using std::chrono::milliseconds;
using store_wire::Op;
using store_wire::Packer;
using store_wire::Reply;
using store_wire::Unpacker;

namespace {

constexpr size_t kMostStrangers = 512;
constexpr auto kGreetingTime = std::chrono::seconds(5);

/// One end of a connection.
struct Client {
  Fd socket;
  std::string nonce;  // ours
  Clock::time_point came = Clock::now();
  bool known = false, main = false;
  int rank = -1;
  std::string in, out;
  size_t out_at = 0;
  // A request that waits: for keys, or for all ranks.
  std::optional<StoreRequest> waiting;
  size_t present = 0;  // so many of its keys are there
  Clock::time_point deadline;
  bool over = false;

  void answer(std::string frame) {
    out = std::move(frame);
    out_at = 0;
  }
};

}  // namespace

class StoreServer::Loop {
 public:
  Loop(Fd listener, Credentials mine)
      : listener_(std::move(listener)),
        wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
        id_(new_id()),
        mine_(std::move(mine)),
        where_(SocketAddress::of_socket(listener_.get()).text()),
        ranks_(static_cast<size_t>(mine_.size)) {}

  // Without memory, or randomness, the server ends, and the clients see their connections closed.
  void run() noexcept {
    try {
      while (!finished()) turn();
      say_goodbye();
    } catch (const std::exception&) {
      clients_.clear();
      listener_.reset();
    }
  }

  void stop() {
    stopping_ = true;
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t n = ::write(wake_.get(), &one, sizeof one);
  }
  void expect_readers(milliseconds at_most) {
    readers_time_ = std::max<int64_t>(readers_time_, at_most.count());
  }
  std::string outward_address() {
    std::lock_guard lock(mutex_);
    return outward_;
  }
  std::string trouble() {
    std::lock_guard lock(mutex_);
    return trouble_;
  }

 private:
  static ServerId new_id() { return Unpacker(handshake::new_nonce()).number(sizeof(ServerId)); }

  void turn() {
    const std::vector<pollfd> polled = wait();
    accept_clients(polled[1].revents);
    size_t i = 2;
    for (Client& c : clients_) {  // new ones stand behind the polled ones
      if (i == polled.size()) break;
      serve(c, polled[i++].revents);
    }
    check_deadlines();
    remove_the_lost();
  }

  void say_goodbye() {
    for (Client& c : clients_)
      if (c.known && c.out.empty())
        send_all(c.socket.get(), Packer().number(static_cast<uint64_t>(Reply::bye), 1).frame(),
                 Clock::now());
  }

  /// What is known of a rank.
  struct RankState {
    bool taken = false, here = false, left = false;
    int64_t pid = 0;
    Clock::time_point lost;
  };

  bool finished() {
    if (!stopping_) return false;
    if (readers_time_ == 0) return true;
    if (!stop_at_) stop_at_ = Clock::now() + milliseconds(readers_time_);
    for (int r = 0; r < mine_.size; ++r)
      if (r != mine_.rank && ranks_[static_cast<size_t>(r)].here) return Clock::now() >= *stop_at_;
    return true;
  }

  std::vector<pollfd> wait() {
    const Clock::time_point now = Clock::now();
    Clock::time_point until = now + std::chrono::hours(1);
    if (joined_ < mine_.size && !reported_)
      until = std::min(until, start_ + std::chrono::seconds(5));
    if (stop_at_) until = std::min(until, now + milliseconds(50));
    std::vector<pollfd> polled{{wake_.get(), POLLIN, 0}, {listener_.get(), POLLIN, 0}};
    if (now < full_until_) polled[1].events = 0;
    if (now < full_until_) until = std::min(until, full_until_);
    for (const Client& c : clients_) {
      const short events = !c.out.empty() ? POLLOUT : c.waiting ? POLLRDHUP : POLLIN;
      polled.push_back({c.socket.get(), events, 0});
      if (!c.known) until = std::min(until, c.came + kGreetingTime);
      if (c.waiting) until = std::min(until, c.deadline);
    }
    poll(polled.data(), polled.size(), milliseconds_until(until));
    uint64_t count;
    [[maybe_unused]] const ssize_t n = ::read(wake_.get(), &count, sizeof count);
    return polled;
  }

  void accept_clients(short events) {
    for (int burst = 0; (events & POLLIN) && burst < 64; ++burst) {
      Client c;
      c.socket = Fd(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!c.socket) {
        if (errno == EMFILE || errno == ENFILE) {  // no descriptor is left: not at once again
          {
            std::lock_guard lock(mutex_);
            trouble_ = str_cat("; the store cannot take connections: ", error_text(errno));
          }
          drop_oldest_stranger();
          full_until_ = Clock::now() + milliseconds(100);
        }
        return;
      }
      c.socket.keep_from_children();
      if (strangers_ >= kMostStrangers) drop_oldest_stranger();
      ++strangers_;
      c.nonce = handshake::new_nonce();
      const std::string challenge = handshake::challenge(c.nonce);
      // It fits into an empty send buffer; a socket that does not take it is no use.
      if (send_all(c.socket.get(), challenge, Clock::now()) != Io::done) c.over = true;
      clients_.push_back(std::move(c));
    }
  }

  void drop_oldest_stranger() {
    for (Client& c : clients_)
      if (!c.known && !c.over) {
        c.over = true;
        return;
      }
  }

  void serve(Client& c, short events) {
    if (c.over || events == 0) return;
    if (!c.out.empty()) {
      flush(c);
    } else if (c.waiting) {
      c.over = true;  // POLLRDHUP: nobody waits any more
    } else {
      receive(c);
    }
    // What came along with the last request.
    while (!c.over && c.out.empty() && !c.waiting && take_frame(c)) {
    }
  }

  void flush(Client& c) {
    const ssize_t n =
        send(c.socket.get(), c.out.data() + c.out_at, c.out.size() - c.out_at, MSG_NOSIGNAL);
    if (n < 0 && errno != EAGAIN && errno != EINTR) c.over = true;
    if (n > 0 && (c.out_at += static_cast<size_t>(n)) == c.out.size()) {
      c.out = {};
      if (c.waiting) c.over = true;  // a refusal has been read
    }
  }

  void receive(Client& c) {
    char buffer[1 << 16];
    const size_t most = c.known ? sizeof buffer : store_wire::kMostGreetingBytes;
    const ssize_t n = recv(c.socket.get(), buffer, most, 0);
    if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) c.over = true;
    if (n > 0) c.in.append(buffer, static_cast<size_t>(n));
  }

  // One frame of what has come, if it is whole.
  bool take_frame(Client& c) {
    const size_t most = c.known ? store_wire::kMostRequestBytes : store_wire::kMostGreetingBytes;
    if (c.in.size() < 4) return false;
    const uint64_t length = Unpacker(c.in).number(4);
    if (length > most) {
      c.over = true;
      return false;
    }
    if (c.in.size() < 4 + length) return false;
    const std::string frame = c.in.substr(4, length);
    c.in.erase(0, 4 + length);
    if (c.known)
      handle(c, frame);
    else
      greet(c, frame);
    if (!c.out.empty()) flush(c);
    return true;
  }

  void greet(Client& c, const std::string& frame) {
    const auto greeting = handshake::read_hello(frame, mine_.token, c.nonce);
    if (!greeting) {
      c.over = true;
      return;
    }
    const auto say = [&](handshake::Verdict verdict, std::string_view text) {
      c.answer(handshake::verdict_frame(verdict, text, id_, mine_.token, c.nonce,
                                        greeting->client_nonce));
      if (verdict == handshake::Verdict::accepted) return;
      c.waiting.emplace();  // until it hangs up
      c.deadline = Clock::now() + kGreetingTime;
    };
    const handshake::Hello& hello = greeting->hello;
    if (!greeting->authentic) return say(handshake::Verdict::refused, "refused");
    const std::string stranger = handshake::stranger_text(hello, mine_);
    if (!stranger.empty()) return say(handshake::Verdict::refused, stranger);
    // A process that meets its ranks again may still find the last server, and its last store the
    // new one.
    if (hello.main ? is_over() : hello.server != id_)
      return say(handshake::Verdict::met,
                 str_cat("the ranks that this store serves have met already",
                         hello.rank < mine_.size && ranks_[static_cast<size_t>(hello.rank)].here
                             ? str_cat(", rank ", hello.rank, " (pid ",
                                       ranks_[static_cast<size_t>(hello.rank)].pid,
                                       ") among them: is this rank started twice?")
                             : std::string()));
    if (hello.size != mine_.size)
      return say(handshake::Verdict::rejected,
                 str_cat("WORLD_SIZE differs: it is ", mine_.size, " on rank 0 and ", hello.size,
                         " on rank ", hello.rank));
    if (hello.rank >= mine_.size)
      return say(handshake::Verdict::rejected, str_cat("there is no rank ", hello.rank));
    RankState& state = ranks_[static_cast<size_t>(hello.rank)];
    if (hello.main && state.taken)
      return say(handshake::Verdict::rejected,
                 str_cat("rank ", hello.rank, " (pid ", state.pid,
                         ") is there already: two processes have this rank"));
    say(handshake::Verdict::accepted, {});
    c.known = true;
    --strangers_;
    c.main = hello.main;
    c.rank = hello.rank;
    if (!c.main) return;
    const SocketAddress here = SocketAddress::of_socket(c.socket.get());
    if (!here.is_loopback() && hello.rank != mine_.rank) {
      std::lock_guard lock(mutex_);
      outward_ = here.host();
    }
    state = {.taken = true, .here = true, .left = false, .pid = hello.pid, .lost = {}};
    if (++joined_ == mine_.size) finish_joins(Reply::ok, {});
  }

  void handle(Client& c, const std::string& frame) {
    auto request = read_request(frame);
    if (!request) {
      c.over = true;
      return;
    }
    switch (request->op) {
      case Op::join:
        begin_meeting();
        if (!join_failure_.empty()) return c.answer(reply(Reply::error, join_failure_));
        if (joined_ == mine_.size) return c.answer(reply(Reply::ok));
        break;
      case Op::get:
        c.present = 0;
        if (advance(c, *request)) return;
        break;
      case Op::lost:
        return c.answer(lost_reply());
      case Op::look_up:
        return c.answer(data_.present(*request));
      case Op::leave:
        if (c.main) ranks_[static_cast<size_t>(c.rank)].left = true;
        return c.answer(reply(Reply::ok));
      default:
        if (std::string answer = data_.apply(*request); request->op != Op::tell)
          c.answer(std::move(answer));
        for (Client& other : clients_)
          if (other.waiting && other.waiting->op == Op::get) advance(other, *other.waiting);
        return;
    }
    c.deadline = deadline_after(request->timeout);
    c.waiting = std::move(request);
  }

  // Answers a get once all its keys are there.
  bool advance(Client& c, const StoreRequest& request) {
    while (c.present < request.keys.size() && data_.has(request.keys[c.present])) ++c.present;
    if (c.present < request.keys.size()) return false;
    c.answer(data_.values(request));
    c.waiting.reset();
    return true;
  }

  // Ranks that only use a store may come and go; of those that meet, all must be there at once.
  void begin_meeting() {
    meets_ = true;
    for (int r = 0; r < mine_.size; ++r)
      if (const RankState& state = ranks_[static_cast<size_t>(r)]; state.taken && !state.here)
        fail_to_meet(r);
  }
  void fail_to_meet(int rank) {
    if (!meets_ || is_over()) return;
    finish_joins(Reply::error,
                 str_cat("rank ", rank, " (pid ", ranks_[static_cast<size_t>(rank)].pid,
                         ") ended while the ranks met (", where_, ")"));
  }

  std::vector<int> missing() const {
    std::vector<int> ranks;
    for (int r = 0; r < mine_.size; ++r)
      if (!ranks_[static_cast<size_t>(r)].taken) ranks.push_back(r);
    return ranks;
  }

  /// Whether the ranks have met, or failed to.
  bool is_over() const { return joined_ == mine_.size || !join_failure_.empty(); }

  void finish_joins(Reply kind, const std::string& text) {
    if (kind != Reply::ok) join_failure_ = text;
    for (Client& c : clients_)
      if (c.known && c.waiting && c.waiting->op == Op::join) {
        c.waiting.reset();
        c.answer(reply(kind, text));
      }
  }

  void check_deadlines() {
    const Clock::time_point now = Clock::now();
    for (Client& c : clients_) {
      if (!c.known && now - c.came >= kGreetingTime) c.over = true;
      if (!c.known || !c.waiting || now < c.deadline) continue;
      const StoreRequest request = *c.waiting;
      if (request.op == Op::join) {
        // Whoever loses patience first decides for all: they would miss it next.
        finish_joins(
            Reply::error,
            missing_text(mine_.size, missing(), milliseconds(request.amount), where_) + trouble());
      } else {
        c.waiting.reset();
        c.answer(reply(Reply::late, request.keys[c.present]));
      }
    }
    if (joined_ < mine_.size && !reported_ && now - start_ >= std::chrono::seconds(5)) {
      reported_ = true;
      log_info(str_cat("still waiting: ",
                       missing_text(mine_.size, missing(), std::chrono::seconds(5), where_)));
    }
  }

  void remove_the_lost() {
    for (auto c = clients_.begin(); c != clients_.end();) {
      if (!c->over) {
        ++c;
        continue;
      }
      if (!c->known) --strangers_;
      if (c->known && c->main) {
        RankState& state = ranks_[static_cast<size_t>(c->rank)];
        state.here = false;
        state.lost = Clock::now();
        fail_to_meet(c->rank);
      }
      c = clients_.erase(c);
    }
  }

  std::string lost_reply() const {
    Packer list;
    uint64_t count = 0;
    for (size_t r = 0; r < ranks_.size(); ++r) {
      const RankState& s = ranks_[r];
      if (!s.taken || (s.here && !s.left)) continue;
      ++count;
      const auto since = s.here ? milliseconds(0)
                                : std::chrono::duration_cast<milliseconds>(Clock::now() - s.lost);
      list.number(r, 4).number(static_cast<uint64_t>(s.pid), 8).number(s.left, 1);
      list.number(static_cast<uint64_t>(since.count()), 8);
    }
    return reply(Reply::ok, Packer().number(count, 4).raw(list.bytes()).bytes());
  }

  Fd listener_, wake_;
  ServerId id_;
  Credentials mine_;
  std::string where_;
  StoreData data_;
  std::list<Client> clients_;
  std::vector<RankState> ranks_;  // by rank
  size_t strangers_ = 0;
  int joined_ = 0;
  bool meets_ = false;  // some rank waits, or has waited, for all
  std::string join_failure_;
  Clock::time_point start_ = Clock::now(), full_until_{};
  bool reported_ = false;
  std::atomic<bool> stopping_{false};
  std::atomic<int64_t> readers_time_{0};
  std::optional<Clock::time_point> stop_at_;
  std::mutex mutex_;
  std::string outward_;
  std::string trouble_;  // of accepting connections
};

StoreServer::StoreServer(Fd listener, Credentials mine)
    : address_(SocketAddress::of_socket(listener.get())),
      loop_(std::make_shared<Loop>(std::move(listener), std::move(mine))),
      thread_(quiet_thread("the store's thread", [loop = loop_] { loop->run(); })) {}

StoreServer::~StoreServer() {
  loop_->stop();
  thread_.join();
}

std::string StoreServer::outward_address() const { return loop_->outward_address(); }
std::string StoreServer::trouble() const { return loop_->trouble(); }
void StoreServer::expect_readers(milliseconds at_most) { loop_->expect_readers(at_most); }

}  // namespace lockstep::dist
