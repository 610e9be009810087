// Ranges of addresses first; where those meet, a bit per byte.
#include <lockstep/distributed/overlap.h>

#include <algorithm>

#include <lockstep/distributed/strided.h>

namespace lockstep::dist {

namespace {

struct Range {
  const std::byte* begin;
  const std::byte* end;
};

Range range_of(const Tensor& t) {
  const auto* first = static_cast<const std::byte*>(t.data_ptr());
  if (t.numel() == 0) return {first, first};
  const auto width = static_cast<int64_t>(size_of(t.dtype()));
  int64_t below = 0, above = width;
  for (int i = 0; i < t.dim(); ++i) {
    const int64_t reach = (t.shape()[i] - 1) * t.strides()[i] * width;
    (reach < 0 ? below : above) += reach;
  }
  return {first + below, first + above};
}

// Of tensors whose ranges form one chain.
bool share_elements_in(const std::vector<Tensor>& tensors, const std::vector<size_t>& chain) {
  const auto is_dense = [&](size_t i) { return StridedBytes(tensors[i]).dense(); };
  if (std::all_of(chain.begin(), chain.end(), is_dense)) return true;
  const std::byte* begin = range_of(tensors[chain[0]]).begin;
  const std::byte* end = begin;
  for (const size_t i : chain) end = std::max(end, range_of(tensors[i]).end);
  std::vector<bool> taken(static_cast<size_t>(end - begin));  // by byte
  for (const size_t i : chain) {
    const size_t width = size_of(tensors[i].dtype());
    bool twice = false;
    StridedBytes(tensors[i]).each([&](const std::byte* p) {
      const auto at = static_cast<size_t>(p - begin);
      for (size_t k = at; k < at + width; ++k) {
        twice |= taken[k];
        taken[k] = true;
      }
    });
    if (twice) return true;
  }
  return false;
}

}  // namespace

bool may_overlap(const Tensor& a, const Tensor& b) {
  const Range x = range_of(a), y = range_of(b);
  return x.begin < y.end && y.begin < x.end;
}

bool is_same_view(const Tensor& a, const Tensor& b) {
  return a.data_ptr() == b.data_ptr() && a.dtype() == b.dtype() && a.shape() == b.shape() &&
         a.strides() == b.strides();
}

std::vector<std::vector<size_t>> overlapping(const std::vector<Tensor>& tensors) {
  std::vector<std::pair<Range, size_t>> sorted;
  for (size_t i = 0; i < tensors.size(); ++i)
    if (tensors[i].numel() > 0) sorted.emplace_back(range_of(tensors[i]), i);
  std::stable_sort(sorted.begin(), sorted.end(),
                   [](const auto& a, const auto& b) { return a.first.begin < b.first.begin; });
  std::vector<std::vector<size_t>> chains;
  const std::byte* end = nullptr;
  for (const auto& [range, i] : sorted) {
    if (chains.empty() || range.begin >= end) {
      chains.emplace_back();
      end = range.end;
    }
    chains.back().push_back(i);
    end = std::max(end, range.end);
  }
  return chains;
}

bool share_elements(const std::vector<Tensor>& tensors) {
  const auto chains = overlapping(tensors);
  return std::any_of(chains.begin(), chains.end(), [&](const auto& chain) {
    return chain.size() > 1 && share_elements_in(tensors, chain);
  });
}

}  // namespace lockstep::dist
