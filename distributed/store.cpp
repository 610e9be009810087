// The client's side of the store. A call takes an idle connection or opens one more, so a call that
// waits holds up no other.
#include <lockstep/distributed/store.h>

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <thread>

#include <lockstep/distributed/limits.h>
#include <lockstep/distributed/store/client.h>

namespace lockstep::dist {

using store_wire::Op;
using store_wire::Reply;
using store_wire::Unpacker;

namespace {

// How much longer than its own deadline an answer of the server may take.
constexpr auto kGrace = std::chrono::seconds(4);

// One frame of at most `most` bytes.
Io receive_frame(int socket, size_t most, Clock::time_point deadline, std::string& frame) {
  char head[4];
  if (const Io t = receive_all(socket, head, deadline); t != Io::done) return t;
  const uint64_t length = Unpacker({head, sizeof head}).number(4);
  if (length > most) return Io::closed;
  frame.resize(length);
  return receive_all(socket, frame, deadline);
}

std::string seconds(Milliseconds t) { return str_cat(static_cast<double>(t.count()) / 1000, " s"); }

}  // namespace

// ---- connections ----

bool Store::Client::serve(const SocketAddress& where) {
  Fd listener = listen_at(where);
  if (!listener) return false;
  server_ = std::make_unique<StoreServer>(std::move(listener), mine_);
  return true;
}

Fd Store::Client::open(const SocketAddress& where, bool main, Milliseconds patience,
                       Clock::time_point deadline, std::string& why, Contact& how) {
  how = Contact::closed;
  const Clock::time_point soon = std::min(deadline, Clock::now() + patience);
  Fd socket = connect_to(where, soon, why);
  if (!socket) return {};
  char challenge[handshake::kChallengeBytes];
  const Io heard =
      has_news(socket.get(), soon) ? receive_all(socket.get(), challenge, soon) : Io::late;
  const std::string server_nonce =
      heard == Io::done ? handshake::nonce_of({challenge, sizeof challenge}) : std::string();
  if (server_nonce.empty()) {
    why = str_cat(where.text(), ": another program listens there");
    return {};
  }
  // It speaks our language: now it may be slow.
  const Clock::time_point later =
      std::min(std::max(deadline, soon), Clock::now() + std::chrono::seconds(5));
  const std::string client_nonce = handshake::new_nonce();
  std::string frame;
  const bool answered =
      send_all(socket.get(),
               handshake::hello_frame(mine_, main, server_id_, server_nonce, client_nonce),
               later) == Io::done &&
      has_news(socket.get(), later) &&
      receive_frame(socket.get(), store_wire::kMostGreetingBytes, later, frame) == Io::done;
  if (!answered) {
    why = str_cat(where.text(), ": it did not answer");
    return {};
  }
  const handshake::Answer answer =
      handshake::read_verdict(frame, mine_.token, server_nonce, client_nonce);
  if (answer.verdict == handshake::Verdict::accepted) {
    if (main) server_id_ = answer.server;
    return socket;
  }
  LOCKSTEP_CHECK(answer.verdict != handshake::Verdict::rejected, DistError, "init: ", answer.text,
                 " (", where.text(), ")");
  why = str_cat(where.text(), ": ", answer.text);
  how = answer.verdict == handshake::Verdict::met ? Contact::met : Contact::refused;
  return {};
}

Store::Client::Contact Store::Client::contact(const SocketAddress& where, Milliseconds patience,
                                              Clock::time_point deadline, std::string& why) {
  Contact how;
  Fd socket = open(where, true, patience, deadline, why, how);
  if (!socket) return how;
  server_address_ = where;
  local_address_ = SocketAddress::of_socket(socket.get());
  main_ = socket.get();
  idle_.push_back(std::move(socket));
  return Contact::open;
}

Fd Store::Client::take_connection(Clock::time_point deadline) {
  {
    std::lock_guard lock(mutex_);
    if (loss_ == Loss::none && !idle_.empty()) {
      Fd taken = std::move(idle_.back());
      idle_.pop_back();
      return taken;
    }
  }
  const std::string over = gone();
  LOCKSTEP_CHECK(over.empty(), DistError, "store: ", over);
  std::string why;
  Contact how;
  Fd one_more = open(server_address_, false, std::chrono::seconds(5), deadline, why, how);
  LOCKSTEP_CHECK(one_more || how == Contact::closed, DistError,
                 "store: cannot connect once more: ", why);
  if (!one_more) lose_server(Loss::silent);
  return one_more;
}

void Store::Client::give_back(Fd connection) {
  std::lock_guard lock(mutex_);
  idle_.push_back(std::move(connection));
}

std::string Store::Client::gone() const {
  std::lock_guard lock(mutex_);
  if (loss_ == Loss::none) return {};
  const char* how = loss_ == Loss::left   ? "has left"
                    : loss_ == Loss::died ? "died: the connection to its store was closed"
                                          : "does not answer: its store is silent";
  return str_cat("rank 0 ", how, " (", server_address_.text(), ")");
}
bool Store::Client::server_left() const {
  std::lock_guard lock(mutex_);
  return loss_ == Loss::left;
}
bool Store::Client::server_is_silent() const {
  std::lock_guard lock(mutex_);
  return loss_ == Loss::silent;
}

void Store::Client::lose_server(Loss how) {
  {
    std::lock_guard lock(mutex_);
    if (loss_ == Loss::none) loss_ = how;
  }
  fail<DistError>("store: ", gone());
}

bool Store::Client::has_news(int connection, Clock::time_point deadline) const {
  for (;;) {
    pollfd news{connection, POLLIN, 0};
    if (poll(&news, 1, std::min(200, milliseconds_until(deadline))) > 0) return true;
    if (Clock::now() >= deadline || !gone().empty()) return false;
  }
}

Store::Client::Answer Store::Client::ask(StoreRequest request) {
  check_here(origin_, "store");
  for (const std::string& key : request.keys)
    LOCKSTEP_CHECK(key.size() <= store_wire::kMostKeyBytes, DistError,
                   "store: a key has at most 1024 bytes, this one has ", key.size());
  LOCKSTEP_CHECK(request.keys.size() <= store_wire::kMostKeys, DistError,
                 "store: at most 4096 keys can be asked for at once, got ", request.keys.size());
  LOCKSTEP_CHECK(request.value.size() <= store_wire::kMostValueBytes, DistError,
                 "store: a value has at most 1048576 bytes, this one has ", request.value.size());
  const std::string frame = request_frame(request);
  LOCKSTEP_CHECK(frame.size() <= store_wire::kMostRequestBytes, DistError,
                 "store: the keys are too many and too long for one request, ", frame.size(),
                 " bytes");
  const Clock::time_point deadline = deadline_after(request.timeout) + kGrace;
  Fd connection = take_connection(deadline);
  std::string answer;
  Io moved = send_all(connection.get(), frame, deadline);
  // The server's last message may be there even when sending fails.
  if (moved == Io::done && !has_news(connection.get(), deadline)) lose_server(Loss::silent);
  if (moved != Io::late)
    moved = receive_frame(connection.get(), store_wire::kMostReplyBytes, deadline, answer);
  if (moved == Io::late) lose_server(Loss::silent);
  if (moved == Io::closed) lose_server(Loss::died);
  Unpacker in(answer);
  const uint64_t kind = in.number(1);
  if (kind == static_cast<uint64_t>(Reply::bye)) lose_server(Loss::left);
  LOCKSTEP_CHECK(kind >= 1 && kind <= 3, DistError, "store: ", server_address_.text(),
                 " answers what is no answer");
  give_back(std::move(connection));
  return {static_cast<Reply>(kind), answer.substr(1)};
}

void Store::Client::tell(const StoreRequest& request) {
  constexpr auto kPatience = std::chrono::seconds(1);
  check_here(origin_, "store");
  std::lock_guard lock(tell_mutex_);
  if (tell_failed_) return;
  if (!tell_connection_ && gone().empty()) try {
      std::string why;
      Contact how;
      tell_connection_ =
          open(server_address_, false, kPatience, Clock::now() + kPatience, why, how);
    } catch (const DistError&) {
      // It is rejected now; the same as refused.
    }
  const std::string frame = request_frame(request);
  const ssize_t sent = tell_connection_ ? send(tell_connection_.get(), frame.data(), frame.size(),
                                               MSG_DONTWAIT | MSG_NOSIGNAL)
                                        : 0;
  if (sent == static_cast<ssize_t>(frame.size())) return;
  if (sent < 0 && (errno == EAGAIN || errno == EINTR)) return;  // the next one may fit again
  // Broken, or half a message is under way, which no other can follow.
  tell_connection_.reset();
  tell_failed_ = true;
}

Store::Client::~Client() {
  if (!origin_.is_here()) {
    server_.release();  // its thread is the parent's
    return;
  }
  try {
    // The server must still hear it from this end: on the main connection, whose rank it is.
    StoreRequest goodbye{.op = Op::leave};
    std::unique_lock lock(mutex_);
    const auto main =
        std::find_if(idle_.begin(), idle_.end(), [&](const Fd& c) { return c.get() == main_; });
    if (loss_ == Loss::none && main != idle_.end()) {
      std::swap(*main, idle_.back());
      lock.unlock();
      ask(std::move(goodbye));
    }
  } catch (const Error&) {
    // Without a server there is nobody to tell.
  }
}

// ---- the store ----

namespace {

Credentials credentials_of(const StoreOptions& o) {
  return {
      .run_id = o.run_id, .attempt = o.attempt, .rank = o.rank, .size = o.size, .token = o.token};
}

}  // namespace

Store::Store(std::unique_ptr<Client> client) : client_(std::move(client)) {}

Store::Store(const StoreOptions& options)
    : client_(std::make_unique<Client>(credentials_of(options), options.timeout)) {
  LOCKSTEP_CHECK(options.port >= 0 && options.port < 65536 && options.size >= 1 &&
                     options.rank >= 0 && options.rank < options.size,
                 ValueError, "store: got rank ", options.rank, " of ", options.size, ", port ",
                 options.port);
  open_standard_descriptors();
  const Clock::time_point deadline = deadline_after(options.timeout);
  SocketAddress where = resolve(options.address, options.port)[0];
  if (options.rank == 0) {
    LOCKSTEP_CHECK(client_->serve(where), DistError, "store: cannot listen at ", where.text(), ": ",
                   error_text(errno));
    where = client_->server()->address();
  }
  std::string why;
  for (;;) {
    const auto patience = std::max(Milliseconds(milliseconds_until(deadline)), Milliseconds(1));
    const Client::Contact result = client_->contact(where, patience, deadline, why);
    if (result == Client::Contact::open) return;
    LOCKSTEP_CHECK(result != Client::Contact::refused, DistError, "store: ", why);
    LOCKSTEP_CHECK(Clock::now() < deadline, DistError, "store: no connection within ",
                   seconds(options.timeout), ": ", why);
    std::this_thread::sleep_for(Milliseconds(std::min(20, milliseconds_until(deadline))));
  }
}

Store::~Store() = default;

int Store::rank() const { return client_->mine().rank; }
int Store::size() const { return client_->mine().size; }
int Store::port() const { return client_->server_address().port(); }
std::string Store::where() const { return client_->server_address().text(); }
std::string Store::local_address() const {
  const SocketAddress& local = client_->local_address();
  // The rank that serves sees itself on loopback, or on the address it listens at.
  if (local.is_loopback() && client_->server() && !client_->server()->outward_address().empty())
    return client_->server()->outward_address();
  return local.host();
}

void Store::join(Milliseconds timeout) { join(timeout, timeout); }

void Store::join(Milliseconds rest, Milliseconds of) {
  const auto answer = client_->ask({.op = Op::join, .amount = of.count(), .timeout = rest});
  LOCKSTEP_CHECK(answer.kind == Reply::ok, DistError, "init: ", answer.body);
}

void Store::set(const std::string& key, std::string value) {
  const auto answer = client_->ask({.op = Op::set, .keys = {key}, .value = std::move(value)});
  LOCKSTEP_CHECK(answer.kind == Reply::ok, DistError, "store: set of \"", key, "\": ", answer.body,
                 " (", where(), ")");
}

void Store::tell(const std::string& key, std::string value) {
  client_->tell({.op = Op::tell, .keys = {key}, .value = std::move(value)});
}

std::string Store::set_once(const std::string& key, std::string value) {
  auto answer = client_->ask({.op = Op::set_once, .keys = {key}, .value = std::move(value)});
  LOCKSTEP_CHECK(answer.kind == Reply::ok, DistError, "store: set of \"", key, "\": ", answer.body,
                 " (", where(), ")");
  return std::move(answer.body);
}

std::vector<std::string> Store::get_all(const std::vector<std::string>& keys,
                                        Milliseconds timeout) {
  if (timeout.count() <= 0) timeout = client_->timeout();
  const auto answer = client_->ask({.op = Op::get, .keys = keys, .timeout = timeout});
  LOCKSTEP_CHECK(answer.kind != Reply::late, DistError, "store: no key \"", answer.body,
                 "\" within ", seconds(timeout), " (", where(), ")");
  LOCKSTEP_CHECK(answer.kind == Reply::ok, DistError, "store: get: ", answer.body, " (", where(),
                 ")");
  Unpacker in(answer.body);
  std::vector<std::string> values;
  for (size_t i = 0; i < keys.size(); ++i)
    values.emplace_back(in.text(store_wire::kMostValueBytes));
  LOCKSTEP_CHECK(in.done(), DistError, "store: ", where(), " answers what is no answer");
  return values;
}

std::string Store::get(const std::string& key, Milliseconds timeout) {
  return std::move(get_all({key}, timeout)[0]);
}

std::optional<std::string> Store::try_get(const std::string& key, Milliseconds timeout) {
  const auto answer = client_->ask({.op = Op::get, .keys = {key}, .timeout = timeout});
  if (answer.kind == Reply::late) return std::nullopt;
  LOCKSTEP_CHECK(answer.kind == Reply::ok, DistError, "store: get of \"", key, "\": ", answer.body);
  Unpacker in(answer.body);
  return std::string(in.text(store_wire::kMostValueBytes));
}

std::vector<std::optional<std::string>> Store::look_up(const std::vector<std::string>& keys) {
  const auto answer = client_->ask({.op = Op::look_up, .keys = keys});
  LOCKSTEP_CHECK(answer.kind == Reply::ok, DistError, "store: look_up: ", answer.body);
  Unpacker in(answer.body);
  std::vector<std::optional<std::string>> values(keys.size());
  for (auto& value : values) {
    const bool there = in.number(1) != 0;
    const std::string_view text = in.text(store_wire::kMostValueBytes);
    if (there) value = text;
  }
  LOCKSTEP_CHECK(in.done(), DistError, "store: ", where(), " answers what is no answer");
  return values;
}

void Store::wait(const std::vector<std::string>& keys, Milliseconds timeout) {
  if (timeout.count() <= 0) timeout = client_->timeout();
  const auto answer =
      client_->ask({.op = Op::get, .keys = keys, .with_values = false, .timeout = timeout});
  LOCKSTEP_CHECK(answer.kind == Reply::ok, DistError, "store: no key \"", answer.body, "\" within ",
                 seconds(timeout), " (", where(), ")");
}

int64_t Store::add(const std::string& key, int64_t amount) {
  const auto answer = client_->ask({.op = Op::add, .keys = {key}, .amount = amount});
  LOCKSTEP_CHECK(answer.kind == Reply::ok, DistError, "store: add to \"", key, "\": ", answer.body,
                 " (", where(), ")");
  int64_t sum = 0;
  std::from_chars(answer.body.data(), answer.body.data() + answer.body.size(), sum);
  return sum;
}

bool Store::remove(const std::string& key) {
  return client_->ask({.op = Op::remove, .keys = {key}}).body == "1";
}

std::string Store::Lost::text() const {
  if (left) return str_cat("rank ", rank, " has left");
  if (silent) return str_cat("rank ", rank, " does not answer: its store is silent");
  return str_cat("rank ", rank, pid ? str_cat(" (pid ", pid, ")") : std::string(),
                 " died: its connection was closed");
}

std::vector<Store::Lost> Store::lost() {
  check_here(client_->origin(), "store: lost");
  std::vector<Lost> all;
  try {
    const auto answer = client_->ask({.op = Op::lost});
    Unpacker in(answer.body);
    const uint64_t count = in.number(4);
    for (uint64_t i = 0; i < count && in.ok(); ++i) {
      Lost one;
      one.rank = static_cast<int>(in.number(4));
      one.pid = static_cast<int64_t>(in.number(8));
      one.left = in.number(1) != 0;
      one.since = Milliseconds(static_cast<int64_t>(in.number(8)));
      if (in.ok()) all.push_back(one);
    }
  } catch (const DistError&) {
    if (!client_->gone().empty())
      all.push_back(
          {.rank = 0, .left = client_->server_left(), .silent = client_->server_is_silent()});
  }
  return all;
}

WaitBoard& Store::waits() { return client_->waits(); }

void Store::expect_readers(Milliseconds at_most) {
  if (client_->server()) client_->server()->expect_readers(at_most);
}

}  // namespace lockstep::dist
