// The element-wise ops. Tensors broadcast as in NumPy; dtypes promote as in PyTorch: a number never
// changes a floating dtype, a 0-d tensor only the kind (integer to float), and ops that need
// fractions (exp, div, ...) turn integers into f32. NaN in gives NaN out. A result is channels-last
// when a full-shape input is.
//
//   Tensor y = relu(x * 2.0 + bias);
//
// Accuracy: for every input, subnormal numbers included, a result differs from the exact one by at
// most the stated number of ulp (units in its last place), on every instruction set; 0.5 where none
// is stated. Instruction sets may differ from each other within that. At infinity a result is the
// limit. A number is rounded to the dtype of the computation first. tests/accuracy_test.cpp
// measures these bounds, and those of the derivatives.
//
// Backward multiplies the output's gradient by the derivative, as PyTorch does. Where the gradient
// is 0 and the derivative infinite the product is NaN: where(gt(x, 0), sqrt(x), 0) has a NaN
// gradient at 0. Replace such x before the op: where(gt(x, 0), sqrt(where(gt(x, 0), x, 1)), 0).
//
// Integers wrap around where they overflow, and are not rounded where both operands are integers.
//
// Errors: ShapeError (shapes do not broadcast), DTypeError (an op is not defined for a dtype),
// DeviceError (tensors on different devices). The one-input ops take their tensor by value: given
// the last handle, as in relu(conv(x)), they may reuse its storage.
#pragma once

#include <lockstep/tensor/formula.h>
#include <lockstep/tensor/random.h>
#include <lockstep/tensor/tensor.h>

namespace lockstep {

// ---- one input ----

/// max(x, 0); its derivative at 0 is 0.
LOCKSTEP_API Tensor relu(Tensor x);
/// 1 / (1 + exp(-x)). 1 ulp; its derivative y (1 - y), of the rounded y, 1.5.
LOCKSTEP_API Tensor sigmoid(Tensor x);
/// 1 ulp; its derivative 1 - y^2, of the rounded y, 2.
LOCKSTEP_API Tensor tanh(Tensor x);
/// 1 ulp.
LOCKSTEP_API Tensor exp(Tensor x);
/// The natural logarithm: -inf at 0, NaN below. 1 ulp.
LOCKSTEP_API Tensor log(Tensor x);
LOCKSTEP_API Tensor sqrt(Tensor x);
/// |x|; its derivative at 0 is 0.
LOCKSTEP_API Tensor abs(Tensor x);
LOCKSTEP_API Tensor neg(Tensor x);
LOCKSTEP_API Tensor square(Tensor x);
/// x sigmoid(x). 1 ulp; its derivative 2.5 ulp of the larger of its two terms.
LOCKSTEP_API Tensor silu(Tensor x);
/// log(1 + exp(x)). 2 ulp; its derivative 1.
LOCKSTEP_API Tensor softplus(Tensor x);
/// The error function. 1.5 ulp; its derivative 4.5.
LOCKSTEP_API Tensor erf(Tensor x);
/// exp(-x^2 / 2), the density of the normal distribution times sqrt(2 pi). 1 ulp, its derivative
/// too.
LOCKSTEP_API Tensor gaussian(Tensor x);
/// The distribution function of the normal distribution, torch.special.ndtr. 1.5 ulp; its
/// derivative 2.5.
LOCKSTEP_API Tensor ndtr(Tensor x);
/// x ndtr(x), exact (not the tanh form); Hendrycks and Gimpel, 2016. 1.5 ulp; its derivative 3.5
/// ulp of the larger of its two terms, and 8 times the smallest number beside.
LOCKSTEP_API Tensor gelu(Tensor x);
/// x where it is positive, slope * x elsewhere.
LOCKSTEP_API Tensor leaky_relu(Tensor x, double slope = 0.01);
/// min(max(x, low), high); where low > high, high. Its derivative at low and at high is 1.
LOCKSTEP_API Tensor clamp(Tensor x, Number low, Number high);
/// x to the power of a number, with the special cases of C's pow. 1.5 ulp. An integer tensor takes
/// integer exponents >= 0 (else ValueError), or becomes f32.
LOCKSTEP_API Tensor pow(Tensor x, Number exponent);
/// Whether x is 0; bool.
LOCKSTEP_API Tensor logical_not(Tensor x);
/// In training each element is 0 with probability p, else x / (1 - p), 1.5 ulp; otherwise x itself.
/// The mask depends on the generator's next key and the element's index alone: not on threads,
/// memory order or device, and only the key is saved for backward. p in [0, 1], else ValueError.
/// Srivastava et al., 2014.
LOCKSTEP_API Tensor dropout(Tensor x, double p = 0.5, bool training = true,
                            Generator& generator = default_generator());

// ---- two inputs ----

LOCKSTEP_API Tensor add(const Tensor& a, const Tensor& b);
LOCKSTEP_API Tensor sub(const Tensor& a, const Tensor& b);
LOCKSTEP_API Tensor mul(const Tensor& a, const Tensor& b);
/// True division: integers give f32.
LOCKSTEP_API Tensor div(const Tensor& a, const Tensor& b);
/// The larger element, or NaN if one is; where they are equal each gets half of the gradient.
LOCKSTEP_API Tensor maximum(const Tensor& a, const Tensor& b);
LOCKSTEP_API Tensor minimum(const Tensor& a, const Tensor& b);
/// a + weight (b - a).
LOCKSTEP_API Tensor lerp(const Tensor& a, const Tensor& b, const Tensor& weight);
/// a + value b c.
LOCKSTEP_API Tensor addcmul(const Tensor& a, const Tensor& b, const Tensor& c, Number value = 1);

LOCKSTEP_API Tensor add(Tensor a, Number b);
LOCKSTEP_API Tensor sub(Tensor a, Number b);
LOCKSTEP_API Tensor sub(Number a, Tensor b);
LOCKSTEP_API Tensor mul(Tensor a, Number b);
LOCKSTEP_API Tensor div(Tensor a, Number b);
LOCKSTEP_API Tensor div(Number a, Tensor b);
LOCKSTEP_API Tensor maximum(Tensor a, Number b);
LOCKSTEP_API Tensor minimum(Tensor a, Number b);

// ---- comparisons: bool, without gradient; NaN compares as in IEEE 754. An integer tensor compares
// with a fraction without rounding. ----

LOCKSTEP_API Tensor eq(const Tensor& a, const Tensor& b);
LOCKSTEP_API Tensor ne(const Tensor& a, const Tensor& b);
LOCKSTEP_API Tensor lt(const Tensor& a, const Tensor& b);
LOCKSTEP_API Tensor le(const Tensor& a, const Tensor& b);
LOCKSTEP_API Tensor gt(const Tensor& a, const Tensor& b);
LOCKSTEP_API Tensor ge(const Tensor& a, const Tensor& b);
LOCKSTEP_API Tensor eq(const Tensor& a, Number b);
LOCKSTEP_API Tensor ne(const Tensor& a, Number b);
LOCKSTEP_API Tensor lt(const Tensor& a, Number b);
LOCKSTEP_API Tensor le(const Tensor& a, Number b);
LOCKSTEP_API Tensor gt(const Tensor& a, Number b);
LOCKSTEP_API Tensor ge(const Tensor& a, Number b);

/// a where the bool tensor `condition` holds, b elsewhere.
LOCKSTEP_API Tensor where(const Tensor& condition, const Tensor& a, const Tensor& b);
LOCKSTEP_API Tensor where(const Tensor& condition, const Tensor& a, Number b);
LOCKSTEP_API Tensor where(const Tensor& condition, Number a, const Tensor& b);

// ---- operators ----

inline Tensor operator+(const Tensor& a, const Tensor& b) { return add(a, b); }
inline Tensor operator-(const Tensor& a, const Tensor& b) { return sub(a, b); }
inline Tensor operator*(const Tensor& a, const Tensor& b) { return mul(a, b); }
inline Tensor operator/(const Tensor& a, const Tensor& b) { return div(a, b); }
inline Tensor operator+(Tensor a, Number b) { return add(std::move(a), b); }
inline Tensor operator-(Tensor a, Number b) { return sub(std::move(a), b); }
inline Tensor operator*(Tensor a, Number b) { return mul(std::move(a), b); }
inline Tensor operator/(Tensor a, Number b) { return div(std::move(a), b); }
inline Tensor operator+(Number a, Tensor b) { return add(std::move(b), a); }
inline Tensor operator-(Number a, Tensor b) { return sub(a, std::move(b)); }
inline Tensor operator*(Number a, Tensor b) { return mul(std::move(b), a); }
inline Tensor operator/(Number a, Tensor b) { return div(a, std::move(b)); }
inline Tensor operator-(Tensor a) { return neg(std::move(a)); }

// ---- in place ----
// The result is written to x and recorded as x's new value; the gradients of views of x, and of
// what x is a view of, follow. Errors: AutogradError for a leaf that requires grad or a view of
// one, and later in backward where an op that needs the old value was recorded before; ShapeError
// where the result would be larger than x or x repeats elements (expand); DTypeError where x cannot
// hold the result's kind. Tensor::add_, sub_ and mul_ are methods.

LOCKSTEP_API Tensor& relu_(Tensor& x);
LOCKSTEP_API Tensor& leaky_relu_(Tensor& x, double slope = 0.01);
LOCKSTEP_API Tensor& sigmoid_(Tensor& x);
LOCKSTEP_API Tensor& tanh_(Tensor& x);
LOCKSTEP_API Tensor& exp_(Tensor& x);
LOCKSTEP_API Tensor& sqrt_(Tensor& x);
LOCKSTEP_API Tensor& abs_(Tensor& x);
LOCKSTEP_API Tensor& neg_(Tensor& x);
LOCKSTEP_API Tensor& clamp_(Tensor& x, Number low, Number high);
LOCKSTEP_API Tensor& div_(Tensor& x, const Tensor& other);
LOCKSTEP_API Tensor& div_(Tensor& x, Number number);

namespace kernels {
/// y = x / (1 - p), or 0 with probability p, by the key and the element's row-major index; p in (0, 1]. y
/// has x's shape, and may be x.
LOCKSTEP_API extern Kernel<void(const Tensor& y, const Tensor& x, double p,
                                const Ref<Cell<RandomKey>>& key)>
    dropout;
}  // namespace kernels

}  // namespace lockstep
