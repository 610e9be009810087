// Every kind of collective, by dtype and layout, against a plain loop: what any backend must get
// right. Values differ by rank and element and are small integers, so sums and products are exact in
// every order, in every dtype.
#pragma once

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include <lockstep/distributed/group.h>
#include <lockstep/tensor/half.h>

#include "ranks.h"

namespace every_kind {

using namespace lockstep;
using namespace lockstep::dist;
using ranks::require;

inline int64_t value(int rank, int64_t i) { return (rank * 7 + i * 3 + rank * (i % 11)) % 5 + 1; }

/// Tensors of ones whose storage may be larger than they are.
struct Layout {
  const char* name;
  std::function<Tensor(DType)> make;
};
inline std::vector<Layout> layouts() {
  const auto of = [](const Shape& shape, DType t) { return ones(shape, {.dtype = t}); };
  return {{"one element", [=](DType t) { return of(Shape{1}, t); }},
          {"0-d", [=](DType t) { return of(Shape{}, t); }},
          {"empty",
           [=](DType t) {
             return of(Shape{3, 0, 2}, t);
           }},
          {"empty and transposed",
           [=](DType t) {
             return of(Shape{3, 0}, t).transpose(0, 1);
           }},
          {"contiguous",
           [=](DType t) {
             return of(Shape{7, 13}, t);
           }},
          {"transposed",
           [=](DType t) {
             return of(Shape{9, 14}, t).transpose(0, 1);
           }},
          {"sliced",
           [=](DType t) {
             return of(Shape{6, 40}, t).slice(1, {3, 37, 3});
           }},
          {"offset", [=](DType t) {
             return of(Shape{8, 5, 6}, t).narrow(0, 2, 3).permute({2, 0, 1});
           }}};
}

template <class T>
void fill(const Tensor& t, const std::function<int64_t(int64_t)>& f) {
  Tensor dense = empty(t.shape(), {.dtype = t.dtype()});
  for (int64_t i = 0; i < t.numel(); ++i) dense.data<T>()[i] = static_cast<T>(f(i));
  Tensor(t).copy_(dense);
}

/// The elements, and that nothing of the storage beside them was written.
template <class T>
void check(const Tensor& t, const std::function<double(int64_t)>& f, const std::string& what) {
  const Tensor dense = t.contiguous();
  for (int64_t i = 0; i < t.numel(); ++i)
    require(dense.data<T>()[i] == static_cast<T>(f(i)),
            str_cat(what, ": element ", i, " is ", dense.data<T>()[i], ", not ", f(i)));
  Tensor(t).fill_(1);
  const auto total = static_cast<int64_t>(t.storage().bytes() / sizeof(T));
  const T* whole = static_cast<const T*>(t.storage().data());
  for (int64_t i = 0; i < total; ++i)
    require(whole[i] == T(1), str_cat(what, ": wrote beside the tensor"));
}

inline double reduced(ReduceOp op, int size, const std::function<int64_t(int)>& of_rank) {
  int64_t x = of_rank(0);
  for (int r = 1; r < size; ++r) {
    const int64_t y = of_rank(r);
    switch (op) {
      case ReduceOp::product:
        x *= y;
        break;
      case ReduceOp::min:
        x = std::min(x, y);
        break;
      case ReduceOp::max:
        x = std::max(x, y);
        break;
      case ReduceOp::band:
        x &= y;
        break;
      case ReduceOp::bor:
        x |= y;
        break;
      case ReduceOp::bxor:
        x ^= y;
        break;
      default:
        x += y;
    }
  }
  return static_cast<double>(x);
}

inline bool meaningful(ReduceOp op, DType t) {
  if (is_floating(t)) return op < ReduceOp::band;
  if (t == DType::boolean) return op >= ReduceOp::min;
  return op != ReduceOp::avg;
}

template <class T>
void check_layout(const Group& g, const Layout& layout) {
  const DType dtype = dtype_of<T>();
  const int me = g.rank(), size = g.size();
  ProcessGroup& pg = g.process_group();
  const std::string what = str_cat(layout.name, " ", dtype, " on rank ", me, ": ");
  const auto mine = [&](int64_t i) {
    return dtype == DType::boolean ? value(me, i) % 2 : value(me, i);
  };
  const auto of = [&](int rank, int64_t i) {
    return dtype == DType::boolean ? value(rank, i) % 2 : value(rank, i);
  };
  const auto make = [&] { return layout.make(dtype); };
  const auto several = [&] {
    std::vector<Tensor> all;
    for (int r = 0; r < size; ++r) all.push_back(make());
    return all;
  };

  for (int op = 0; op < 8; ++op) {
    const auto reduce = static_cast<ReduceOp>(op);
    if (!meaningful(reduce, dtype)) continue;
    const auto expected = [&](int64_t i) {
      double x = reduced(reduce, size, [&](int r) { return of(r, i); });
      // u8 wraps around; avg is the sum times 1/size in the dtype.
      if (dtype == DType::u8) x = static_cast<uint8_t>(static_cast<int64_t>(x));
      if (reduce == ReduceOp::avg) x = static_cast<T>(x) * static_cast<T>(1.0 / size);
      return x;
    };
    const Tensor t = make();
    fill<T>(t, mine);
    g.all_reduce(t, reduce);
    check<T>(t, expected, str_cat(what, "all_reduce ", name_of(reduce)));

    const int root = op % size;
    const Tensor u = make();
    fill<T>(u, mine);
    g.reduce(u, root, reduce);
    if (me == root)
      check<T>(u, expected, str_cat(what, "reduce ", name_of(reduce)));
    else
      check<T>(
          u, [&](int64_t i) { return mine(i); }, what + "reduce's input");

    const std::vector<Tensor> parts = several();
    for (int r = 0; r < size; ++r)
      fill<T>(parts[static_cast<size_t>(r)], [&](int64_t i) { return of(me, i + r); });
    const Tensor part = make();
    pg.reduce_scatter(part, parts, reduce)->wait();
    check<T>(
        part,
        [&](int64_t i) {
          double x = reduced(reduce, size, [&](int r) { return of(r, i + me); });
          if (dtype == DType::u8) x = static_cast<uint8_t>(static_cast<int64_t>(x));
          if (reduce == ReduceOp::avg) x = static_cast<T>(x) * static_cast<T>(1.0 / size);
          return x;
        },
        str_cat(what, "reduce_scatter ", name_of(reduce)));
  }

  for (int root = 0; root < size; ++root) {
    const Tensor t = make();
    fill<T>(t, mine);
    g.broadcast(t, root);
    check<T>(
        t, [&](int64_t i) { return of(root, i); }, what + "broadcast");

    const Tensor input = make();
    fill<T>(input, mine);
    const std::vector<Tensor> outputs = me == root ? several() : std::vector<Tensor>();
    pg.gather(outputs, input, root)->wait();
    for (size_t r = 0; r < outputs.size(); ++r)
      check<T>(
          outputs[r], [&](int64_t i) { return of(static_cast<int>(r), i); }, what + "gather");

    std::vector<Tensor> inputs = me == root ? several() : std::vector<Tensor>();
    for (size_t r = 0; r < inputs.size(); ++r)
      fill<T>(inputs[r], [&](int64_t i) { return of(root, i + static_cast<int64_t>(r)); });
    const Tensor output = make();
    g.scatter(output, inputs, root);
    check<T>(
        output, [&](int64_t i) { return of(root, i + me); }, what + "scatter");
  }

  const Tensor input = make();
  fill<T>(input, mine);
  const std::vector<Tensor> gathered = several();
  pg.all_gather(gathered, input)->wait();
  for (size_t r = 0; r < gathered.size(); ++r)
    check<T>(
        gathered[r], [&](int64_t i) { return of(static_cast<int>(r), i); }, what + "all_gather");

  const std::vector<Tensor> out = several(), in = several();
  for (int r = 0; r < size; ++r)
    fill<T>(in[static_cast<size_t>(r)], [&](int64_t i) { return of(me, i + r); });
  g.all_to_all(out, in);
  for (int r = 0; r < size; ++r)
    check<T>(
        out[static_cast<size_t>(r)], [&](int64_t i) { return of(r, i + me); }, what + "all_to_all");
}

/// All kinds but send and recv. Layouts differ in how bytes are copied, so each width of an element
/// sees them all with one dtype, and its other dtypes two of them.
inline void check_all(const Group& g) {
  for (const Layout& layout : layouts()) {
    check_layout<float>(g, layout);
    if (g.size() == 3) continue;  // the dtypes have been seen with two ranks, and will be with four
    check_layout<double>(g, layout);
    check_layout<uint8_t>(g, layout);
    const std::string_view name = layout.name;
    if (name != "contiguous" && name != "sliced") continue;
    check_layout<int64_t>(g, layout);
    check_layout<int32_t>(g, layout);
    check_layout<bool>(g, layout);
  }
  g.barrier();
}

/// Sums of many sizes, also such as are cut into pieces: the same bits on all ranks and in every run,
/// near the sum in rank order.
inline void check_bits(const Group& g) {
  for (const int64_t n : {1, 2, 3, 5, 1000, 100003, 700001}) {
    const auto number = [&](int rank, int64_t i) {
      const uint64_t h = (static_cast<uint64_t>(rank) * 1000003 + static_cast<uint64_t>(i) + 17) *
                         0x9E3779B97F4A7C15u;
      return static_cast<float>(static_cast<double>(h >> 40) / 8388608.0 - 1);
    };
    const auto sum = [&] {
      const Tensor t = empty({n});
      for (int64_t i = 0; i < n; ++i) t.data<float>()[i] = number(g.rank(), i);
      g.all_reduce(t, ReduceOp::avg);
      return t;
    };
    const Tensor first = sum(), second = sum();
    require(std::equal(first.data<float>(), first.data<float>() + n, second.data<float>()),
            "a second run gave other bits");
    for (int64_t i = 0; i < n; ++i) {
      double x = 0;
      for (int r = 0; r < g.size(); ++r) x += number(r, i);
      require(std::abs(first.data<float>()[i] - x / g.size()) < 1e-6, "the mean is wrong");
    }
    const Tensor all = g.all_gather(first);  // [size, n]
    for (int r = 0; r < g.size(); ++r)
      require(std::equal(first.data<float>(), first.data<float>() + n, all.data<float>() + r * n),
              str_cat("rank ", r, " holds other bits"));
  }
}

/// What a process may start without waiting, and splits of unequal sizes.
inline void check_async(const Group& g) {
  std::vector<Tensor> tensors;
  std::vector<WorkPtr> works;
  for (int k = 0; k < 20; ++k) {
    tensors.push_back(full({100 + k}, g.rank() + k));
    works.push_back(g.all_reduce_async(tensors.back()));
  }
  const double ranks_sum = g.size() * (g.size() - 1) / 2.0;
  for (int k = 20; k-- > 0;) {
    int then = 0;
    works[static_cast<size_t>(k)]->then([&] { ++then; });
    works[static_cast<size_t>(k)]->wait();
    require(then == 1, "then() ran not once");
    require(works[static_cast<size_t>(k)]->is_completed(), "complete");
    require(tensors[static_cast<size_t>(k)].data<float>()[99] ==
                static_cast<float>(ranks_sum + k * g.size()),
            "a sum among many");
  }
  // Rank r sends r + 1 rows to each rank below it and 2 to the others.
  const auto rows = [&](int from, int to) { return int64_t{to < from ? from + 1 : 2}; };
  std::vector<int64_t> out_splits, in_splits;
  int64_t out_rows = 0, in_rows = 0;
  for (int r = 0; r < g.size(); ++r) {
    out_splits.push_back(rows(r, g.rank()));
    in_splits.push_back(rows(g.rank(), r));
    out_rows += out_splits.back();
    in_rows += in_splits.back();
  }
  const Tensor out = zeros({out_rows, 3}), in = full({in_rows, 3}, g.rank() + 1);
  g.process_group().all_to_all(out, in, out_splits, in_splits)->wait();
  int64_t at = 0;
  for (int r = 0; r < g.size(); ++r)
    for (int64_t i = 0; i < out_splits[static_cast<size_t>(r)]; ++i, ++at)
      require(out.data<float>()[at * 3 + 2] == static_cast<float>(r + 1), "all_to_all by splits");
}

}  // namespace every_kind
