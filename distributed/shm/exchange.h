// Exchange: a collective of all ranks under way. All kinds are the same stream of chunks: a rank
// *offers* chunks of its tensors (through its window, or all at once where the tensor itself is
// shared), and either anybody claims a chunk that all have offered and *combines* it, and the ranks
// it is for take it, or ranks *take* their ranges of the others' streams as they are. Which of it a
// kind does is its Pattern.
#pragma once

#include <algorithm>

#include <lockstep/distributed/shm/operation.h>

namespace lockstep::dist {

class Exchange final : public Operation {
 public:
  Exchange(std::shared_ptr<Communicator> communicator, const Call& call, Collective what);

  bool advance() override;
  bool needs(int rank) const override;
  std::vector<int> missing() const override;
  std::vector<int> not_called() const override;
  std::vector<int> lagging() const override;

 private:
  /// A piece of a tensor sequence that stands at chunks [begin, end) of a stream.
  struct Part {
    StridedBytes bytes;
    int64_t elements;
    int rank;  // whom it is for, or from whom it comes
    uint64_t begin, end;
    uint64_t done = 0;      // chunks taken
    bool in_place = false;  // the output is the input: nothing to copy
  };

  bool direct() const { return call_.allocation != 0; }
  /// The destination of part k of rank r's stream. Streams that are combined have their parts in
  /// rank order; others begin with their own rank's part, so that not all send to the same rank at
  /// once.
  int owner(int r, int k) const { return pattern_.combines ? k : (r + k) % size_; }

  bool lane_is_free() const;
  void publish();
  bool all_arrived() const;
  void compare();
  bool sizes_agree() const;
  void plan_taking();
  uint64_t first_chunk_from(int source) const;
  bool offer();
  bool combine();
  bool take_combined();
  bool take_streams();
  bool finished() const;

  Mark& mark(int rank) const { return area().mark(call_.sequence, rank); }
  uint64_t offered_by(int rank) const {
    return count_in(mark(rank).offered.load(std::memory_order_acquire), call_.sequence);
  }
  uint64_t released() const;
  std::byte* place(int rank, uint64_t chunk) const;
  /// Elements of a part that stand in a chunk of it, the first and how many.
  int64_t first(const Part& p, uint64_t chunk) const {
    return static_cast<int64_t>(chunk - p.begin) * chunk_elements_;
  }
  int64_t count(const Part& p, uint64_t chunk) const {
    return std::min(chunk_elements_, p.elements - first(p, chunk));
  }

  const Pattern& pattern_;
  std::vector<Part> sources_;  // this rank's stream
  std::vector<Part> targets_;  // what it takes
  uint64_t chunks_ = 0;        // in its stream
  uint64_t offered_ = 0, taken_ = 0;
  size_t slot_ = 0;                 // the source that is being offered
  bool any_window_ = false;         // some rank's chunks go through its window
  std::vector<std::byte*> places_;  // by rank: its tensor where that is shared, else null
  std::vector<std::byte*> buffers_;
};

}  // namespace lockstep::dist
