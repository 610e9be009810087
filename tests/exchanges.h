// What the tests of collectives share: values that differ per rank, element and call; tensors of
// every dtype and layout, read and written here element by element; every kind of collective as
// something to start, and the check of what it must leave behind, computed in rank order.
// exchange_checks.h asks a group for all of it.
#pragma once

#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include <lockstep/distributed/group.h>
#include <lockstep/tensor/half.h>

#include "ranks.h"
#include "texts.h"

namespace lockstep::dist {

inline constexpr ReduceOp kOps[] = {ReduceOp::sum, ReduceOp::avg, ReduceOp::product,
                                    ReduceOp::min, ReduceOp::max, ReduceOp::band,
                                    ReduceOp::bor, ReduceOp::bxor};
inline constexpr DType kDTypes[] = {DType::f32, DType::f64, DType::f16, DType::bf16, DType::i64,
                                    DType::i32, DType::i16, DType::i8,  DType::u8,   DType::boolean};
inline constexpr CollectiveKind kKinds[] = {CollectiveKind::all_reduce,
                                            CollectiveKind::broadcast,
                                            CollectiveKind::reduce,
                                            CollectiveKind::all_gather,
                                            CollectiveKind::reduce_scatter,
                                            CollectiveKind::gather,
                                            CollectiveKind::scatter,
                                            CollectiveKind::all_to_all,
                                            CollectiveKind::barrier,
                                            CollectiveKind::send,
                                            CollectiveKind::recv};

inline bool reduces(CollectiveKind k) {
  return k == CollectiveKind::all_reduce || k == CollectiveKind::reduce ||
         k == CollectiveKind::reduce_scatter;
}

inline bool has_root(CollectiveKind k) {
  return k == CollectiveKind::broadcast || k == CollectiveKind::reduce ||
         k == CollectiveKind::gather || k == CollectiveKind::scatter || k == CollectiveKind::send;
}

inline bool meaningful(ReduceOp op, DType t) {
  if (is_floating(t)) return op < ReduceOp::band;
  if (t == DType::boolean) return op >= ReduceOp::min;
  return op != ReduceOp::avg;
}

// Calls f with a value of the element's type.
template <class F>
void with_type(DType t, F f) {
  if (t == DType::f16)
    f(Half());
  else if (t == DType::bf16)
    f(BFloat16());
  else
    dispatch("test", t, [&]<class T>(TypeTag<T>) { f(T()); });
}

template <class T>
inline constexpr bool kIsHalf = std::is_same_v<T, Half> || std::is_same_v<T, BFloat16>;

/// Element i of what a rank gives; `salt` tells calls apart. `exact`: floats are -4 .. 4 without 0,
/// so that sums and products are exact in every order, in f16 and bf16 too. (Those of integers are
/// the same bits in every order anyway: they wrap around.)
template <class T>
T value(int rank, int64_t i, int64_t salt = 0, bool exact = false) {
  const uint64_t h = (static_cast<uint64_t>(rank) * 1000003 + static_cast<uint64_t>(i) +
                      static_cast<uint64_t>(salt) * 7919 + 17) *
                         0x9E3779B97F4A7C15u >>
                     40;
  if constexpr (std::is_floating_point_v<T> || kIsHalf<T>)
    if (exact) return static_cast<T>(static_cast<float>(h % 4 + 1) * (h & 4 ? -1.0f : 1.0f));
  if constexpr (std::is_floating_point_v<T>)
    return static_cast<T>(h % 10007) / T(997) - T(5);
  else if constexpr (kIsHalf<T>)
    return T(static_cast<float>(h % 10007) / 997.0f - 5.0f);
  else if constexpr (std::is_same_v<T, bool>)
    return h % 3 == 0;
  else
    return static_cast<T>(h);
}

// A is what is computed in: f32 for the two-byte floats, else the element's own type.
template <class A>
A combined(ReduceOp op, A x, A y) {
  if (op == ReduceOp::min) return std::min(x, y);
  if (op == ReduceOp::max) return std::max(x, y);
  if constexpr (std::is_floating_point_v<A>) {
    return op == ReduceOp::product ? x * y : x + y;
  } else {
    const auto a = static_cast<uint64_t>(x), b = static_cast<uint64_t>(y);
    switch (op) {
      case ReduceOp::product:
        return static_cast<A>(a * b);
      case ReduceOp::band:
        return static_cast<A>(a & b);
      case ReduceOp::bor:
        return static_cast<A>(a | b);
      case ReduceOp::bxor:
        return static_cast<A>(a ^ b);
      default:
        return static_cast<A>(a + b);
    }
  }
}

/// Element i of the reduction over `size` ranks, one after the other.
template <class T>
T expected(ReduceOp op, int size, int64_t i, int64_t salt = 0, bool exact = false) {
  using A = std::conditional_t<kIsHalf<T>, float, T>;
  A x = static_cast<A>(value<T>(0, i, salt, exact));
  for (int r = 1; r < size; ++r)
    x = combined<A>(op, x, static_cast<A>(value<T>(r, i, salt, exact)));
  if constexpr (std::is_floating_point_v<A>)
    if (op == ReduceOp::avg) x = x * static_cast<A>(1.0 / size);
  return static_cast<T>(x);
}

// ---- elements by hand: no op of the library takes part ----

template <class F>
void each_offset(const Tensor& t, F f) {
  const auto width = static_cast<int64_t>(size_of(t.dtype()));
  std::vector<int64_t> index(static_cast<size_t>(t.dim()));
  int64_t offset = 0;
  for (int64_t i = 0; i < t.numel(); ++i) {
    f(i, static_cast<std::byte*>(t.data_ptr()) + offset * width);
    // A step along the last dimension that has not come to its end; those after it begin anew.
    for (int d = t.dim() - 1; d >= 0; --d) {
      int64_t& at = index[static_cast<size_t>(d)];
      offset += t.strides()[d];
      if (++at < t.shape()[d]) break;
      offset -= at * t.strides()[d];
      at = 0;
    }
  }
}

template <class T, class F>
void fill(const Tensor& t, F f) {
  each_offset(t, [&](int64_t i, std::byte* p) {
    const T x = f(i);
    std::memcpy(p, &x, sizeof x);
  });
}

template <class T>
using BitsOf =
    std::conditional_t<sizeof(T) == 1, uint8_t,
                       std::conditional_t<sizeof(T) == 2, uint16_t,
                                          std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>>;

/// They must be the same bits.
template <class T, class F>
void check_elements(const Tensor& t, F f, const std::string& what) {
  each_offset(t, [&](int64_t i, std::byte* p) {
    const T x = f(i);
    BitsOf<T> bits;
    std::memcpy(&bits, p, sizeof bits);
    if (bits == std::bit_cast<BitsOf<T>>(x)) return;
    T is;
    std::memcpy(&is, p, sizeof is);
    fail<Error>(what, ": element ", i, " is ", static_cast<double>(static_cast<float>(is)),
                ", not ", static_cast<double>(static_cast<float>(x)));
  });
}

/// Gaps between the elements hold this byte, before and after.
inline constexpr std::byte kGap{1};

inline Tensor new_tensor(const Shape& shape, DType t) {
  const Tensor whole = empty(shape, {.dtype = t});
  if (whole.storage().bytes() > 0)
    std::memset(whole.storage().data(), static_cast<int>(kGap), whole.storage().bytes());
  return whole;
}

inline void check_gaps(const Tensor& t, const std::string& what) {
  const size_t width = size_of(t.dtype()), bytes = t.storage().bytes();
  if (bytes == width * static_cast<size_t>(t.numel())) return;
  const auto* begin = static_cast<const std::byte*>(t.storage().data());
  std::vector<char> named(bytes);
  each_offset(
      t, [&](int64_t, std::byte* p) { std::fill_n(named.begin() + (p - begin), width, char{1}); });
  for (size_t i = 0; i < bytes; ++i)
    if (!named[i] && begin[i] != kGap) fail<Error>(what, ": its neighbour at byte ", i, " changed");
}

/// Layouts: the same elements in other places.
struct Layout {
  const char* name;
  std::function<Tensor(DType)> make;
  bool large = false;
};
inline std::vector<Layout> layouts() {
  using L = std::vector<Layout>;
  const auto plain = [](const char* name, Shape shape) {
    return Layout{name, [shape](DType t) { return new_tensor(shape, t); }, shape.numel() > 1000};
  };
  return L{
      plain("one element", {1}),
      plain("0-d", {}),
      plain("empty", {3, 0, 2}),
      {"empty and transposed",
       [](DType t) {
         return new_tensor({3, 0}, t).transpose(0, 1);
       }},
      plain("contiguous", {7, 13}),
      {"transposed",
       [](DType t) {
         return new_tensor({9, 14}, t).transpose(0, 1);
       }},
      {"sliced",
       [](DType t) {
         return new_tensor({6, 40}, t).slice(1, {3, 37, 3});
       }},
      {"offset rows",
       [](DType t) {
         return new_tensor({8, 5, 6}, t).narrow(0, 2, 3).permute({2, 0, 1});
       }},
      plain("several chunks", {3, 33333}),
      {"several chunks transposed",
       [](DType t) {
         return new_tensor({257, 301}, t).transpose(0, 1);
       },
       true},
  };
}

// ---- every kind ----

struct Ask {
  CollectiveKind kind;
  DType dtype = DType::f32;
  std::function<Tensor(DType)> make;  // a tensor of the shape that the kind asks for
  ReduceOp op = ReduceOp::sum;
  int root = 0;
  int to = 0;          // of send and recv, from root
  int64_t salt = 0;    // the same on all ranks; sizes of an uneven all_to_all hang on it as well
  bool even = false;   // all_to_all: every piece is a tensor of make; else of pair_numel elements
  bool exact = false;  // reductions of floats do not depend on an order
};

struct Started {
  std::string what;
  WorkPtr work;  // null where this rank has no part in it
  std::function<void()> check = [] {};
  void finish() const {
    if (!work) return;
    work->wait();
    check();
  }
};

/// How many elements rank `from` sends to rank `to`: also none, and more than a window holds.
inline int64_t pair_numel(int from, int to, int64_t salt) {
  const int64_t n = (from * 37 + to * 11 + salt * 5) % 17;
  return n < 3 ? 0 : n == 16 ? 120000 : n * n * 53;
}

template <class T>
Started start_as(ProcessGroup& g, const Ask& a) {
  const int me = g.rank(), size = g.size();
  const std::string what = str_cat(name_of(a.kind), "(", name_of(a.op), ") of ", a.dtype, ", root ",
                                   a.root, ", salt ", a.salt, ", rank ", me, " of ", size);
  // What rank r gives for (or to) rank `to`.
  const auto given = [s = a.salt, exact = a.exact && reduces(a.kind)](int r, int to = 0) {
    return [=](int64_t i) { return value<T>(r, i, s + to, exact); };
  };
  const auto make = [&](auto f) {
    const Tensor t = a.make(a.dtype);
    fill<T>(t, f);
    return t;
  };
  const auto blank = [&] { return a.make(a.dtype); };
  const auto same = [what](const Tensor& t, auto f) {
    check_elements<T>(t, f, what);
    check_gaps(t, what);
  };
  const auto sum = [op = a.op, size, s = a.salt, exact = a.exact](int to = 0) {
    return [=](int64_t i) { return expected<T>(op, size, i, s + to, exact); };
  };
  std::vector<Tensor> in, out;
  switch (a.kind) {
    case CollectiveKind::all_reduce: {
      const Tensor t = make(given(me));
      return {what, g.all_reduce(t, a.op), [=] { same(t, sum()); }};
    }
    case CollectiveKind::broadcast: {
      const Tensor t = make(given(me));
      return {what, g.broadcast(t, a.root), [=, root = a.root] { same(t, given(root)); }};
    }
    case CollectiveKind::reduce: {
      const Tensor t = make(given(me));
      return {what, g.reduce(t, a.root, a.op),
              [=, root = a.root] { me == root ? same(t, sum()) : same(t, given(me)); }};
    }
    case CollectiveKind::all_gather:
    case CollectiveKind::gather: {
      const Tensor t = make(given(me));
      const bool all = a.kind == CollectiveKind::all_gather;
      for (int r = 0; r < size && (all || me == a.root); ++r) out.push_back(blank());
      return {what, all ? g.all_gather(out, t) : g.gather(out, t, a.root), [=] {
                same(t, given(me));
                for (size_t r = 0; r < out.size(); ++r) same(out[r], given(static_cast<int>(r)));
              }};
    }
    case CollectiveKind::reduce_scatter:
    case CollectiveKind::scatter: {
      const bool scatters = a.kind == CollectiveKind::scatter;
      for (int r = 0; r < size && (!scatters || me == a.root); ++r)
        in.push_back(make(given(me, r)));
      const Tensor t = blank();
      return {what, scatters ? g.scatter(t, in, a.root) : g.reduce_scatter(t, in, a.op),
              [=, root = a.root] {
                scatters ? same(t, given(root, me)) : same(t, sum(me));
                for (size_t r = 0; r < in.size(); ++r) same(in[r], given(me, static_cast<int>(r)));
              }};
    }
    case CollectiveKind::all_to_all: {
      for (int r = 0; r < size; ++r) {
        in.push_back(a.even ? blank() : new_tensor({pair_numel(me, r, a.salt)}, a.dtype));
        fill<T>(in.back(), given(me, r));
        out.push_back(a.even ? blank() : new_tensor({pair_numel(r, me, a.salt)}, a.dtype));
      }
      return {what, g.all_to_all(out, in), [=] {
                for (int r = 0; r < size; ++r) {
                  same(out[static_cast<size_t>(r)], given(r, me));
                  same(in[static_cast<size_t>(r)], given(me, r));
                }
              }};
    }
    case CollectiveKind::barrier:
      return {what, g.barrier()};
    case CollectiveKind::send:
    case CollectiveKind::recv: {  // both sides of it, each where it is
      if (me != a.root && me != a.to) return {what, nullptr};
      const Tensor t = me == a.root ? make(given(me)) : blank();
      return {what, me == a.root ? g.send(t, a.to) : g.recv(t, a.root),
              [=, root = a.root] { same(t, given(root)); }};
    }
  }
  return {what, nullptr};
}

inline Started start(ProcessGroup& g, const Ask& ask) {
  Started started;
  with_type(ask.dtype, [&](auto x) { started = start_as<decltype(x)>(g, ask); });
  return started;
}

}  // namespace lockstep::dist
