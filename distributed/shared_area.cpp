// SharedArea's layout, the texts of calls, and the poison mark.
#include <lockstep/distributed/shared_area.h>

#include <algorithm>
#include <cstring>

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
      window_chunks_(std::clamp<uint64_t>(128 / size_, 2, kLongestWindow)) {
  Cutter cut{segment_ ? segment_->data() + offset : nullptr};
  head_ = cut.take<Head>(1);
  gone_ = cut.take<std::atomic<uint32_t>>(size_);
  texts_ = cut.take<Text>(size_);
  lanes_ = cut.take<Lane>(kLanes);
  marks_ = cut.take<Mark>(kLanes * size_);
  calls_ = cut.take<PostedCall>(kLanes * size_);
  records_ = cut.take<Record>(2 * size_);
  windows_ = cut.take<std::byte>(kLanes * size_ * window_chunks_ * kChunkBytes);
  bytes_ = cut.at;
}

size_t SharedArea::bytes_for(int size) { return SharedArea(nullptr, 0, size).bytes_; }

void SharedArea::poison(int rank, const std::string& text) const {
  if (!poisoned()) {
    // Written before it is announced: a rank that dies in between has said nothing.
    Text& mine = texts_[rank];
    mine.words[text.copy(mine.words, sizeof mine.words - 1)] = '\0';
    uint32_t clean = 0;
    head_->poisoned.compare_exchange_strong(clean, static_cast<uint32_t>(rank) + 1,
                                            std::memory_order_acq_rel);
  }
  for (int i = 0; i < kLanes; ++i) lanes_[i].claimed.fetch_or(kPoison, std::memory_order_acq_rel);
}

std::string SharedArea::poison_text() const {
  return texts_[head_->poisoned.load(std::memory_order_acquire) - 1].words;
}

bool Call::agrees_with(const Call& o) const {
  return kind == o.kind && reduce == o.reduce && dtype == o.dtype && dims == o.dims &&
         root == o.root && sequence == o.sequence && std::equal(shape, shape + dims, o.shape);
}

std::string Call::text() const {
  constexpr std::string_view names[] = {"all_reduce", "broadcast", "all_gather",
                                        "barrier",    "child",     "allocate"};
  std::string text(names[static_cast<int>(kind)]);
  if (kind == CallKind::all_reduce) text += str_cat("(", name_of(reduce), ")");
  if (kind == CallKind::broadcast) text += str_cat(" from rank ", root);
  if (kind == CallKind::allocate) text += str_cat(" of ", shape[0], " bytes");
  if (kind <= CallKind::all_gather)
    text += str_cat(" of ", dtype, " ",
                    Shape(std::span<const int64_t>(shape, static_cast<size_t>(dims))));
  return text;
}

}  // namespace lockstep::dist
