// Symbol: the value type of derivatives under create_graph. It is a Tensor, or a number without
// dtype and device; an operation on two numbers gives a number, so only those on tensors become ops
// in the graph.
#pragma once

#include <algorithm>

#include <lockstep/tensor/ops/elementwise.h>

namespace lockstep {

class Symbol {
 public:
  /// A comparison's result: a bool tensor, or a bool.
  struct Mask {
    Tensor tensor;
    bool value = false;
  };

  Symbol(Tensor t) : tensor_(std::move(t)) {}  // NOLINT: implicit
  explicit Symbol(Number n) : number_(n) {}

  /// This value in the shape, dtype and device of `like`.
  Tensor materialize(const Tensor& like) const {
    return is_number() ? zeros_like(like) + number_ : tensor_;
  }

  friend Symbol operator+(const Symbol& a, const Symbol& b) {
    if (a.is(0)) return b;
    if (b.is(0)) return a;
    if (a.is_number())
      return b.is_number() ? number(a.value() + b.value()) : add(b.tensor_, a.number_);
    return b.is_number() ? add(a.tensor_, b.number_) : add(a.tensor_, b.tensor_);
  }
  friend Symbol operator-(const Symbol& a, const Symbol& b) {
    if (b.is(0)) return a;
    if (a.is_number())
      return b.is_number() ? number(a.value() - b.value()) : sub(a.number_, b.tensor_);
    return b.is_number() ? sub(a.tensor_, b.number_) : sub(a.tensor_, b.tensor_);
  }
  friend Symbol operator*(const Symbol& a, const Symbol& b) {
    if (a.is(1)) return b;
    if (b.is(1)) return a;
    if (a.is_number())
      return b.is_number() ? number(a.value() * b.value()) : mul(b.tensor_, a.number_);
    return b.is_number() ? mul(a.tensor_, b.number_) : mul(a.tensor_, b.tensor_);
  }
  friend Symbol operator/(const Symbol& a, const Symbol& b) {
    if (b.is(1)) return a;
    if (a.is_number())
      return b.is_number() ? number(a.value() / b.value()) : div(a.number_, b.tensor_);
    return b.is_number() ? div(a.tensor_, b.number_) : div(a.tensor_, b.tensor_);
  }
  friend Symbol operator-(const Symbol& a) {
    return a.is_number() ? number(-a.value()) : neg(a.tensor_);
  }

  friend Mask operator<(const Symbol& a, const Symbol& b) {
    if (a.is_number())
      return b.is_number() ? Mask{{}, a.value() < b.value()} : Mask{gt(b.tensor_, a.number_)};
    return Mask{b.is_number() ? lt(a.tensor_, b.number_) : lt(a.tensor_, b.tensor_)};
  }
  friend Mask operator<=(const Symbol& a, const Symbol& b) {
    if (a.is_number())
      return b.is_number() ? Mask{{}, a.value() <= b.value()} : Mask{ge(b.tensor_, a.number_)};
    return Mask{b.is_number() ? le(a.tensor_, b.number_) : le(a.tensor_, b.tensor_)};
  }
  friend Mask operator>(const Symbol& a, const Symbol& b) { return b < a; }
  friend Mask operator>=(const Symbol& a, const Symbol& b) { return b <= a; }
  friend Mask operator==(const Symbol& a, const Symbol& b) {
    if (a.is_number())
      return b.is_number() ? Mask{{}, a.value() == b.value()} : Mask{eq(b.tensor_, a.number_)};
    return Mask{b.is_number() ? eq(a.tensor_, b.number_) : eq(a.tensor_, b.tensor_)};
  }
  friend Symbol where(const Mask& m, const Symbol& a, const Symbol& b) {
    if (!m.tensor.defined()) return m.value ? a : b;
    LOCKSTEP_CHECK(!a.is_number() || !b.is_number(), Error,
                   "where: a derivative chooses between two numbers, "
                   "which have no dtype; write it so that one branch holds dy");
    if (a.is_number()) return lockstep::where(m.tensor, a.number_, b.tensor_);
    return b.is_number() ? lockstep::where(m.tensor, a.tensor_, b.number_)
                         : lockstep::where(m.tensor, a.tensor_, b.tensor_);
  }

  friend Symbol max(const Symbol& a, const Symbol& b) {
    if (a.is_number())
      return b.is_number() ? number(std::max(a.value(), b.value())) : maximum(b.tensor_, a.number_);
    return b.is_number() ? maximum(a.tensor_, b.number_) : maximum(a.tensor_, b.tensor_);
  }
  friend Symbol min(const Symbol& a, const Symbol& b) {
    if (a.is_number())
      return b.is_number() ? number(std::min(a.value(), b.value())) : minimum(b.tensor_, a.number_);
    return b.is_number() ? minimum(a.tensor_, b.number_) : minimum(a.tensor_, b.tensor_);
  }

  // Of tensors only: formulas take these of their inputs.
  friend Symbol sigmoid(const Symbol& a) { return lockstep::sigmoid(a.tensor_); }
  friend Symbol silu(const Symbol& a) { return lockstep::silu(a.tensor_); }
  friend Symbol gaussian(const Symbol& a) { return lockstep::gaussian(a.tensor_); }
  friend Symbol ndtr(const Symbol& a) { return lockstep::ndtr(a.tensor_); }
  friend Symbol pow(const Symbol& a, Number p) { return lockstep::pow(a.tensor_, p); }

 private:
  static Symbol number(double v) { return Symbol(Number(v)); }
  bool is_number() const { return !tensor_.defined(); }
  double value() const { return number_.value; }
  bool is(double v) const { return is_number() && value() == v; }

  Tensor tensor_;
  Number number_;
};

}  // namespace lockstep
