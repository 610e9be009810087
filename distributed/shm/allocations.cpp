// Allocations: a segment is a head that counts the ranks which dropped their part, then the parts.
#include <lockstep/distributed/shm/allocations.h>

#include <atomic>

namespace lockstep::dist {

namespace {
struct alignas(64) SegmentHead {
  std::atomic<uint32_t> dropped;
};
SegmentHead& head_of(const Segment& segment) {
  return *reinterpret_cast<SegmentHead*>(segment.data());
}

size_t stride_for(size_t bytes) { return (std::max<size_t>(bytes, 1) + 63) / 64 * 64; }
}  // namespace

std::byte* Allocations::Entry::part(int rank) const {
  return segment->data() + sizeof(SegmentHead) + stride * static_cast<size_t>(rank);
}

size_t Allocations::segment_bytes(size_t bytes, int size) {
  return sizeof(SegmentHead) + stride_for(bytes) * static_cast<size_t>(size);
}

Ref<Storage> Allocations::add(std::shared_ptr<Segment> segment, size_t bytes, int rank, int size) {
  purge(size);
  entries_.push_back({++last_id_, segment, stride_for(bytes)});
  // The deleter may run on any thread and after the communicator is gone: it touches the segment
  // alone.
  return make_ref<Storage>(entries_.back().part(rank), bytes, Device{}, [segment] {
    if (segment->is_here()) head_of(*segment).dropped.fetch_add(1, std::memory_order_acq_rel);
  });
}

Allocations::Place Allocations::find(const std::byte* data, size_t bytes, int rank) const {
  for (const Entry& e : entries_) {
    const std::byte* part = e.part(rank);
    if (data >= part && data + bytes <= part + e.stride)
      return {e.id, static_cast<uint64_t>(data - part)};
  }
  return {};
}

std::byte* Allocations::at(Place place, int rank) const {
  for (const Entry& e : entries_)
    if (e.id == place.id) return e.part(rank) + place.offset;
  return nullptr;
}

void Allocations::purge(int size) {
  std::erase_if(entries_, [&](const Entry& e) {
    return head_of(*e.segment).dropped.load(std::memory_order_acquire) ==
           static_cast<uint32_t>(size);
  });
}

}  // namespace lockstep::dist
