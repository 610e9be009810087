// Subset: some samples of a dataset, as a dataset: a short trial run, or a split for validation.
//
//   data::Subset trial{train, data::Range{0, 1000}};
//   data::Subset odd{train, std::vector<int64_t>{1, 3, 5}};
#pragma once

#include <utility>
#include <vector>

#include <lockstep/data/dataset.h>
#include <lockstep/data/sampler.h>

namespace lockstep::data {

/// Sample i is the dataset's indices[i]; augmentation sees the dataset's own number, so a sample
/// looks the same in the whole and in the part.
template <Dataset D>
class Subset {
 public:
  /// IndexError for an index that the dataset does not have.
  Subset(D dataset, std::vector<int64_t> indices)
      : dataset_(std::move(dataset)), indices_(std::move(indices)) {
    for (int64_t i : indices_)
      LOCKSTEP_CHECK(i >= 0 && i < dataset_.size(), IndexError, "Subset: there is no sample ", i,
                     " among ", dataset_.size());
  }
  /// The samples of a range.
  Subset(D dataset, Range range) : dataset_(std::move(dataset)) {
    LOCKSTEP_CHECK(range.begin >= 0 && range.begin <= range.end && range.end <= dataset_.size(),
                   IndexError, "Subset: there are no samples ", range.begin, " to ", range.end,
                   " among ", dataset_.size());
    for (int64_t i = range.begin; i < range.end; ++i) indices_.push_back(i);
  }

  int64_t size() const { return static_cast<int64_t>(indices_.size()); }
  auto get(std::span<const int64_t> indices, const RandomSource& random) const {
    std::vector<int64_t> originals;
    originals.reserve(indices.size());
    for (int64_t i : indices) {
      LOCKSTEP_CHECK(i >= 0 && i < size(), IndexError, "Subset: there is no sample ", i, " among ",
                     size());
      originals.push_back(indices_[static_cast<size_t>(i)]);
    }
    return fetch(dataset_, originals, random);
  }

 private:
  D dataset_;
  std::vector<int64_t> indices_;
};

}  // namespace lockstep::data
