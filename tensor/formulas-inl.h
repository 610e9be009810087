// The formula `f` and the derivatives of every element-wise op, templates over the value type V. V
// is a SIMD pack in the CPU kernels, a plain number in a CUDA kernel, and a Symbol (a Tensor or a
// number) under create_graph. An op's fields are its parameters; an op with fields has probe(),
// which returns parameters that reach every branch of its derivatives.
//
// No include guard: the text is included once per SIMD target and once for the host, each time
// inside a namespace, with LOCKSTEP_FORMULA set to what functions there are marked with. A
// derivative takes the inputs, the output y and dy; ops/formula_traits.h finds out which of them it
// reads, and only those are saved for backward. To add an op, write a struct and name it in a list
// at the end.
// clang-format off

/// The defaults of an op.
struct Defaults {
  static constexpr Domain domain = Domain::floats;
  static constexpr bool predicate = false;  // the result is bool
  static constexpr Precision precision = Precision::given;
};
struct Unary : Defaults {
  static constexpr int inputs = 1;
};
struct Binary : Defaults {
  static constexpr int inputs = 2;
};
struct Ternary : Defaults {
  static constexpr int inputs = 3;
};
struct Comparison : Binary {
  static constexpr Domain domain = Domain::any;
  static constexpr bool predicate = true;
};

// ---- one input ----

struct Relu : Unary {
  static constexpr const char* name = "relu";
  static constexpr Domain domain = Domain::numbers;
  template <class V> LOCKSTEP_FORMULA V f(V x) const { return max(x, V(0)); }
  template <class V> LOCKSTEP_FORMULA V df(V, V y, V dy) const {
    return where(y <= V(0), V(0), dy);
  }
};
struct Sigmoid : Unary {
  static constexpr const char* name = "sigmoid";
  template <class V> LOCKSTEP_FORMULA V f(V x) const { return sigmoid(x); }
  template <class V> LOCKSTEP_FORMULA V df(V, V y, V dy) const { return dy * (y * (V(1) - y)); }
};
struct Tanh : Unary {
  static constexpr const char* name = "tanh";
  template <class V> LOCKSTEP_FORMULA V f(V x) const { return tanh(x); }
  template <class V> LOCKSTEP_FORMULA V df(V, V y, V dy) const { 
    return dy * ((V(1) - y) * (V(1) + y));
  }
};
struct Exp : Unary {
  static constexpr const char* name = "exp";
  static constexpr Precision precision = Precision::full;
  template <class V> LOCKSTEP_FORMULA V f(V x) const { return exp(x); }
  template <class V> LOCKSTEP_FORMULA V df(V, V y, V dy) const { return dy * y; }
};
struct Log : Unary {
  static constexpr const char* name = "log";
  static constexpr Precision precision = Precision::full;
  template <class V> LOCKSTEP_FORMULA V f(V x) const { return log(x); }
  template <class V> LOCKSTEP_FORMULA V df(V x, V, V dy) const { return dy / x; }
};
struct Sqrt : Unary {
  static constexpr const char* name = "sqrt";
  template <class V> LOCKSTEP_FORMULA V f(V x) const { return sqrt(x); }
  template <class V> LOCKSTEP_FORMULA V df(V, V y, V dy) const { return dy / (V(2) * y); }
};
struct Abs : Unary {
  static constexpr const char* name = "abs";
  static constexpr Domain domain = Domain::numbers;
  template <class V> LOCKSTEP_FORMULA V f(V x) const { return abs(x); }
  template <class V> LOCKSTEP_FORMULA V df(V x, V, V dy) const {
    return where(x > V(0), dy, where(x < V(0), -dy, V(0)));
  }
};
struct Neg : Unary {
  static constexpr const char* name = "neg";
  static constexpr Domain domain = Domain::numbers;
  template <class V> LOCKSTEP_FORMULA V f(V x) const { return -x; }
  template <class V> LOCKSTEP_FORMULA V df(V, V, V dy) const { return -dy; }
};
struct Square : Unary {
  static constexpr const char* name = "square";
  static constexpr Domain domain = Domain::numbers;
  template <class V> LOCKSTEP_FORMULA V f(V x) const { return x * x; }
  template <class V> LOCKSTEP_FORMULA V df(V x, V, V dy) const { return V(2) * (dy * x); }
};
struct Silu : Unary {
  static constexpr const char* name = "silu";
  template <class V> LOCKSTEP_FORMULA V f(V x) const { return silu(x); }
  template <class V> LOCKSTEP_FORMULA V df(V x, V, V dy) const {
    V t = min(x, V(800));  // sigmoid(-800) is 0: for infinity the product is 0, not NaN
    return dy * (sigmoid(t) + silu(t) * sigmoid(-t));
  }
};
/// log(1 + exp(x)), written so that exp neither overflows nor vanishes beside 1.
struct Softplus : Unary {
  static constexpr const char* name = "softplus";
  template <class V> LOCKSTEP_FORMULA V f(V x) const {
    return max(x, V(0)) + log1p(exp(-abs(x)));
  }
  template <class V> LOCKSTEP_FORMULA V df(V x, V, V dy) const { return dy * sigmoid(x); }
};
/// exp(-x^2 / 2): what the derivatives of erf, ndtr and gelu have in common.
struct Gaussian : Unary {
  static constexpr const char* name = "gaussian";
  template <class V> LOCKSTEP_FORMULA V f(V x) const { return gaussian(x); }
  template <class V> LOCKSTEP_FORMULA V df(V x, V y, V dy) const {
    V t = min(max(x, V(-40)), V(40));  // y is 0 from there on
    return dy * (-t * y);
  }
};
struct Erf : Unary {
  static constexpr const char* name = "erf";
  template <class V> LOCKSTEP_FORMULA V f(V x) const { return erf(x); }
  template <class V> LOCKSTEP_FORMULA V df(V x, V, V dy) const {
    V g = gaussian(x);
    return dy * (V(1.1283791670955126) * (g * g));  // 2 / sqrt(pi)
  }
};
/// The distribution function of the normal distribution.
struct Ndtr : Unary {
  static constexpr const char* name = "ndtr";
  template <class V> LOCKSTEP_FORMULA V f(V x) const { return ndtr(x); }
  template <class V> LOCKSTEP_FORMULA V df(V x, V, V dy) const {
    return dy * (V(0.39894228040143268) * gaussian(x));  // 1 / sqrt(2 pi)
  }
};
/// x ndtr(x); Hendrycks and Gimpel, 2016.
struct Gelu : Unary {
  static constexpr const char* name = "gelu";
  template <class V> LOCKSTEP_FORMULA V f(V x) const { return gelu(x); }
  template <class V> LOCKSTEP_FORMULA V df(V x, V, V dy) const {
    V t = min(max(x, V(-40)), V(40));  // as in gaussian
    return dy * (ndtr(t) + V(0.39894228040143268) * t * gaussian(t));
  }
};
struct LeakyRelu : Unary {
  static constexpr const char* name = "leaky_relu";
  Number slope;
  static constexpr auto probe() { return std::array{LeakyRelu{{}, 0.5}}; }
  template <class V> LOCKSTEP_FORMULA V f(V x) const { return where(x > V(0), x, V(slope) * x); }
  template <class V> LOCKSTEP_FORMULA V df(V x, V, V dy) const {
    return where(x > V(0), dy, V(slope) * dy);
  }
};
struct Clamp : Unary {
  static constexpr const char* name = "clamp";
  static constexpr Domain domain = Domain::numbers;
  Number low, high;
  static constexpr auto probe() { return std::array{Clamp{{}, -1, 1}}; }
  template <class V> LOCKSTEP_FORMULA V f(V x) const { return min(max(x, V(low)), V(high)); }
  template <class V> LOCKSTEP_FORMULA V df(V x, V, V dy) const {
    return where(x >= V(low), where(x <= V(high), dy, V(0)), V(0));
  }
};
struct Pow : Unary {
  static constexpr const char* name = "pow";
  static constexpr Precision precision = Precision::full;
  static constexpr Domain domain = Domain::numbers;
  Number exponent;
  static constexpr auto probe() { return std::array{Pow{{}, 0}, Pow{{}, 1.5}}; }
  template <class V> LOCKSTEP_FORMULA V f(V x) const { return pow(x, exponent); }
  template <class V> LOCKSTEP_FORMULA V df(V x, V, V dy) const {
    if (exponent.value == 0) return V(0) * dy;  // also where x^-1 is infinite
    return dy * (V(exponent) * pow(x, Number(exponent.value - 1)));
  }
};
struct LogicalNot : Unary {
  static constexpr const char* name = "logical_not";
  static constexpr Domain domain = Domain::any;
  static constexpr bool predicate = true;
  template <class V> LOCKSTEP_FORMULA auto f(V x) const { return x == V(0); }
};

// ---- two inputs ----

struct Add : Binary {
  static constexpr const char* name = "add";
  static constexpr Domain domain = Domain::any;
  template <class V> LOCKSTEP_FORMULA V f(V a, V b) const { return a + b; }
  template <class V> LOCKSTEP_FORMULA V da(V, V, V, V dy) const { return dy; }
  template <class V> LOCKSTEP_FORMULA V db(V, V, V, V dy) const { return dy; }
};
/// a + alpha * b
struct AddScaled : Binary {
  static constexpr const char* name = "add";
  static constexpr Domain domain = Domain::numbers;
  Number alpha;
  static constexpr auto probe() { return std::array{AddScaled{{}, 2}}; }
  template <class V> LOCKSTEP_FORMULA V f(V a, V b) const { return a + V(alpha) * b; }
  template <class V> LOCKSTEP_FORMULA V da(V, V, V, V dy) const { return dy; }
  template <class V> LOCKSTEP_FORMULA V db(V, V, V, V dy) const { return V(alpha) * dy; }
};
struct Sub : Binary {
  static constexpr const char* name = "sub";
  static constexpr Domain domain = Domain::numbers;
  template <class V> LOCKSTEP_FORMULA V f(V a, V b) const { return a - b; }
  template <class V> LOCKSTEP_FORMULA V da(V, V, V, V dy) const { return dy; }
  template <class V> LOCKSTEP_FORMULA V db(V, V, V, V dy) const { return -dy; }
};
struct Mul : Binary {
  static constexpr const char* name = "mul";
  static constexpr Domain domain = Domain::any;
  template <class V> LOCKSTEP_FORMULA V f(V a, V b) const { return a * b; }
  template <class V> LOCKSTEP_FORMULA V da(V, V b, V, V dy) const { return dy * b; }
  template <class V> LOCKSTEP_FORMULA V db(V a, V, V, V dy) const { return dy * a; }
};
struct Div : Binary {
  static constexpr const char* name = "div";
  template <class V> LOCKSTEP_FORMULA V f(V a, V b) const { return a / b; }
  template <class V> LOCKSTEP_FORMULA V da(V, V b, V, V dy) const { return dy / b; }
  template <class V> LOCKSTEP_FORMULA V db(V a, V b, V, V dy) const {
    return -(dy * ((a / b) / b));
  }
};
/// Where the inputs are equal each gets half of the gradient.
struct Maximum : Binary {
  static constexpr const char* name = "maximum";
  static constexpr Domain domain = Domain::any;
  template <class V> LOCKSTEP_FORMULA V f(V a, V b) const { return max(a, b); }
  template <class V> LOCKSTEP_FORMULA V da(V a, V b, V, V dy) const {
    return where(a < b, V(0), where(a == b, V(0.5) * dy, dy));
  }
  template <class V> LOCKSTEP_FORMULA V db(V a, V b, V, V dy) const {
    return where(b < a, V(0), where(a == b, V(0.5) * dy, dy));
  }
};
struct Minimum : Binary {
  static constexpr const char* name = "minimum";
  static constexpr Domain domain = Domain::any;
  template <class V> LOCKSTEP_FORMULA V f(V a, V b) const { return min(a, b); }
  template <class V> LOCKSTEP_FORMULA V da(V a, V b, V, V dy) const {
    return where(a > b, V(0), where(a == b, V(0.5) * dy, dy));
  }
  template <class V> LOCKSTEP_FORMULA V db(V a, V b, V, V dy) const {
    return where(b > a, V(0), where(a == b, V(0.5) * dy, dy));
  }
};

struct Eq : Comparison {
  static constexpr const char* name = "eq";
  template <class V> LOCKSTEP_FORMULA auto f(V a, V b) const { return a == b; }
};
struct Ne : Comparison {
  static constexpr const char* name = "ne";
  template <class V> LOCKSTEP_FORMULA auto f(V a, V b) const { return a != b; }
};
struct Lt : Comparison {
  static constexpr const char* name = "lt";
  template <class V> LOCKSTEP_FORMULA auto f(V a, V b) const { return a < b; }
};
struct Le : Comparison {
  static constexpr const char* name = "le";
  template <class V> LOCKSTEP_FORMULA auto f(V a, V b) const { return a <= b; }
};
struct Gt : Comparison {
  static constexpr const char* name = "gt";
  template <class V> LOCKSTEP_FORMULA auto f(V a, V b) const { return a > b; }
};
struct Ge : Comparison {
  static constexpr const char* name = "ge";
  template <class V> LOCKSTEP_FORMULA auto f(V a, V b) const { return a >= b; }
};

// ---- three inputs ----

/// a + w (b - a)
struct Lerp : Ternary {
  static constexpr const char* name = "lerp";
  template <class V> LOCKSTEP_FORMULA V f(V a, V b, V w) const { return a + w * (b - a); }
  template <class V> LOCKSTEP_FORMULA V da(V, V, V w, V, V dy) const { return dy * (V(1) - w); }
  template <class V> LOCKSTEP_FORMULA V db(V, V, V w, V, V dy) const { return dy * w; }
  template <class V> LOCKSTEP_FORMULA V dc(V a, V b, V, V, V dy) const { return dy * (b - a); }
};
/// a + value b c
struct Addcmul : Ternary {
  static constexpr const char* name = "addcmul";
  static constexpr Domain domain = Domain::numbers;
  Number value;
  static constexpr auto probe() { return std::array{Addcmul{{}, 2}}; }
  template <class V> LOCKSTEP_FORMULA V f(V a, V b, V c) const { return a + V(value) * (b * c); }
  template <class V> LOCKSTEP_FORMULA V da(V, V, V, V, V dy) const { return dy; }
  template <class V> LOCKSTEP_FORMULA V db(V, V, V c, V, V dy) const { return V(value) * (dy * c); }
  template <class V> LOCKSTEP_FORMULA V dc(V, V b, V, V, V dy) const { return V(value) * (dy * b); }
};

// ---- a tensor and a number: a two-input op with one input bound ----

template <class Op>
struct WithRight : Unary {  // op(x, number)
  static constexpr const char* name = Op::name;
  static constexpr Domain domain = Op::domain;
  static constexpr bool predicate = Op::predicate;
  Number number;
  static constexpr auto probe() { return std::array{WithRight{{}, 2}}; }
  template <class V> LOCKSTEP_FORMULA auto f(V x) const { return Op().f(x, V(number)); }
  template <class V> LOCKSTEP_FORMULA V df(V x, V y, V dy) const {
    return Op().da(x, V(number), y, dy);
  }
};
template <class Op>
struct WithLeft : Unary {  // op(number, x)
  static constexpr const char* name = Op::name;
  static constexpr Domain domain = Op::domain;
  static constexpr bool predicate = Op::predicate;
  Number number;
  static constexpr auto probe() { return std::array{WithLeft{{}, 2}}; }
  template <class V> LOCKSTEP_FORMULA auto f(V x) const { return Op().f(V(number), x); }
  template <class V> LOCKSTEP_FORMULA V df(V x, V y, V dy) const {
    return Op().db(V(number), x, y, dy);
  }
};

// ---- with an operand that is not of the values' dtype ----

/// condition ? a : b. Its derivatives are wheres themselves.
struct Where : Defaults {
  static constexpr const char* name = "where";
  template <class M, class V> LOCKSTEP_FORMULA V f(M condition, V a, V b) const {
    return where(condition, a, b);
  }
};
/// x / (1 - p), or 0 with probability p; u is uniform in [0, 1), drawn from the element's index.
/// Linear in x: the derivative is the same op on dy. Srivastava et al., 2014.
struct Dropout : Defaults {
  static constexpr const char* name = "dropout";
  Number p, scale;
  uint64_t seed, offset;  // the RandomKey
  template <class V> LOCKSTEP_FORMULA V f(V x, V u) const {
    return where(u < V(p), V(0), x * V(scale));
  }
};

// ---- the lists of ops, from which kernels, tables and tests are made ----

using UnaryOps = List<Relu, Sigmoid, Tanh, Exp, Log, Sqrt, Abs, Neg, Square, Silu,
                      Softplus, Gaussian, Erf, Ndtr, Gelu, LeakyRelu, Clamp, Pow>;
using BinaryOps = List<Add, AddScaled, Sub, Mul, Div, Maximum, Minimum>;
using TernaryOps = List<Lerp, Addcmul>;
using NumberOps = List<WithRight<Add>, WithRight<Sub>, WithRight<Mul>, WithRight<Div>,
                       WithRight<Maximum>, WithRight<Minimum>, WithLeft<Sub>, WithLeft<Div>>;
using Predicates = List<LogicalNot, Eq, Ne, Lt, Le, Gt, Ge, WithRight<Eq>, WithRight<Ne>,
                        WithRight<Lt>, WithRight<Le>, WithRight<Gt>, WithRight<Ge>>;
// clang-format on
