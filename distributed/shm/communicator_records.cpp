// Communicator: the records that ranks post and collect, one per epoch.
#include <cstring>

#include <lockstep/distributed/shm/communicator.h>

namespace lockstep::dist {

void Communicator::post(uint64_t epoch, std::span<const std::byte> record) {
  LOCKSTEP_CHECK(record.size() <= kRecordBytes, ValueError, "post: a record has at most ",
                 kRecordBytes, " bytes, this one has ", record.size());
  check_here("post");
  if (!usable()) refuse("post");
  LOCKSTEP_CHECK(posted_ == 0 || (epoch == posted_ && collected_ == posted_), ValueError,
                 "post: epochs grow by one, and each is collected before the next is posted; got ",
                 epoch, " after ", posted_ - 1);
  Record& mine = area_.record(epoch, rank());
  mine.bytes = record.size();
  if (!record.empty()) std::memcpy(mine.data, record.data(), record.size());
  mine.epoch.store(epoch + 1, std::memory_order_release);
  posted_ = epoch + 1;
  wake_others();
}

std::vector<std::vector<std::byte>> Communicator::collect(uint64_t epoch) {
  check_here("collect");
  LOCKSTEP_CHECK(posted_ == epoch + 1, ValueError, "collect: epoch ", epoch,
                 " was not posted here before");
  const auto is_missing = [&](int r) {
    return area_.record(epoch, r).epoch.load(std::memory_order_acquire) != epoch + 1;
  };
  const auto missing = [&] {
    std::vector<int> ranks;
    for (int r = 0; r < size(); ++r)
      if (is_missing(r)) ranks.push_back(r);
    return ranks;
  };
  const std::string what = str_cat("collect of epoch ", epoch);
  const Clock::time_point deadline = deadline_after(timeout_);
  const auto look = [&] {
    {
      std::lock_guard lock(engine_->mutex());
      for (const int r : missing()) {
        const Ending why = absence(r);
        if (!why.text.empty() && is_missing(r)) give_up(why);
      }
      if (const auto late = missing(); !late.empty() && Clock::now() >= deadline)
        give_up({Cause::late, str_cat("rank ", late[0], " did not post its record of epoch ", epoch,
                                      " within ", timeout_.count(), " ms")});
    }
    if (!missing().empty() && !usable()) refuse(what);
  };
  wait_for([&] { return missing().empty(); }, [&] { return obstacle(what, missing()); }, look);
  std::vector<std::vector<std::byte>> records;
  for (int r = 0; r < size(); ++r) {
    const Record& theirs = area_.record(epoch, r);
    records.emplace_back(theirs.data, theirs.data + theirs.bytes);
  }
  collected_ = epoch + 1;
  return records;
}

}  // namespace lockstep::dist
