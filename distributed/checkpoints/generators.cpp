// The default generators of all ranks in a checkpoint.
#include <algorithm>

#include <lockstep/distributed/checkpoints/format.h>

namespace lockstep::dist::checkpoint_format {

Tensor all_generators(const Group& group) {
  const GeneratorState& g = default_generator().state();
  return group.all_gather(
      tensor<int64_t>({static_cast<int64_t>(g.seed), static_cast<int64_t>(g.offset)}));
}

Generator own_generator(const Tensor& saved, const Group& group) {
  LOCKSTEP_CHECK(
      saved.dtype() == DType::i64 && saved.dim() == 2 && saved.size(0) > 0 && saved.size(1) == 2,
      ValueError, "entry 'generator' must be i64 [ranks, 2], and is ", saved.dtype(), " ",
      saved.shape());
  const auto numbers = saved.to_vector<int64_t>();
  GeneratorState g = default_generator().state();
  const int64_t ranks = saved.size(0);
  const auto seed = [&](int64_t r) {
    return static_cast<uint64_t>(numbers[static_cast<size_t>(2 * r)]);
  };
  const auto offset = [&](int64_t r) {
    return static_cast<uint64_t>(numbers[static_cast<size_t>(2 * r + 1)]);
  };
  if (ranks == group.size()) {
    g.seed = seed(group.rank());
    g.offset = offset(group.rank());
    return g;
  }
  bool common = true;
  g.offset = 0;
  for (int64_t r = 0; r < ranks; ++r) {
    common = common && seed(r) == seed(0);
    g.offset = std::max(g.offset, offset(r));
  }
  if (common) g.seed = seed(0);
  return g;
}

}  // namespace lockstep::dist::checkpoint_format
