// What every backend must get right: each kind of collective by dtype, layout, reduction and root,
// one at a time and many at once; whole tensors, odd inputs, memory of the group; the same bits on
// all ranks. A Scope says what a backend does not have. The reference is exchanges.h's.
#pragma once

#include <cmath>
#include <memory>
#include <string_view>

#include "exchanges.h"

namespace lockstep::dist {

struct Scope {
  bool pairs = true;  // send and recv
  /// Floats are reduced in rank order, two-byte ones in f32 and rounded once. Else what is reduced
  /// is such that the order does not matter.
  bool in_rank_order = true;
  /// Means of two-byte floats are asked for. Where these are scaled before they are added, they are
  /// exact only if all numbers of ranks that are divided by are powers of two.
  bool two_byte_means = true;
  /// A call costs much. Layouts differ in how bytes are copied: f32, f64 and u8 see all but the
  /// large ones, the other dtypes two of them. f32 is asked for call by call, the rest all at once.
  bool brief = false;
  std::vector<DType> dtypes{std::begin(kDTypes), std::end(kDTypes)};
};

/// One dtype of each width.
inline bool stands_for_its_width(DType t) {
  return t == DType::f32 || t == DType::f64 || t == DType::bf16 || t == DType::u8;
}

inline bool is_asked(const Layout& layout, DType dtype, const Scope& scope) {
  if (!scope.brief) return true;
  const std::string_view name = layout.name;
  const bool sees_all = dtype == DType::f32 || dtype == DType::f64 || dtype == DType::u8;
  return !layout.large && (sees_all || name == "contiguous" || name == "sliced");
}

inline std::vector<int> roots_of(CollectiveKind kind, ReduceOp op, int size, bool large,
                                 const Scope& scope) {
  if (!has_root(kind)) return {0};
  if (large && kind != CollectiveKind::broadcast) return {size - 1};
  if (scope.brief && kind == CollectiveKind::reduce) return {static_cast<int>(op) % size};
  std::vector<int> all;
  for (int root = 0; root < size; ++root) all.push_back(root);
  return all;
}

/// What a group of this size can be asked to do with one layout: all reductions and roots; of large
/// layouts all reductions of all_reduce and all roots of broadcast, and else one of each kind, with
/// one dtype of each width.
inline std::vector<Ask> asks(const Layout& layout, DType dtype, int size, const Scope& scope) {
  std::vector<Ask> all;
  if (!is_asked(layout, dtype, scope)) return all;
  const ReduceOp one = dtype == DType::boolean ? ReduceOp::max : ReduceOp::sum;
  int64_t salt = 0;
  for (const CollectiveKind kind : kKinds) {
    if (kind == CollectiveKind::recv) continue;  // send asks for both
    if (kind == CollectiveKind::send && (size == 1 || !scope.pairs)) continue;
    const bool every_op = kind == CollectiveKind::all_reduce || (reduces(kind) && !layout.large);
    // An uneven all_to_all is large enough.
    if (layout.large && kind == CollectiveKind::all_to_all) continue;
    if (layout.large && !every_op && !stands_for_its_width(dtype)) continue;
    for (const ReduceOp op : kOps) {
      if (!meaningful(op, dtype) || (!every_op && op != one)) continue;
      if (op == ReduceOp::avg && size_of(dtype) == 2 && !scope.two_byte_means) continue;
      for (const int root : roots_of(kind, op, size, layout.large, scope)) {
        Ask ask{kind, dtype, layout.make, op, root, (root + 1) % size, ++salt};
        ask.even = true;
        ask.exact = !scope.in_rank_order;
        all.push_back(ask);
      }
    }
    if (kind == CollectiveKind::all_to_all && layout.name == std::string_view("contiguous"))
      all.push_back({kind, dtype, {}, one, 0, 0, ++salt});
  }
  return all;
}

inline void check_every_kind(const Group& g, const Scope& scope = {}) {
  ProcessGroup& pg = g.process_group();
  const auto finish = [](const Started& one, const Layout& layout) {
    try {
      one.finish();
    } catch (const Error& e) {
      fail<Error>(layout.name, ": ", e.what());
    }
  };
  for (const DType dtype : scope.dtypes)
    for (const Layout& layout : layouts()) {
      std::vector<Started> under_way;
      for (const Ask& ask : asks(layout, dtype, g.size(), scope)) {
        const bool alone = !scope.brief || dtype == DType::f32;
        const bool among_many = scope.brief ? !alone : !layout.large || dtype == DType::f32;
        if (alone) finish(start(pg, ask), layout);
        if (among_many) under_way.push_back(start(pg, ask));
      }
      // And all at once, finished from the last to the first.
      for (; !under_way.empty(); under_way.pop_back()) finish(under_way.back(), layout);
    }
}

/// Group's own forms, which make the outputs, or look at the inputs on the root alone.
inline void check_blocking_forms(const Group& g, const Scope& scope = {}) {
  const int me = g.rank(), size = g.size(), root = size - 1;
  const auto check = [&]<class T>(const Layout& layout, DType dtype, T) {
    const std::string what = str_cat(" of ", dtype, ", ", layout.name, ", on rank ", me);
    const auto given = [](int r, int64_t salt = 0) {
      return [=](int64_t i) { return value<T>(r, i, salt); };
    };
    const auto filled = [&](int64_t salt = 0) {
      const Tensor t = layout.make(dtype);
      fill<T>(t, given(me, salt));
      return t;
    };
    const Tensor mine = filled(), all = g.all_gather(mine);
    const std::vector<Tensor> gathered = g.gather(mine, root);
    ranks::require(all.shape()[0] == size && all.numel() == size * mine.numel(),
                   "all_gather" + what);
    ranks::require(gathered.size() == static_cast<size_t>(me == root ? size : 0), "gather" + what);
    for (int r = 0; r < size; ++r) {
      check_elements<T>(all.select(0, r), given(r), "all_gather" + what);
      if (me == root)
        check_elements<T>(gathered[static_cast<size_t>(r)], given(r), "gather" + what);
    }
    std::vector<Tensor> out, in;
    for (int r = 0; r < size; ++r) {
      out.push_back(layout.make(dtype));
      in.push_back(filled(r));
    }
    g.all_to_all(out, in);
    for (int r = 0; r < size; ++r)
      check_elements<T>(out[static_cast<size_t>(r)], given(r, me), "all_to_all" + what);
    g.scatter(out[0], in, root);
    check_elements<T>(out[0], given(root, me), "scatter" + what);
    g.reduce(mine, root, ReduceOp::max);
    const auto most = [=](int64_t i) { return expected<T>(ReduceOp::max, size, i); };
    if (me == root)
      check_elements<T>(mine, most, "reduce" + what);
    else
      check_elements<T>(mine, given(me), "reduce" + what);
  };
  for (const DType dtype : scope.dtypes)
    for (const Layout& layout : layouts())
      if (is_asked(layout, dtype, scope) &&
          (dtype == DType::f32 || (!layout.large && !scope.brief)))
        with_type(dtype, [&](auto x) { check(layout, dtype, x); });
}

/// The forms that take one tensor for all ranks' parts.
inline void check_whole_tensors(const Group& g) {
  ProcessGroup& pg = g.process_group();
  const int me = g.rank(), size = g.size();
  const auto given = [](int r) { return [=](int64_t i) { return value<float>(r, i); }; };
  const Tensor part = new_tensor({3, 5}, DType::f32);  // [3, 5]
  for (const Shape& shape : {Shape{size, 3, 5}, Shape{3 * size, 5}}) {
    fill<float>(part, given(me));
    const Tensor all = new_tensor(shape, DType::f32);
    const WorkPtr gathered = pg.all_gather(all, part);
    gathered->wait();
    ranks::require(gathered->result().size() == static_cast<size_t>(size), "all_gather: result");
    check_elements<float>(
        all, [](int64_t i) { return value<float>(static_cast<int>(i / 15), i % 15); },
        "all_gather into one tensor");
    fill<float>(all, given(me));
    const WorkPtr scattered = pg.reduce_scatter(part, all, ReduceOp::max);
    scattered->wait();
    ranks::require(scattered->result()[0].is_same(part), "reduce_scatter: result");
    check_elements<float>(
        part, [&](int64_t i) { return expected<float>(ReduceOp::max, size, me * 15 + i); },
        "reduce_scatter of one tensor");
  }
  // Rank r sends r + 2 d rows to rank d.
  std::vector<int64_t> sends, receives;
  int64_t sent = 0, received = 0, before_me = 0;
  for (int r = 0; r < size; ++r) {
    sends.push_back(me + 2 * r);
    receives.push_back(r + 2 * me);
    sent += sends.back();
    received += receives.back();
  }
  const Tensor input = new_tensor({sent, 4}, DType::f32),
               output = new_tensor({received, 4}, DType::f32);
  fill<float>(input, given(me));
  pg.all_to_all(output, input, receives, sends)->wait();
  for (int r = 0; r < size; ++r) {
    int64_t begin = 0;  // of this rank's rows in rank r's input
    for (int d = 0; d < me; ++d) begin += r + 2 * d;
    check_elements<float>(
        output.narrow(0, before_me, receives[static_cast<size_t>(r)]),
        [&](int64_t i) { return value<float>(r, begin * 4 + i); }, "all_to_all by splits");
    before_me += receives[static_cast<size_t>(r)];
  }
  const Tensor even_in = new_tensor({2 * size}, DType::f32),
               even_out = new_tensor({2 * size}, DType::f32);
  fill<float>(even_in, given(me));
  pg.all_to_all(even_out, even_in)->wait();
  check_elements<float>(
      even_out, [&](int64_t i) { return value<float>(static_cast<int>(i / 2), 2 * me + i % 2); },
      "all_to_all, even");
}

/// An expanded tensor can be read by all that reads, and a view of the output be the input.
inline void check_odd_inputs(const Group& g, const Scope& scope = {}) {
  const int me = g.rank(), size = g.size(), next = (me + 1) % size, before = (me + size - 1) % size;
  const Tensor five = new_tensor({1, 5}, DType::f32);
  const Tensor wide = five.expand({4, 5});
  fill<float>(five, [&](int64_t i) { return value<float>(me, i); });
  const auto repeated = [](int r) { return [=](int64_t i) { return value<float>(r, i % 5); }; };
  const Tensor all = g.all_gather(wide);
  for (int r = 0; r < size; ++r) check_elements<float>(all[r], repeated(r), "expanded, gathered");
  const Tensor out = new_tensor({4, 5}, DType::f32);
  g.reduce_scatter(out, wide.expand({size, 4, 5}), ReduceOp::min);
  check_elements<float>(
      out, [&](int64_t i) { return expected<float>(ReduceOp::min, size, i % 5); },
      "expanded, reduced");
  if (size > 1 && scope.pairs) {
    const WorkPtr sent = g.process_group().send(wide, next);
    g.recv(out, before);
    sent->wait();
    check_elements<float>(out, repeated(before), "expanded, sent");
  }
  // In place, in plain memory and in memory of the group.
  const auto storage = g.process_group().allocate(static_cast<size_t>(size) * 9000 * 4);
  for (const bool shared : {false, true}) {
    const Tensor whole = shared ? from_blob(storage->data(), {size, 9000}, {}, [storage] {})
                                : new_tensor({size, 9000}, DType::f32);
    fill<float>(whole[me], [&](int64_t i) { return value<float>(me, i); });
    g.all_gather(whole, whole[me]);
    for (int r = 0; r < size; ++r)
      check_elements<float>(
          whole[r], [&](int64_t i) { return value<float>(r, i); }, "all_gather in place");
    const bool exact = !scope.in_rank_order;
    fill<float>(whole, [&](int64_t i) { return value<float>(me, i, 0, exact); });
    g.reduce_scatter(whole[me], whole);
    check_elements<float>(
        whole[me],
        [&](int64_t i) { return expected<float>(ReduceOp::sum, size, me * 9000 + i, 0, exact); },
        "reduce_scatter in place");
  }
}

/// Memory of the group: every kind works from it and into it, with ranks that pass other memory.
inline void check_allocated(const Group& g, const Scope& scope = {}) {
  ProcessGroup& pg = g.process_group();
  constexpr int64_t kElements = 100003;
  const auto check = [&](CollectiveKind kind, ReduceOp op, bool mixed) {
    std::vector<Ref<Storage>> parts;  // two tensors of each rank at most lie in shared memory
    for (int k = 0; k < 2; ++k) parts.push_back(pg.allocate(kElements * 4));
    size_t used = mixed && g.rank() % 2 == 1 ? parts.size() : 0;
    const auto make = [&](DType t) {
      if (used == parts.size()) return new_tensor({kElements}, t);
      const Ref<Storage> storage = parts[used++];
      return from_blob(storage->data(), {kElements}, {.dtype = t}, [storage] {});
    };
    Ask ask{kind, DType::f32, make, op, g.size() - 1, 0, 5};
    ask.exact = !scope.in_rank_order;
    start(pg, ask).finish();
  };
  for (const CollectiveKind kind : kKinds) {
    if (kind == CollectiveKind::recv) continue;  // send asks for both
    if (kind == CollectiveKind::send && (g.size() == 1 || !scope.pairs)) continue;
    for (const bool mixed : {false, true})
      for (const ReduceOp op : {ReduceOp::sum, ReduceOp::avg, ReduceOp::max})
        if (op == ReduceOp::sum || kind == CollectiveKind::all_reduce) check(kind, op, mixed);
  }
}

/// All that is above.
inline void check_exchanges(const Group& g, const Scope& scope = {}) {
  check_every_kind(g, scope);
  check_blocking_forms(g, scope);
  check_whole_tensors(g);
  check_odd_inputs(g, scope);
  check_allocated(g, scope);
  g.barrier();
}

/// Means of many sizes, also such as are cut into pieces: the same bits on all ranks and in every
/// run, near the mean in rank order.
inline void check_bits(const Group& g) {
  const auto number = [](int rank, int64_t i) { return value<float>(rank, i) / 8; };  // below 1
  for (const int64_t n : {1, 2, 3, 5, 1000, 100003, 700001}) {
    const auto mean_of_all = [&] {
      const Tensor t = new_tensor({n}, DType::f32);
      fill<float>(t, [&](int64_t i) { return number(g.rank(), i); });
      g.all_reduce(t, ReduceOp::avg);
      return t;
    };
    const Tensor first = mean_of_all(), second = mean_of_all();
    const float* bits = first.data<float>();
    const auto are_in = [&](const float* others) {
      return std::memcmp(bits, others, static_cast<size_t>(n) * sizeof(float)) == 0;
    };
    ranks::require(are_in(second.data<float>()), "a second run gave other bits");
    for (int64_t i = 0; i < n; ++i) {
      double sum = 0;
      for (int r = 0; r < g.size(); ++r) sum += number(r, i);
      ranks::require(std::abs(bits[i] - sum / g.size()) < 1e-6, "the mean is wrong");
    }
    const Tensor all = g.all_gather(first);  // [size, n]
    for (int r = 0; r < g.size(); ++r)
      ranks::require(are_in(all.data<float>() + r * n), str_cat("rank ", r, " holds other bits"));
  }
}

/// Many under way, waited for from the last to the first: what then() left has run once when wait()
/// returns, and the numbers follow each other.
inline void check_async(const Group& g, const Scope& scope = {}) {
  constexpr size_t kMany = 40;
  std::vector<Started> under_way;
  const auto ran = std::make_shared<std::vector<int>>(kMany);  // it outlives works that fail
  for (size_t k = 0; k < kMany; ++k) {
    const auto n = static_cast<int64_t>(1 + k * 977);
    Ask ask{CollectiveKind::all_reduce, DType::f32, [n](DType t) { return new_tensor({n}, t); }};
    ask.salt = static_cast<int64_t>(k);
    ask.exact = !scope.in_rank_order;
    under_way.push_back(start(g.process_group(), ask));
    under_way[k].work->then([ran, k] { ++(*ran)[k]; });
  }
  for (size_t k = kMany; k-- > 0;) {
    under_way[k].finish();
    ranks::require((*ran)[k] == 1, str_cat("then() ran ", (*ran)[k], " times"));
    ranks::require(under_way[k].work->is_completed(), "waited for, and not complete");
    ranks::require(k == 0 || under_way[k].work->sequence_number() ==
                                 under_way[k - 1].work->sequence_number() + 1,
                   "sequence numbers");
  }
}

}  // namespace lockstep::dist
