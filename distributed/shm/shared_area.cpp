// SharedArea's layout and the poison mark.
#include <lockstep/distributed/shm/shared_area.h>

#include <algorithm>

namespace lockstep::dist {

namespace {
// Hands out consecutive pieces of memory, 64-byte aligned; without memory it only counts.
struct Cutter {
  std::byte* base;
  size_t at = 0;
  template <class T>
  T* take(size_t count) {
    T* piece = base ? reinterpret_cast<T*>(base + at) : nullptr;
    at += (count * sizeof(T) + 63) / 64 * 64;
    return piece;
  }
};
}  // namespace

SharedArea::SharedArea(std::shared_ptr<Segment> segment, size_t offset, int size)
    : segment_(std::move(segment)),
      size_(static_cast<size_t>(size)),
      row_((size_ + 7) / 8 * 8),
      window_chunks_(std::clamp<uint64_t>(128 / size_, 2, kLongestWindow)) {
  Cutter cut{segment_ ? segment_->data() + offset : nullptr};
  head_ = cut.take<Head>(1);
  gone_ = cut.take<std::atomic<uint32_t>>(size_);
  called_ = cut.take<Called>(size_);
  reasons_ = cut.take<Reason>(size_);
  notes_ = cut.take<Note>(size_);
  lanes_ = cut.take<Lane>(kLanes);
  marks_ = cut.take<Mark>(kLanes * size_);
  calls_ = cut.take<PostedCall>(kLanes * size_);
  taken_ = cut.take<std::atomic<uint64_t>>(kLanes * size_ * row_);
  gives_ = cut.take<int64_t>(kLanes * size_ * row_);
  wants_ = cut.take<int64_t>(kLanes * size_ * row_);
  records_ = cut.take<Record>(2 * size_);
  pairs_ = cut.take<Pair>(size_ * size_);
  windows_ = cut.take<std::byte>(kLanes * size_ * window_chunks_ * kChunkBytes);
  outboxes_ = cut.take<std::byte>(size_ * window_chunks_ * kChunkBytes);
  bytes_ = cut.at;
}

size_t SharedArea::bytes_for(int size) { return SharedArea(nullptr, 0, size).bytes_; }

void SharedArea::poison(int rank, const Ending& why) const {
  if (!poisoned()) {
    // Written before it is announced: a rank that dies in between has said nothing.
    Reason& mine = reasons_[rank];
    mine.cause.store(why.cause, std::memory_order_relaxed);
    mine.text.write(why.text);
    uint32_t clean = 0;
    head_->poisoned.compare_exchange_strong(clean, static_cast<uint32_t>(rank) + 1,
                                            std::memory_order_acq_rel);
  }
  for (int i = 0; i < kLanes; ++i) lanes_[i].claimed.fetch_or(kPoison, std::memory_order_acq_rel);
}

Ending SharedArea::ending() const {
  const Reason& first = reasons_[head_->poisoned.load(std::memory_order_acquire) - 1];
  return {first.cause.load(std::memory_order_relaxed), first.text.read()};
}

}  // namespace lockstep::dist
