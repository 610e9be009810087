// The public element-wise functions: each names its formula; checks, promotion and in-place rules
// are shared.
#include <lockstep/tensor/ops/elementwise.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include <lockstep/tensor/ops/copy.h>
#include <lockstep/tensor/ops/elementwise_op.h>

namespace lockstep {

Strides elementwise::result_strides(const Shape& shape, const Operands& inputs) {
  if (shape.dims() == 4)
    for (const Tensor* t : inputs.all())
      if (t->defined() && t->shape() == shape && t->is_channels_last() && !t->is_contiguous())
        return t->strides();
  return contiguous_strides(shape);
}

namespace {

using namespace formulas;
using elementwise::ManyOperandOp, elementwise::may_consume, elementwise::UnaryOp;

// ---- dtypes ----

/// The dtype in which an op of `domain` computes a tensor of dtype x.
DType computes_in(Domain domain, DType x) {
  return domain == Domain::floats && !is_floating(x) ? DType::f32 : x;
}
/// The same for a tensor and a number.
DType computes_in(Domain domain, DType x, Number n) {
  if (!n.is_whole && !is_floating(x)) return DType::f32;
  if (!n.is_bool && x == DType::boolean) x = DType::i64;
  return computes_in(domain, x);
}
/// bool < integer < float.
int kind(DType t) { return is_floating(t) ? 2 : t == DType::boolean ? 0 : 1; }
/// PyTorch's promotion: a 0-d tensor counts only where it brings a higher kind.
DType promoted(Domain domain, const Tensor& a, const Tensor& b) {
  DType t = promote(a.dtype(), b.dtype());
  if ((a.dim() == 0) != (b.dim() == 0)) {
    const DType ranked = a.dim() ? a.dtype() : b.dtype(), single = a.dim() ? b.dtype() : a.dtype();
    if (kind(single) <= kind(ranked)) t = ranked;
  }
  return computes_in(domain, t);
}
/// An integer clamped to the range of an integer dtype, for ops that select it or an element.
Number clipped(Number n, DType t) {
  if (!n.is_whole) return n;
  if (is_floating(t) || t == DType::boolean) return n;
  return dispatch(Clamp::name, t, [n]<class T>(TypeTag<T>) -> Number {
    using L = std::numeric_limits<T>;
    return std::clamp<int64_t>(n.whole, static_cast<int64_t>(L::min()), static_cast<int64_t>(L::max()));
  });
}
/// A float that is to be compared with integers, as an integer if it is one. Others are compared in
/// f64, where rounding an i64 does not change the result; floats outside the range of i64 become
/// infinite, so that no rounded integer equals them.
Number comparable(Number n) {
  constexpr double kEnd = 0x1p63, kInf = std::numeric_limits<double>::infinity();
  if (n.is_whole) return n;
  if (n.value >= kEnd) return kInf;
  if (n.value < -kEnd) return -kInf;
  return n.value == std::trunc(n.value) ? Number(static_cast<int64_t>(n.value)) : n;
}
DType clamp_dtype(const Tensor& x, Number low, Number high) {
  return computes_in(Clamp::domain, computes_in(Clamp::domain, x.dtype(), low), high);
}
/// A 0-d tensor.
Tensor tensor_of(Number n, DType t, Device device) {
  const Tensor y = empty({}, {.dtype = t, .device = device});
  kernels::fill(y, n);
  return y;
}

// ---- out of place ----

template <class Op>
Tensor unary(Op op, Tensor x, DType compute) {
  if (compute != x.dtype()) x = x.to(compute);
  UnaryOp<Op> node{op};
  if constexpr (!Op::predicate && !(UnaryOp<Op>::saves & kInput(0)))
    if (may_consume(x)) node.consumable = x.ref().get();
  return apply(std::move(node), x);
}
template <class Op>
Tensor unary(Op op, Tensor x) {
  const DType compute = computes_in(Op::domain, x.dtype());
  return unary(op, std::move(x), compute);
}
template <class Op>
Tensor with_number(Op op, Tensor x) {
  DType compute = computes_in(Op::domain, x.dtype(), op.number);
  if constexpr (Op::predicate) {
    if (!is_floating(x.dtype())) {
      op.number = comparable(op.number);
      compute = op.number.is_whole ? computes_in(Op::domain, x.dtype(), op.number) : DType::f64;
    }
  }
  if (clipped(op.number, compute).whole != op.number.whole) {
    if constexpr (Op::predicate) compute = DType::i64;
    if constexpr (std::is_same_v<Op, WithRight<Maximum>> || std::is_same_v<Op, WithRight<Minimum>>)
      op.number = clipped(op.number, compute);
  }
  return unary(op, std::move(x), compute);
}
template <class Op>
Tensor binary(Op op, const Tensor& a, const Tensor& b) {
  if (a.dtype() == b.dtype() && computes_in(Op::domain, a.dtype()) == a.dtype())
    return apply(ManyOperandOp<Op>{op}, a, b);
  const DType t = promoted(Op::domain, a, b);
  return apply(ManyOperandOp<Op>{op}, a.to(t), b.to(t));
}

template <class Op>
Tensor ternary(Op op, const Tensor& a, const Tensor& b, const Tensor& c) {
  DType t = promoted(Op::domain, a, b);
  const Tensor x = a.to(t), y = b.to(t);
  t = promoted(Op::domain, x.dim() < y.dim() ? y : x, c);
  return apply(ManyOperandOp<Op>{op}, x.to(t), y.to(t), c.to(t));
}

// ---- in place ----

/// A copy of x before an in-place op, with x's node.
Tensor before(const Tensor& x) {
  Tensor old = x.detach().clone();
  detail::attach(old, edge_of(x));
  return old;
}

template <class Op>
Tensor& unary_(Op op, Tensor& x, DType compute) {
  using Node = UnaryOp<Op>;
  LOCKSTEP_CHECK(compute == x.dtype(), DTypeError, Op::name, "_: the result is ", compute,
                 ", which ", x.dtype(), " cannot hold; use the out-of-place form");
  const bool records = is_grad_enabled() && x.node();
  const Tensor input = records && (Node::saves & kInput(0)) ? before(x) : x;
  apply_in_place(Node{op, nullptr, &x}, x, input);
  return x;
}
template <class Op>
Tensor& unary_(Op op, Tensor& x) {
  return unary_(op, x, computes_in(Op::domain, x.dtype()));
}
template <class Op>
Tensor& number_(Op op, Tensor& x) {
  return unary_(op, x, computes_in(Op::domain, x.dtype(), op.number));
}

template <class Op>
Tensor& binary_(Op op, Tensor& x, Tensor other) {
  using Node = ManyOperandOp<Op>;
  const DType t = promoted(Op::domain, x, other);
  LOCKSTEP_CHECK(kind(t) == kind(x.dtype()), DTypeError, Op::name, "_: the result is ", t,
                 ", which ", x.dtype(), " cannot hold; use the out-of-place form");
  LOCKSTEP_CHECK(x.shape() == other.shape() ||
                     broadcast_shapes(Op::name, x.shape(), other.shape()) == x.shape(),
                 ShapeError, Op::name, "_: the result of ", x.shape(), " and ", other.shape(),
                 " does not fit in place; use the out-of-place form");
  const bool records = is_grad_enabled() && (x.node() || other.node());
  if (t != x.dtype()) {  // computed in the wider dtype, then rounded to x's
    detail::check_in_place(Op::name, x, records);
    return x.copy_(binary(std::move(op), x, other));
  }
  other = other.to(t);
  if (detail::overlaps(x, other)) other = other.clone();
  // Backward must read the values before the op, of `other` too where it is x itself.
  Node node{op, &x};
  const unsigned saves = records ? saved_by(node, std::array<const Tensor*, 2>{&x, &other}) : 0;
  const bool is_itself = other.data_ptr() == x.data_ptr();
  const Tensor input = saves & (kInput(0) | (is_itself ? kInput(1) : 0)) ? before(x) : x;
  if (saves & kInput(1) && is_itself) {
    const Edge other_edge = edge_of(other);
    other = input.detach();
    detail::attach(other, other_edge);
  }
  apply_in_place(std::move(node), x, input, other);
  return x;
}

// ---- where and dropout ----

struct WhereOp {
  static constexpr const char* name = "where";
  static constexpr Precision precision = Precision::widest;
  static constexpr unsigned saves = kInput(0);
  Shape a_shape = {}, b_shape = {};

  Tensor forward(const Tensor& condition, const Tensor& a, const Tensor& b) {
    a_shape = a.shape();
    b_shape = b.shape();
    const Shape shape =
        broadcast_shapes(name, condition.shape(), broadcast_shapes(name, a_shape, b_shape));
    const Tensor y = empty_strided(
        shape, elementwise::result_strides(shape, Operands(condition, a, b)), elementwise::like(a));
    elementwise_table<Where>().forward(Operands(y, condition, a, b), Where{});
    return y;
  }
  void backward(const Saved& saved, const Tensor& dy, InputGradients& dx) const {
    const Tensor& condition = saved.input(0);
    if (dx.needed(1)) dx.set(1, sum_to(where(condition, dy, 0), a_shape));
    if (dx.needed(2)) dx.set(2, sum_to(where(condition, 0, dy), b_shape));
  }
};

struct DropoutOp {
  static constexpr const char* name = "dropout";
  static constexpr unsigned saves = 0;
  double p;
  Ref<Cell<RandomKey>> key;
  const TensorBody* consumable = nullptr;

  Tensor forward(const Tensor& x) const {
    const Tensor y =
        elementwise::consumes(consumable, x)
            ? x.detach()
            : empty_strided(x.shape(), elementwise::result_strides(x.shape(), Operands(x)),
                            elementwise::like(x));
    kernels::dropout(y, x, p, key);
    return y;
  }
  void backward(const Saved&, const Tensor& dy, InputGradients& dx) const {
    dx.set(0, apply(DropoutOp{p, key}, dy));
  }
};

/// The number for an in-place op: with an integer tensor, which cannot hold a float result, a float
/// without a fractional part is an integer.
Number operand_for(const Tensor& x, Number n) {
  if (n.is_whole || x.is_floating_point()) return n;
  return std::abs(n.value) <= 0x1p53 ? comparable(n) : n;
}

}  // namespace

Tensor relu(Tensor x) { return unary(Relu{}, std::move(x)); }
Tensor sigmoid(Tensor x) { return unary(Sigmoid{}, std::move(x)); }
Tensor tanh(Tensor x) { return unary(Tanh{}, std::move(x)); }
Tensor exp(Tensor x) { return unary(Exp{}, std::move(x)); }
Tensor log(Tensor x) { return unary(Log{}, std::move(x)); }
Tensor sqrt(Tensor x) { return unary(Sqrt{}, std::move(x)); }
Tensor abs(Tensor x) { return unary(Abs{}, std::move(x)); }
Tensor neg(Tensor x) { return unary(Neg{}, std::move(x)); }
Tensor square(Tensor x) { return unary(Square{}, std::move(x)); }
Tensor silu(Tensor x) { return unary(Silu{}, std::move(x)); }
Tensor softplus(Tensor x) { return unary(Softplus{}, std::move(x)); }
Tensor gaussian(Tensor x) { return unary(Gaussian{}, std::move(x)); }
Tensor ndtr(Tensor x) { return unary(Ndtr{}, std::move(x)); }
Tensor erf(Tensor x) { return unary(Erf{}, std::move(x)); }
Tensor gelu(Tensor x) { return unary(Gelu{}, std::move(x)); }
Tensor leaky_relu(Tensor x, double slope) { return unary(LeakyRelu{{}, slope}, std::move(x)); }
Tensor clamp(Tensor x, Number low, Number high) {
  const DType t = clamp_dtype(x, low, high);
  return unary(Clamp{{}, clipped(low, t), clipped(high, t)}, std::move(x), t);
}
Tensor pow(Tensor x, Number exponent) {
  const DType t = computes_in(Pow::domain, x.dtype(), exponent);
  LOCKSTEP_CHECK(is_floating(t) || exponent.whole >= 0, ValueError,
                 "pow: integers have no negative powers, got ", exponent.whole,
                 "; convert with to(DType::f32)");
  return unary(Pow{{}, exponent}, std::move(x), t);
}
Tensor logical_not(Tensor x) { return unary(LogicalNot{}, std::move(x)); }

Tensor dropout(Tensor x, double p, bool training, Generator& generator) {
  LOCKSTEP_CHECK(p >= 0 && p <= 1, ValueError, "dropout: p must be in [0, 1], got ", p);
  LOCKSTEP_CHECK(is_floating(x.dtype()), DTypeError,
                 "dropout: needs a floating tensor, got ", x.dtype(),
                 "; convert with to(DType::f32)");
  if (!training || p == 0) return x;
  DropoutOp node{p, generator.draw()};
  if (may_consume(x)) node.consumable = x.ref().get();
  return apply(node, x);
}

Tensor add(const Tensor& a, const Tensor& b) { return binary(Add{}, a, b); }
Tensor sub(const Tensor& a, const Tensor& b) { return binary(Sub{}, a, b); }
Tensor mul(const Tensor& a, const Tensor& b) { return binary(Mul{}, a, b); }
Tensor div(const Tensor& a, const Tensor& b) { return binary(Div{}, a, b); }
Tensor maximum(const Tensor& a, const Tensor& b) { return binary(Maximum{}, a, b); }
Tensor minimum(const Tensor& a, const Tensor& b) { return binary(Minimum{}, a, b); }

Tensor add(Tensor a, Number b) { return with_number(WithRight<Add>{{}, b}, std::move(a)); }
Tensor sub(Tensor a, Number b) { return with_number(WithRight<Sub>{{}, b}, std::move(a)); }
Tensor sub(Number a, Tensor b) { return with_number(WithLeft<Sub>{{}, a}, std::move(b)); }
Tensor mul(Tensor a, Number b) { return with_number(WithRight<Mul>{{}, b}, std::move(a)); }
Tensor div(Tensor a, Number b) { return with_number(WithRight<Div>{{}, b}, std::move(a)); }
Tensor div(Number a, Tensor b) { return with_number(WithLeft<Div>{{}, a}, std::move(b)); }
Tensor maximum(Tensor a, Number b) { return with_number(WithRight<Maximum>{{}, b}, std::move(a)); }
Tensor minimum(Tensor a, Number b) { return with_number(WithRight<Minimum>{{}, b}, std::move(a)); }

Tensor lerp(const Tensor& a, const Tensor& b, const Tensor& weight) {
  return ternary(Lerp{}, a, b, weight);
}
Tensor addcmul(const Tensor& a, const Tensor& b, const Tensor& c, Number value) {
  return ternary(Addcmul{{}, value}, a, b, c);
}

Tensor eq(const Tensor& a, const Tensor& b) { return binary(Eq{}, a, b); }
Tensor ne(const Tensor& a, const Tensor& b) { return binary(Ne{}, a, b); }
Tensor lt(const Tensor& a, const Tensor& b) { return binary(Lt{}, a, b); }
Tensor le(const Tensor& a, const Tensor& b) { return binary(Le{}, a, b); }
Tensor gt(const Tensor& a, const Tensor& b) { return binary(Gt{}, a, b); }
Tensor ge(const Tensor& a, const Tensor& b) { return binary(Ge{}, a, b); }
Tensor eq(const Tensor& a, Number b) { return with_number(WithRight<Eq>{{}, b}, a); }
Tensor ne(const Tensor& a, Number b) { return with_number(WithRight<Ne>{{}, b}, a); }
Tensor lt(const Tensor& a, Number b) { return with_number(WithRight<Lt>{{}, b}, a); }
Tensor le(const Tensor& a, Number b) { return with_number(WithRight<Le>{{}, b}, a); }
Tensor gt(const Tensor& a, Number b) { return with_number(WithRight<Gt>{{}, b}, a); }
Tensor ge(const Tensor& a, Number b) { return with_number(WithRight<Ge>{{}, b}, a); }

Tensor where(const Tensor& condition, const Tensor& a, const Tensor& b) {
  LOCKSTEP_CHECK(condition.dtype() == DType::boolean, DTypeError,
                 "where: the condition must be bool, got ", condition.dtype(),
                 "; compare it, as in ne(x, 0)");
  const DType t = promoted(Domain::any, a, b);
  return apply(WhereOp{}, condition, a.to(t), b.to(t));
}
Tensor where(const Tensor& condition, const Tensor& a, Number b) {
  return where(condition, a, tensor_of(b, computes_in(Domain::any, a.dtype(), b), a.device()));
}
Tensor where(const Tensor& condition, Number a, const Tensor& b) {
  return where(condition, tensor_of(a, computes_in(Domain::any, b.dtype(), a), b.device()), b);
}

Tensor& relu_(Tensor& x) { return unary_(Relu{}, x); }
Tensor& leaky_relu_(Tensor& x, double slope) { return unary_(LeakyRelu{{}, slope}, x); }
Tensor& sigmoid_(Tensor& x) { return unary_(Sigmoid{}, x); }
Tensor& tanh_(Tensor& x) { return unary_(Tanh{}, x); }
Tensor& exp_(Tensor& x) { return unary_(Exp{}, x); }
Tensor& sqrt_(Tensor& x) { return unary_(Sqrt{}, x); }
Tensor& abs_(Tensor& x) { return unary_(Abs{}, x); }
Tensor& neg_(Tensor& x) { return unary_(Neg{}, x); }
Tensor& clamp_(Tensor& x, Number low, Number high) {
  return unary_(Clamp{{}, clipped(low, x.dtype()), clipped(high, x.dtype())}, x,
                clamp_dtype(x, low, high));
}
Tensor& div_(Tensor& x, const Tensor& other) { return binary_(Div{}, x, other); }
Tensor& div_(Tensor& x, Number number) { return number_(WithRight<Div>{{}, number}, x); }

Tensor& Tensor::add_(const Tensor& other, Number alpha) {
  if (alpha.value == 1) return binary_(Add{}, *this, other);
  const Number scale = operand_for(*this, alpha);
  LOCKSTEP_CHECK(scale.is_whole || is_floating_point(), DTypeError, "add_: alpha ", alpha.value,
                 " is fractional, the tensor ", dtype(), "; use the out-of-place form");
  return binary_(AddScaled{{}, scale}, *this, other);
}
Tensor& Tensor::add_(Number value) {
  return number_(WithRight<Add>{{}, operand_for(*this, value)}, *this);
}
Tensor& Tensor::mul_(const Tensor& other) { return binary_(Mul{}, *this, other); }
Tensor& Tensor::mul_(Number factor) {
  return number_(WithRight<Mul>{{}, operand_for(*this, factor)}, *this);
}
Tensor Tensor::square() const { return lockstep::square(*this); }

constinit Kernel<void(const Tensor&, const Tensor&, double, const Ref<Cell<RandomKey>>&)>
    kernels::dropout("dropout");

}  // namespace lockstep
