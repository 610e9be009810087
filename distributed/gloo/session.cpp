// Connecting, running, and finding out what went wrong.
#include <lockstep/distributed/gloo/session.h>

#include <algorithm>
#include <cstdlib>
#include <future>

#include <lockstep/distributed/gloo/exchange.h>
#include <lockstep/distributed/store/notes.h>
#include <lockstep/distributed/store/wire.h>

namespace lockstep::dist::gloo_backend {

namespace {

constexpr Milliseconds kLookEvery(200);
constexpr Milliseconds kOthersTime(1000);  // for the others' last calls
// Before a rank's last call: whether it timed out in it, or entered it after the timeout.
const std::string kWaited = "w", kCame = "c";
constexpr Milliseconds kReasonTime(2500);   // for a reason that somebody else is finding out
constexpr Milliseconds kStillArrives(500);  // what a dead rank had sent may complete a call

Milliseconds left_until(Clock::time_point deadline) {
  return std::max(std::chrono::ceil<Milliseconds>(deadline - Clock::now()), Milliseconds(1));
}

std::vector<char> entry_of(const std::string& addresses, int rank) {
  store_wire::Unpacker in(addresses);
  std::string_view entry;
  for (int r = 0; r <= rank; ++r) entry = in.text(store_wire::kMostValueBytes);
  LOCKSTEP_CHECK(in.ok(), DistError, "gloo: a rank's list of addresses is too short");
  return {entry.begin(), entry.end()};
}

// Of "gloo.2.1" it is "gloo.2"; of "gloo" nothing.
std::string_view parent_of(std::string_view group) {
  const size_t dot = group.rfind('.');
  return dot == group.npos ? std::string_view() : group.substr(0, dot);
}
std::string left_key(std::string_view group, int job_rank) {
  return str_cat(group, "/left/", job_rank);
}

}  // namespace

std::string NumberedCall::bare_text() const {
  return str_cat(call.text(), ", sequence number ", sequence);
}
std::string NumberedCall::text() const {
  const std::string& label = call.options.label;
  return str_cat(bare_text(), label.empty() ? std::string() : str_cat(" (", label, ")"));
}

// ---- the beginning ----

Session::Session(GlooSetup setup, std::shared_ptr<gloo::transport::Device> device)
    : setup_(std::move(setup)), device_(std::move(device)) {
  const char* debug = std::getenv("LOCKSTEP_DEBUG");
  compares_ = debug && std::string_view(debug) == "detail";
  setup_.store->waits().count(setup_.name, 0);
  const Clock::time_point deadline = deadline_after(setup_.join_timeout);
  context_ = std::make_shared<WatchedContext>(device_, rank(), size(), setup_.join_timeout);

  // Gloo blocks while it connects, so somebody else watches the others.
  std::promise<void> done;
  std::future<void> connected = done.get_future();
  std::thread worker = quiet_thread("a thread of backend gloo", [&] {
    try {
      connect(deadline);
      done.set_value();
    } catch (...) {
      done.set_exception(std::current_exception());
    }
  });
  BlockedStoreWait blocked(*setup_.store, being_made(setup_));
  while (connected.wait_for(Milliseconds(50)) != std::future_status::ready) {
    look();
    try {
      blocked.look();  // an end that it finds is in the store, where look() finds it
    } catch (const DistError&) {
      // Without its store the worker finds that rank 0 is gone.
    }
    if (Clock::now() > deadline + Milliseconds(500))
      stop({Cause::late,
            str_cat("the ranks did not connect within ", setup_.join_timeout.count(), " ms")});
  }
  worker.join();
  try {
    connected.get();
  } catch (const std::exception& e) {
    Ending why = end();
    if (why.text.empty()) {
      const Clock::time_point until = Clock::now() + kOthersTime;
      do {
        why = who_is_gone();
      } while (why.text.empty() && Clock::now() < until &&
               (std::this_thread::sleep_for(Milliseconds(50)), true));
    }
    if (why.text.empty()) why.text = e.what();
    why = conclude(why);
    throw PeerError(why.cause, "gloo: connecting the ranks: " + why.text);
  }
}

// In a forked child the threads of Gloo, for whose end its destructors would wait, do not exist.
Session::~Session() {
  if (is_here()) return;
  new std::shared_ptr(std::move(context_));
  new std::shared_ptr(std::move(device_));
}

void Session::connect(Clock::time_point deadline) {
  WatchedTransport& transport = context_->transport();
  store_wire::Packer mine;
  for (int r = 0; r < size(); ++r) {
    if (r == rank()) {
      mine.text({});
      continue;
    }
    const std::vector<char> address = transport.createPair(r)->address().bytes();
    mine.text({address.data(), address.size()});
  }
  setup_.store->set(key("address", rank()), mine.bytes());
  for (int r = 0; r < size(); ++r) {
    if (r == rank()) continue;
    std::optional<std::string> theirs;
    while (!(theirs = setup_.store->try_get(key("address", r), kLookEvery))) {
      transport.check();
      if (const Ending why = why_nobody_comes(); !why.text.empty())
        throw PeerError(why.cause, why.text);
      LOCKSTEP_CHECK(Clock::now() < deadline, DistError, "rank ", job_rank(r),
                     " did not come within ", setup_.join_timeout.count(), " ms");
    }
    transport.getPair(r)->connect(entry_of(*theirs, rank()));
    transport.check();
  }
  // A connection may be a stranger's, who came first: only who answers here is a rank.
  meet_all(context_, tag_of(setup_.name), left_until(deadline));
  try {
    setup_.store->remove(key("address", rank()));
  } catch (const DistError&) {
    // Rank 0 may have left already; then so has what was to be tidied up.
  }
}

// ---- one call ----

void Session::run(const NumberedCall& call) {
  const auto refuse = [&](const Ending& why) {
    throw PeerError(why.cause,
                    str_cat(call.text(), ": ", why.text, "; last completed: ", last_completed_));
  };
  if (const Ending over = end(); !over.text.empty()) refuse(over);
  try {
    if (compares_ && !call.point_to_point()) compare(call);
    if (Clock::now() >= call.deadline) {
      be_late();
      context_->transport().check();
    }
    exchange(context_, call.call, tag_of(call.key), left_until(call.deadline));
    // A root, and a rank that sends to a root, would return although nobody may ever receive: they
    // wait for all ranks.
    const CollectiveKind kind = call.call.kind;
    if (kind == CollectiveKind::broadcast || kind == CollectiveKind::reduce ||
        kind == CollectiveKind::gather || kind == CollectiveKind::scatter)
      meet_all(context_, tag_of(call.key + ", done"), left_until(call.deadline));
  } catch (const std::exception& e) {
    refuse(explain(call, e.what()));
  }
  std::lock_guard lock(mutex_);
  if (!call.point_to_point()) last_completed_ = call.text();
}

void Session::compare(const NumberedCall& call) {
  const auto place = [&](uint64_t sequence, int rank) {
    return key(str_cat("call/", sequence), rank);
  };
  setup_.store->set(place(call.sequence, rank()), call.bare_text());
  std::map<int, std::string> others;
  for (int r = 0; r < size(); ++r) {
    if (r == rank()) continue;
    std::optional<std::string> theirs;
    while (!(theirs = setup_.store->try_get(place(call.sequence, r), kLookEvery))) {
      context_->transport().check();
      if (Clock::now() >= call.deadline) {
        be_late();
        context_->transport().check();
      }
    }
    others[r] = kWaited + *theirs;
  }
  // Everybody has written this one, so everybody has read the one before.
  if (call.sequence > 1) setup_.store->remove(place(call.sequence - 1, rank()));
  if (std::any_of(others.begin(), others.end(),
                  [&](const auto& o) { return o.second.substr(1) != call.bare_text(); }))
    stop(disagreement(call, others));
  context_->transport().check();
}

// ---- deadlocks ----

namespace {
// A send and the receive that takes it are counted apart: each waits for the other.
std::string counted_as(const std::string& group, CollectiveKind kind, int from, int to) {
  if (kind != CollectiveKind::send && kind != CollectiveKind::recv) return group;
  return str_cat(group, "/", name_of(kind), " ", from, " ", to);
}
}  // namespace

void Session::count(const NumberedCall& call) {
  const bool sends = call.call.kind == CollectiveKind::send;
  setup_.store->waits().count(
      counted_as(setup_.name, call.call.kind, sends ? rank() : call.call.root,
                 sends ? call.call.root : rank()),
      call.sequence);
}

BlockedCall Session::blocked_in(const NumberedCall& call) const {
  BlockedCall blocked{setup_.name, call.sequence, setup_.ranks,
                      str_cat(call.text(), ", of group \"", setup_.name, "\""), key("end")};
  if (!call.point_to_point()) return blocked;
  const bool sends = call.call.kind == CollectiveKind::send;
  blocked.calls = counted_as(setup_.name, sends ? CollectiveKind::recv : CollectiveKind::send,
                             sends ? rank() : call.call.root, sends ? call.call.root : rank());
  blocked.ranks = {job_rank(call.call.root)};
  return blocked;
}

// ---- the end ----

Ending Session::end() const {
  std::lock_guard lock(mutex_);
  return late_ ? Ending() : end_;
}

void Session::stop(const Ending& why) {
  {
    std::lock_guard lock(mutex_);
    if (end_.text.empty() || late_) end_ = why;
    late_ = false;
  }
  if (context_) context_->transport().stop(why.text);
}

void Session::be_late() {
  {
    std::lock_guard lock(mutex_);
    if (!end_.text.empty()) return;
    late_ = true;
    end_ = {Cause::late, "late"};  // until it is known who was
  }
  context_->transport().stop("late");
}

void Session::look() {
  {
    std::lock_guard lock(mutex_);
    if (!end_.text.empty() || Clock::now() - looked_ < kLookEvery) return;
    looked_ = Clock::now();
  }
  try {
    if (const auto why = setup_.store->try_get(key("end"))) return stop(Ending::unpacked(*why));
  } catch (const DistError&) {
    // Without its store rank 0 is gone, which the next lines find.
  }
  if (Ending dead = who_died(kStillArrives); !dead.text.empty()) {
    dead.text += notes();
    stop(dead);
  }
}

// The others of this group that the store misses.
std::vector<Store::Lost> Session::lost() const {
  std::vector<Store::Lost> lost = setup_.store->lost();
  std::erase_if(lost, [&](const Store::Lost& l) {
    return l.rank == job_rank(rank()) ||
           std::find(setup_.ranks.begin(), setup_.ranks.end(), l.rank) == setup_.ranks.end();
  });
  return lost;
}

// The first that died, at least so long ago.
Ending Session::who_died(Milliseconds at_least) const {
  for (const Store::Lost& l : lost())
    if (!l.left && (l.since >= at_least || l.pid == 0)) return {Cause::died, l.text()};
  return {};
}

// One that died, or else one that left.
Ending Session::who_is_gone() const {
  Ending gone = who_died(Milliseconds(0));
  if (const auto left = lost(); gone.text.empty() && !left.empty())
    gone = {Cause::left, left.front().text()};
  for (int r = 0; r < size() && gone.text.empty(); ++r) {
    try {
      if (r != rank() && has_left(r))
        gone = {Cause::left, str_cat("rank ", job_rank(r), " has left")};
    } catch (const DistError&) {
      break;
    }
  }
  return gone;
}

// A rank that has left this group, or one that this was made from, takes no further part here.
bool Session::has_left(int r) const {
  for (std::string_view name = setup_.name; !name.empty(); name = parent_of(name))
    if (setup_.store->try_get(left_key(name, job_rank(r)))) return true;
  return false;
}

// While it connects: somebody is gone, or a group that this one is made from has ended.
Ending Session::why_nobody_comes() const {
  for (std::string_view name = parent_of(setup_.name); !name.empty(); name = parent_of(name))
    if (const auto why = setup_.store->try_get(str_cat(name, "/end")))
      return Ending::unpacked(*why);
  return who_is_gone();
}

Ending Session::explain(const NumberedCall& call, const std::string& what) {
  std::lock_guard one_at_a_time(explaining_);
  if (const Ending known = end(); !known.text.empty()) return conclude(known);
  bool late;
  {
    std::lock_guard lock(mutex_);
    late = late_ || Clock::now() + Milliseconds(10) >= call.deadline;
  }
  context_->transport().stop(what);
  return conclude(diagnose(call, what, late));
}

Ending Session::diagnose(const NumberedCall& call, const std::string& what, bool late) {
  std::map<int, std::string> others;
  try {
    setup_.store->set(key("last", rank()), (late ? kWaited : kCame) + call.bare_text());
    const Clock::time_point until = Clock::now() + (late ? kOthersTime : kReasonTime);
    do {
      if (const auto why = setup_.store->try_get(key("end"))) return Ending::unpacked(*why);
      if (Ending gone = who_is_gone(); !gone.text.empty()) {
        gone.text += notes();
        return gone;
      }
      for (int r = 0; r < size() && late; ++r) {
        if (r == rank() || others.contains(r)) continue;
        if (const auto theirs = setup_.store->try_get(key("last", r))) others[r] = *theirs;
      }
      if (late && static_cast<int>(others.size()) == size() - 1) break;
      std::this_thread::sleep_for(Milliseconds(30));
    } while (Clock::now() < until);
  } catch (const DistError& e) {
    const Ending gone = who_is_gone();
    return gone.text.empty() ? Ending{Cause::other, e.what()} : gone;
  }
  if (!late) return {Cause::other, what};
  Ending why = disagreement(call, others);
  why.text += notes();
  return why;
}

Ending Session::disagreement(const NumberedCall& call,
                             const std::map<int, std::string>& others) const {
  std::string calls, absent, slow;
  int missing = 0, slower = 0;
  bool differ = false;
  for (int r = 0; r < size(); ++r) {
    const auto theirs = others.find(r);
    if (r != rank() && theirs == others.end())
      absent += str_cat(missing++ ? ", " : "", job_rank(r));
    const std::string last = r == rank()              ? call.bare_text()
                             : theirs == others.end() ? ""
                                                      : theirs->second.substr(1);
    if (!last.empty()) calls += str_cat("; rank ", job_rank(r), ": ", last);
    differ |= !last.empty() && last != call.bare_text();
    if (theirs != others.end() && theirs->second.starts_with(kCame))
      slow += str_cat(slower++ ? ", " : "", job_rank(r));
  }
  if (differ && !call.point_to_point())
    return {Cause::disagree,
            str_cat("ranks disagree", calls,
                    "; all ranks must call the same collectives in the same order")};
  if (!differ) calls.clear();
  const auto named = [](int count, const std::string& list) {
    return str_cat(count > 1 ? "ranks " : "rank ", list);
  };
  const std::string waited = str_cat(" within ", call.timeout.count(), " ms (rank ",
                                     job_rank(rank()), " waited in ", call.text(), ")");
  if (missing == 0)
    return {Cause::late, str_cat(slower ? named(slower, slow) + " did not arrive"
                                        : "all ranks arrived but not all finished",
                                 waited, calls)};
  const std::string who = named(missing, absent);
  // Of these a rank may be done before the others have begun.
  const CollectiveKind kind = call.call.kind;
  const bool all_wait = kind == CollectiveKind::all_reduce || kind == CollectiveKind::all_gather ||
                        kind == CollectiveKind::reduce_scatter ||
                        kind == CollectiveKind::all_to_all || kind == CollectiveKind::barrier;
  return {Cause::late,
          all_wait ? str_cat(who, " did not arrive", waited)
                   : str_cat("no word from ", who, ", late or done with it,", waited, calls)};
}

// The first reason that any rank found stands for all.
Ending Session::conclude(const Ending& why) {
  Ending stands = why;
  try {
    stands = Ending::unpacked(setup_.store->set_once(key("end"), why.packed()));
  } catch (const DistError&) {
    // Then it stands here alone.
  }
  setup_.store->expect_readers();
  stop(stands);
  std::lock_guard lock(mutex_);
  end_ = stands;
  return stands;
}

void Session::abort(const std::string& text) { conclude({Cause::aborted, text}); }

void Session::note(std::string_view text) {
  leave_note(*setup_.store, setup_.name, job_rank(rank()), text);
}

std::string Session::notes() const { return read_notes(*setup_.store, setup_.name, setup_.ranks); }

void Session::leave() noexcept {
  try {
    if (end().text.empty()) setup_.store->set(left_key(setup_.name, job_rank(rank())), "1");
  } catch (const Error&) {
    // The store is gone, and with it whoever would have read this.
  }
  context_.reset();  // what was sent is still delivered
}

}  // namespace lockstep::dist::gloo_backend
