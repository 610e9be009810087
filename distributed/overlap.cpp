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
bool share_elements_in(const std::vector<const Tensor*>& tensors, Range whole) {
  const auto is_dense = [](const Tensor* t) { return StridedBytes(*t).dense(); };
  if (std::all_of(tensors.begin(), tensors.end(), is_dense)) return true;
  std::vector<bool> taken(static_cast<size_t>(whole.end - whole.begin));  // by byte
  for (const Tensor* t : tensors) {
    const size_t width = size_of(t->dtype());
    bool twice = false;
    StridedBytes(*t).each([&](const std::byte* p) {
      const auto at = static_cast<size_t>(p - whole.begin);
      for (size_t i = at; i < at + width; ++i) {
        twice |= taken[i];
        taken[i] = true;
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

bool share_elements(const std::vector<Tensor>& tensors) {
  std::vector<const Tensor*> sorted;
  for (const Tensor& t : tensors)
    if (t.numel() > 0) sorted.push_back(&t);
  std::sort(sorted.begin(), sorted.end(), [](const Tensor* a, const Tensor* b) {
    return range_of(*a).begin < range_of(*b).begin;
  });
  for (size_t i = 0; i < sorted.size();) {
    Range whole = range_of(*sorted[i]);
    std::vector<const Tensor*> chain{sorted[i++]};
    for (; i < sorted.size() && range_of(*sorted[i]).begin < whole.end; ++i) {
      whole.end = std::max(whole.end, range_of(*sorted[i]).end);
      chain.push_back(sorted[i]);
    }
    if (chain.size() > 1 && share_elements_in(chain, whole)) return true;
  }
  return false;
}

}  // namespace lockstep::dist
