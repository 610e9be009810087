// Records of blocked ranks in the store, and the search for a cycle among them. While a rank is
// blocked its record does not change, and nor do its counts: so a cycle that is read twice, alike,
// is real.
#include <lockstep/distributed/store/wait_board.h>

#include <algorithm>
#include <optional>

#include <lockstep/distributed/peer_error.h>
#include <lockstep/distributed/store.h>
#include <lockstep/distributed/store/wire.h>

namespace lockstep::dist {

namespace {

constexpr std::chrono::milliseconds kWrittenAfter(300), kLookEvery(200);

std::string key_of(int rank) { return str_cat("blocked/", rank); }

}  // namespace

/// What a blocked rank has written.
struct BlockedStoreWait::Record {
  std::string bytes;  // of it all; the waits of a rank differ by their beginning
  BlockedCall call;
  std::map<std::string, uint64_t> counts;

  static std::string write(const BlockedCall& call, uint64_t stamp,
                           const std::map<std::string, uint64_t>& counts) {
    store_wire::Packer out;
    out.number(stamp, 8).text(call.calls).number(call.number, 8);
    out.text(call.text).text(call.end_key).number(call.ranks.size(), 4);
    for (const int r : call.ranks) out.number(static_cast<uint64_t>(r), 4);
    out.number(counts.size(), 4);
    for (const auto& [name, number] : counts) out.text(name).number(number, 8);
    return out.bytes();
  }
  static std::optional<Record> read(const std::optional<std::string>& bytes) {
    if (!bytes) return std::nullopt;
    constexpr size_t kMost = store_wire::kMostValueBytes;
    Record r{*bytes, {}, {}};
    store_wire::Unpacker in(r.bytes);
    in.number(8);
    r.call.calls = in.text(kMost);
    r.call.number = in.number(8);
    r.call.text = in.text(kMost);
    r.call.end_key = in.text(kMost);
    for (uint64_t n = in.number(4); n > 0 && in.ok(); --n)
      r.call.ranks.push_back(static_cast<int>(in.number(4)));
    for (uint64_t n = in.number(4); n > 0 && in.ok(); --n) {
      const std::string name(in.text(kMost));
      r.counts[name] = in.number(8);
    }
    return in.done() ? std::optional(std::move(r)) : std::nullopt;
  }
  bool waits_for(const Record& other) const {
    const auto made = other.counts.find(call.calls);
    return made == other.counts.end() || made->second < call.number;
  }
};

void WaitBoard::count(const std::string& calls, uint64_t number) {
  std::lock_guard lock(mutex_);
  counts_[calls] = number;
}

BlockedStoreWait::BlockedStoreWait(Store& store, BlockedCall call)
    : store_(store), call_(std::move(call)), next_look_(begin_ + kWrittenAfter) {}

BlockedStoreWait::~BlockedStoreWait() {
  if (!written_) return;
  try {
    store_.remove(key_of(store_.rank()));
  } catch (const Error&) {
    // Without a store nobody reads it.
  }
}

std::string BlockedStoreWait::look() {
  const Clock::time_point now = Clock::now();
  if (now < next_look_ || foreign_threads() > 0) return {};
  next_look_ =
      now + std::max<Clock::duration>(kLookEvery, std::chrono::milliseconds(10) * store_.size());
  if (!written_) {
    std::map<std::string, uint64_t> counts;
    {
      std::lock_guard lock(store_.waits().mutex_);
      counts = store_.waits().counts_;
    }
    const auto stamp = static_cast<uint64_t>(now.time_since_epoch().count());
    store_.set(key_of(store_.rank()), Record::write(call_, stamp, counts));
    written_ = true;
    return {};
  }
  return find_deadlock();
}

// The shortest way from this rank over ranks that have not made the call, all blocked, back to this
// one.
std::string BlockedStoreWait::find_deadlock() {
  const int me = store_.rank(), size = store_.size();
  std::vector<std::string> keys;
  for (int r = 0; r < size; ++r) keys.push_back(key_of(r));
  std::vector<std::optional<Record>> records;
  for (const auto& value : store_.look_up(keys)) records.push_back(Record::read(value));
  if (!records[static_cast<size_t>(me)]) written_ = false;  // a wait inside this one took it back
  const auto record = [&](int r) -> const Record& { return *records[static_cast<size_t>(r)]; };

  std::vector<int> from(static_cast<size_t>(size), -1), reached{me}, cycle;
  for (size_t next = 0; next < reached.size() && cycle.empty(); ++next) {
    const int r = reached[next];
    if (!records[static_cast<size_t>(r)]) continue;
    for (const int m : record(r).call.ranks) {
      if (m < 0 || m >= size || m == r || !records[static_cast<size_t>(m)] ||
          !record(r).waits_for(record(m)))
        continue;
      if (m == me) {
        for (int at = r; at != me; at = from[static_cast<size_t>(at)]) cycle.push_back(at);
        cycle.push_back(me);
        std::reverse(cycle.begin(), cycle.end());
        break;
      }
      if (from[static_cast<size_t>(m)] >= 0) continue;
      from[static_cast<size_t>(m)] = r;
      reached.push_back(m);
    }
  }
  std::string seen, text = "deadlock: ";
  for (size_t i = 0; i < cycle.size(); ++i) {
    seen += record(cycle[i]).bytes;
    text += str_cat(i ? "; " : "", "rank ", cycle[i], " waits in ", record(cycle[i]).call.text,
                    " for rank ", cycle[(i + 1) % cycle.size()]);
  }
  if (seen.empty() || std::exchange(last_, seen) != seen) return {};
  text += "; all ranks must enter the calls of all groups in the same order";
  for (const int r : cycle)
    store_.set_once(record(r).call.end_key, Ending{Cause::deadlock, text}.packed());
  return text;
}

}  // namespace lockstep::dist
