// The formulas of the reductions, templates over the value type V as those of formulas-inl.h: each element
// goes through map, what map gives is combined over the reduced elements, and finish turns the total
// into the result. dx is the derivative by an element x, from the result y and its gradient dy.
//
// No include guard: the text is included once per SIMD target and once for the host, each time inside a
// namespace, with LOCKSTEP_FORMULA set to what functions there are marked with. To add a reduction,
// write a struct and name it in the list at the end.
// clang-format off

/// The defaults of a reduction. One that is not additive has identity<T>() and combine(a, b).
struct Reduction {
  static constexpr Domain domain = Domain::any;
  static constexpr bool additive = false;  // totals are sums, kept more accurate than the elements
  static constexpr bool linear = true;     // map is the identity
  static constexpr bool predicate = false; // the result is bool
  static constexpr Precision precision = Precision::given;
  static constexpr bool shares = false;    // elements that equal the result share dy evenly
  template <class V> LOCKSTEP_FORMULA V map(V x) const { return x; }
  template <class W> LOCKSTEP_FORMULA W finish(W total, W) const { return total; }
};
struct Additive : Reduction {
  static constexpr bool additive = true;
};

/// Integers and bool are summed in i64.
struct Sum : Additive {
  static constexpr const char* name = "sum";
  static constexpr Precision precision = Precision::full;  // its size grows with the count
  template <class V> LOCKSTEP_FORMULA V dx(V, V, V dy, V) const { return dy; }
};
struct Mean : Additive {
  static constexpr const char* name = "mean";
  static constexpr Domain domain = Domain::floats;
  template <class W> LOCKSTEP_FORMULA W finish(W total, W count) const { return total / count; }
  template <class V> LOCKSTEP_FORMULA V dx(V, V, V dy, V count) const { return dy / count; }
};
/// The 2-norm; its derivative at 0 is 0.
struct Norm : Additive {
  static constexpr const char* name = "norm";
  static constexpr Domain domain = Domain::floats;
  static constexpr Precision precision = Precision::full;
  static constexpr bool linear = false;
  template <class V> LOCKSTEP_FORMULA V map(V x) const { return x * x; }
  template <class W> LOCKSTEP_FORMULA W finish(W total, W) const { return sqrt(total); }
  template <class V> LOCKSTEP_FORMULA V dx(V x, V y, V dy, V) const {
    return where(y == V(0), V(0) * dy, dy * (x / y));
  }
};
struct Amax : Reduction {
  static constexpr const char* name = "amax";
  static constexpr bool shares = true;
  template <class T> LOCKSTEP_FORMULA static T identity() { return lowest<T>(); }
  template <class V> LOCKSTEP_FORMULA V combine(V a, V b) const { return max(a, b); }
};
struct Amin : Reduction {
  static constexpr const char* name = "amin";
  static constexpr bool shares = true;
  template <class T> LOCKSTEP_FORMULA static T identity() { return highest<T>(); }
  template <class V> LOCKSTEP_FORMULA V combine(V a, V b) const { return min(a, b); }
};
/// NaN counts as true.
struct Predicate : Reduction {
  static constexpr bool linear = false;
  static constexpr bool predicate = true;
  template <class V> LOCKSTEP_FORMULA V map(V x) const { return where(x == V(0), V(0), V(1)); }
};
struct Any : Predicate {
  static constexpr const char* name = "any";
  template <class T> LOCKSTEP_FORMULA static T identity() { return T(0); }
  template <class V> LOCKSTEP_FORMULA V combine(V a, V b) const { return max(a, b); }
};
struct All : Predicate {
  static constexpr const char* name = "all";
  template <class T> LOCKSTEP_FORMULA static T identity() { return T(1); }
  template <class V> LOCKSTEP_FORMULA V combine(V a, V b) const { return min(a, b); }
};

using Reductions = List<Sum, Mean, Norm, Amax, Amin, Any, All>;
// clang-format on
