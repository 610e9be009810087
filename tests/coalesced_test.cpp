// Many tensors as one collective: mixed dtypes, strided, empty and 0-d, on ranks as threads.
#include <doctest/doctest.h>

#include "ddp_helpers.h"

namespace {

/// Tensors of several kinds; element i of tensor k is 10 k + i, plus `add`.
std::vector<Tensor> mixed(double add) {
  std::vector<Tensor> all;
  const std::vector<std::pair<Shape, DType>> kinds{{{3}, DType::f32}, {{2, 2}, DType::i64},
                                                   {{}, DType::f64},  {{0, 4}, DType::f32},
                                                   {{5}, DType::f64}, {{1, 3}, DType::f32}};
  for (size_t k = 0; k < kinds.size(); ++k) {
    const auto& [shape, dtype] = kinds[k];
    std::vector<double> values;
    for (int64_t i = 0; i < shape.numel(); ++i)
      values.push_back(10.0 * static_cast<double>(k) + static_cast<double>(i) + add);
    all.push_back(tensor(values).reshape(shape).to(dtype));
  }
  all.push_back(tensor<float>({1, 2, 3, 4, 5, 6}).reshape({2, 3}).t());  // strided
  all.back().add_(static_cast<float>(add));
  return all;
}

void check_sums(Group g) {
  const std::vector<Tensor> mine = mixed(g.rank());
  const dist::WorkPtr work = dist::all_reduce_coalesced(g.process_group(), mine);
  work->wait();
  require(work->is_completed() && !work->exception(), "complete");
  const double ranks = g.size(), sum_of_ranks = ranks * (ranks - 1) / 2;
  const std::vector<Tensor> zero = mixed(0);
  for (size_t k = 0; k < mine.size(); ++k) {
    const auto got = mine[k].to_vector<double>(), base = zero[k].to_vector<double>();
    for (size_t i = 0; i < base.size(); ++i)
      near(got[i], ranks * base[i] + sum_of_ranks, str_cat("tensor ", k, ", element ", i));
  }
}

void check_broadcast(Group g) {
  const int root = g.size() - 1;
  const std::vector<Tensor> mine = mixed(g.rank()), want = mixed(root);
  dist::broadcast_coalesced(g.process_group(), mine, root)->wait();
  for (size_t k = 0; k < mine.size(); ++k)
    require(mine[k].to_vector<double>() == want[k].to_vector<double>(), str_cat("tensor ", k));
}

}  // namespace

TEST_CASE("coalesced collectives equal one by one") {
  for (const int size : {1, 2, 3}) {
    CHECK_NOTHROW(run_local(size, check_sums, kQuick));
    CHECK_NOTHROW(run_local(size, check_broadcast, kQuick));
  }
}

TEST_CASE("no tensors at all are no collective") {
  CHECK_NOTHROW(run_local(
      2,
      [](Group g) {
        dist::all_reduce_coalesced(g.process_group(), {})->wait();
        g.barrier();
      },
      kQuick));
}
