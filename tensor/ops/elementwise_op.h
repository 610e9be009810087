// Forward and backward of every element-wise op, made from its formula. Backward runs the
// derivative's kernel; under create_graph it evaluates the same formula on Symbols, which makes it
// a graph of ops.
#pragma once

#include <memory>

#include <lockstep/tensor/op.h>
#include <lockstep/tensor/ops/elementwise_table.h>
#include <lockstep/tensor/ops/reduce.h>
#include <lockstep/tensor/ops/symbol.h>

namespace lockstep::elementwise {

using formulas::Probe;

/// The memory order an element-wise result takes: channels-last if an input of full shape is, else
/// row-major.
Strides result_strides(const Shape& shape, const Operands& inputs);

/// What the derivative by input I reads, found from its formula.
template <class Op, int I>
constexpr unsigned saved_for() {
  if constexpr (Op::predicate) {
    return 0;
  } else {
    constexpr unsigned r = formulas::reads<Op, I>;
    return (r & Probe::kA ? kInput(0) : 0) | (r & Probe::kB ? kInput(1) : 0) |
           (r & Probe::kC ? kInput(2) : 0) | (r & Probe::kY ? kOutput : 0);
  }
}

inline TensorOptions like(const Tensor& t) { return {.dtype = t.dtype(), .device = t.device()}; }

/// Whether the result may overwrite x: this is the last handle, and nothing else uses its storage.
inline bool may_consume(const Tensor& x) {
  return x.ref()->use_count() == 1 && x.storage().use_count() == 1 && x.storage().owns_bytes() &&
         (!x.node() || !x.is_leaf()) && (x.is_contiguous() || x.is_channels_last());
}

/// Whether x is what may_consume() found, and still held by nobody else (an OpHook, say).
inline bool consumes(const TensorBody* consumable, const Tensor& x) {
  return x.ref().get() == consumable && x.ref()->use_count() == 1;
}

/// dy times the derivative of Op by input I, in the shape of dy; tensors it does not read may be
/// undefined.
template <int I, class Op>
Tensor differentiate(const Op& op, const std::array<Tensor, Op::inputs>& x, const Tensor& y,
                     const Tensor& dy, const Tensor& destination) {
  if constexpr (formulas::passes_on<Op, I>) {
    return dy;
  } else if (is_grad_enabled()) {
    std::array<Symbol, Op::inputs> s = [&]<size_t... K>(std::index_sequence<K...>) {
      return std::array<Symbol, Op::inputs>{Symbol(x[K])...};
    }
    (std::make_index_sequence<Op::inputs>());
    return formulas::derivative<I>(op, s, Symbol(y), Symbol(dy)).materialize(dy);
  } else {
    constexpr unsigned reads = formulas::reads<Op, I>;
    Tensor dx = destination;
    Operands operands(dx, dy);
    if constexpr (reads & Probe::kA) operands.push_back(x[0]);
    if constexpr (reads & Probe::kB) operands.push_back(x[1]);
    if constexpr (reads & Probe::kC) operands.push_back(x[2]);
    if constexpr (reads & Probe::kY) operands.push_back(y);
    if (!dx.defined()) dx = empty_strided(dy.shape(), result_strides(dy.shape(), operands), like(dy));
    elementwise_table<Op>().derivative[I](operands, op);
    return dx;
  }
}

template <class Op>
struct UnaryOp {
  static constexpr const char* name = Op::name;
  static constexpr Precision precision = Op::precision;
  static constexpr unsigned saves = saved_for<Op, 0>();
  Op op;
  const TensorBody* consumable = nullptr;  // an input that the result may overwrite
  Tensor* target = nullptr;                // in-place form: where the result goes

  Tensor forward(const Tensor& x) {
    const DType dtype = Op::predicate ? DType::boolean : x.dtype();
    Tensor y;
    if (target)
      y = *target;
    else if (consumes(consumable, x))
      y = x.detach();
    else if (x.is_contiguous())
      y = empty(x.shape(), {.dtype = dtype, .device = x.device()});
    else {
      y = empty_strided(x.shape(), result_strides(x.shape(), Operands(x)),
                        {.dtype = dtype, .device = x.device()});
    }
    elementwise_table<Op>().forward(Operands(y, x), op);
    return y;
  }
  void backward(const Saved& saved, const Tensor& dy, InputGradients& dx) const {
    if constexpr (!Op::predicate) {
      if (!dx.needed(0)) return;
      std::array<Tensor, 1> x;
      Tensor y;
      if constexpr (saves & kInput(0)) x[0] = saved.input(0);
      if constexpr (saves & kOutput) y = saved.output();
      Tensor destination = dx.destination(0);
      // A gradient that is referenced nowhere else is overwritten.
      if (!destination.defined() && !is_grad_enabled() && may_consume(dy)) destination = dy;
      dx.set(0, differentiate<0>(op, x, y, dy, destination));
    }
  }
};

/// An op of two or three inputs.
template <class Op>
struct ManyOperandOp {
  static constexpr const char* name = Op::name;
  static constexpr Precision precision = Op::precision;
  static constexpr size_t kInputs = Op::inputs;
  static constexpr unsigned saves_for(int i) {
    constexpr auto saves = []<size_t... I>(std::index_sequence<I...>) {
      return std::array<unsigned, kInputs>{saved_for<Op, I>()...};
    }(std::make_index_sequence<kInputs>());
    return saves[static_cast<size_t>(i)];
  }
  Op op;
  const Tensor* target = nullptr;                           // in-place form: where the result goes
  std::unique_ptr<std::array<Shape, kInputs>> shapes = {};  // of the inputs, if they differ

  template <class... Inputs>
  Tensor forward(const Tensor& first, const Inputs&... others) {
    const TensorOptions options{.dtype = Op::predicate ? DType::boolean : first.dtype(),
                                .device = first.device()};
    const bool same = ((others.shape() == first.shape()) && ...);
    if (!same)
      shapes = std::make_unique<std::array<Shape, kInputs>>(
          std::array{first.shape(), others.shape()...});
    Tensor y;
    if (target) {
      y = *target;
    } else if (same && first.is_contiguous() && (others.is_contiguous() && ...)) {
      y = empty(first.shape(), options);
    } else {
      Shape shape = first.shape();
      if (!same) ((shape = broadcast_shapes(name, shape, others.shape())), ...);
      y = empty_strided(shape, result_strides(shape, Operands(first, others...)), options);
    }
    elementwise_table<Op>().forward(Operands(y, first, others...), op);
    return y;
  }
  void backward(const Saved& saved, const Tensor& dy, InputGradients& dx) const {
    if constexpr (!Op::predicate)
      [&]<size_t... I>(std::index_sequence<I...>) {
        (one<I>(saved, dy, dx), ...);
      }(std::make_index_sequence<kInputs>());
  }

 private:
  template <int I>
  void one(const Saved& saved, const Tensor& dy, InputGradients& dx) const {
    if (!dx.needed(I)) return;
    std::array<Tensor, kInputs> x;
    for (int k = 0; k < Op::inputs; ++k)
      if (saves_for(I) & kInput(k)) x[static_cast<size_t>(k)] = saved.input(k);
    Tensor y;
    if constexpr (saves_for(I) & kOutput) y = saved.output();
    if (!shapes || (*shapes)[I] == dy.shape()) {
      dx.set(I, differentiate<I>(op, x, y, dy, dx.destination(I)));
    } else {
      dx.set(I, sum_to(differentiate<I>(op, x, y, dy, Tensor()), (*shapes)[I]));
    }
  }
};

}  // namespace lockstep::elementwise
