// Communicator: the records that ranks post and collect, one per epoch.
#include <cstring>

#include <lockstep/distributed/shm/communicator.h>

namespace lockstep::dist {

void Communicator::post(uint64_t epoch, std::span<const std::byte> record) {
  LOCKSTEP_CHECK(record.size() <= kRecordBytes, ValueError, "post: a record has at most ",
                 kRecordBytes, " bytes, this one has ", record.size());
  if (!usable()) refuse("post");
  LOCKSTEP_CHECK(posted_ == 0 || (epoch == posted_ && collected_ == posted_), ValueError,
                 "post: epochs grow by one, and each is collected before the next is posted; got ",
                 epoch, " after ", posted_ - 1);
  Record& mine = area_.record(epoch, rank());
  mine.bytes = record.size();
  if (!record.empty()) std::memcpy(mine.data, record.data(), record.size());
  mine.epoch.store(epoch + 1, std::memory_order_release);
  posted_ = epoch + 1;
  raise_others();
}

std::vector<std::vector<std::byte>> Communicator::collect(uint64_t epoch) {
  LOCKSTEP_CHECK(posted_ == epoch + 1, ValueError, "collect: epoch ", epoch,
                 " was not posted here before");
  const auto missing = [&] {
    for (int r = 0; r < size(); ++r)
      if (area_.record(epoch, r).epoch.load(std::memory_order_acquire) != epoch + 1) return r;
    return -1;
  };
  const Clock::time_point deadline = Clock::now() + timeout_;
  engine_->wait([&] { return missing() < 0; },
                [&] {
                  for (int r = 0; r < size(); ++r) {
                    const std::string why = absence(r);
                    if (!why.empty() &&
                        area_.record(epoch, r).epoch.load(std::memory_order_acquire) != epoch + 1)
                      give_up(why);
                  }
                  const int late = missing();
                  if (late >= 0 && Clock::now() >= deadline)
                    give_up(str_cat("rank ", late, " did not post its record of epoch ", epoch,
                                    " within ", timeout_.count(), " ms"));
                  if (late >= 0 && !usable()) refuse(str_cat("collect of epoch ", epoch));
                });
  std::vector<std::vector<std::byte>> records;
  for (int r = 0; r < size(); ++r) {
    const Record& theirs = area_.record(epoch, r);
    records.emplace_back(theirs.data, theirs.data + theirs.bytes);
  }
  collected_ = epoch + 1;
  return records;
}

}  // namespace lockstep::dist
