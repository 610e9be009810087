// Tensor: an n-dimensional array that records its gradient. A Tensor is a handle: copying it shares
// the data. Tensors are strided, row-major by default; views (slice, transpose, view...) share
// storage.
//
//   Tensor w = randn({3, 4}).requires_grad_();
//   Tensor loss = matmul(x, w).square().mean();
//   loss.backward();                      // fills w.grad()
//
// Ops are free functions in lockstep/tensor/ops/*.h; the common ones are methods here too.
#pragma once

#include <atomic>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <lockstep/tensor/dtype.h>
#include <lockstep/tensor/element_cast.h>
#include <lockstep/tensor/formula.h>
#include <lockstep/tensor/shape.h>
#include <lockstep/tensor/storage.h>

namespace lockstep {

class Node;
class Tensor;
struct Leaf;

/// Dtype and device of a new tensor; `requires_grad` makes it a leaf that accumulates a gradient.
struct TensorOptions {
  DType dtype = DType::f32;
  Device device = {};
  bool requires_grad = false;
};

/// A half-open range of one dimension, as Python's start:stop:step; negative numbers count from the
/// end.
struct Slice {
  int64_t start = 0;
  int64_t stop = std::numeric_limits<int64_t>::max();
  int64_t step = 1;  // at least 1
};

struct BackwardOptions {
  bool retain_graph = false;  // keep saved tensors for another backward
  /// Record the backward itself, for higher derivatives; implies retain_graph.
  bool create_graph = false;
};

/// remove() removes the hook; destroying the handle does not. It keeps neither tensor nor graph
/// alive.
class LOCKSTEP_API HookHandle {
 public:
  HookHandle() = default;
  explicit HookHandle(std::function<void()> remove) : remove_(std::move(remove)) {}
  void remove() {
    if (remove_) std::exchange(remove_, nullptr)();
  }

 private:
  std::function<void()> remove_;
};

/// What Tensor handles point to. `node` is grad_fn in PyTorch: the node of the op that made the
/// tensor, as its output number `output`; its `leaf`; or null if it does not require grad. A frozen tensor has no node and keeps
/// its leaf.
///
/// A view made in grad mode refers to its `base`, the tensor at the root of a chain of views. An
/// in-place op that is recorded on one of them gives the base a new node and increments the base's
/// `graph`; a view whose own `graph` differs is outdated, and Tensor::node() then gives it a new
/// node that reads the base.
struct LOCKSTEP_API TensorBody final : RefCounted {
  Ref<Storage> storage;
  int64_t offset = 0;  // in elements
  Shape shape;
  Strides strides;
  DType dtype = DType::f32;
  bool untracked_view = false;  // made without grad mode: its base is not recorded
  int output = 0;
  std::atomic<uint32_t> graph{0};
  Ref<TensorBody> base;  // null unless a view
  Ref<Node> node;
  Ref<Leaf> leaf;  // holds the gradient; made when the tensor first requires grad

  TensorBody() = default;
  ~TensorBody() override;
};

class LOCKSTEP_API Tensor {
 public:
  Tensor() = default;  // undefined: an absent gradient or bias
  explicit Tensor(Ref<TensorBody> body) : body_(std::move(body)) {}
  Tensor(const Tensor&) = default;
  Tensor(Tensor&&) = default;
  ~Tensor() = default;
  /// `x = y` makes the variable x refer to y's tensor.
  Tensor& operator=(const Tensor&) & = default;
  Tensor& operator=(Tensor&&) & = default;
  /// `x[0] = y` and `x[0] = 1` write into what the expression refers to, as copy_ and fill_ do.
  Tensor& operator=(const Tensor& source) && { return copy_(source); }
  Tensor& operator=(Number value) && { return fill_(value); }

  bool defined() const { return static_cast<bool>(body_); }
  explicit operator bool() const = delete;  // ask defined(), or item<bool>()

  // ---- what it is ----
  const Shape& shape() const { return body().shape; }
  const Strides& strides() const { return body().strides; }
  /// Throws IndexError for a 0-d tensor, which has no sizes.
  int64_t size(int64_t dim) const {
    LOCKSTEP_CHECK(this->dim() > 0, IndexError, "size: dimension ", dim,
                   " of a 0-d tensor, which has none");
    return shape()[wrap_dim("size", dim, this->dim())];
  }
  int dim() const { return body().shape.dims(); }
  int64_t numel() const { return body().shape.numel(); }
  DType dtype() const { return body().dtype; }
  Device device() const { return body().storage->device(); }
  bool is_floating_point() const { return is_floating(dtype()); }
  /// Row-major without gaps.
  bool is_contiguous() const;
  /// [N, C, H, W] stored as [N, H, W, C] without gaps: what convolution returns.
  bool is_channels_last() const;
  bool is_same(const Tensor& other) const { return body_ == other.body_; }

  // ---- its data ----
  /// The first element; T must be the dtype's C++ type. The others follow in row-major order only
  /// if is_contiguous(): convolution returns channels-last tensors.
  template <class T>
  T* data() const {
    LOCKSTEP_CHECK(dtype() == dtype_of<T>(), DTypeError, "data<", dtype_of<T>(),
                   ">: the tensor is ", dtype());
    return static_cast<T*>(storage().data()) + body_->offset;
  }
  void* data_ptr() const {
    return static_cast<char*>(storage().data()) +
           body_->offset * static_cast<int64_t>(size_of(dtype()));
  }
  Storage& storage() const { return *body().storage; }
  /// The value of a tensor of one element, converted to T as to() converts it. Like to_vector() it waits
  /// for the device.
  template <class T>
  T item() const {
    return is_floating_point() ? cast_element<T>(item_as_double()) : cast_element<T>(item_as_int());
  }
  /// All elements in row-major order, converted to T as to() converts them.
  template <class T>
  std::vector<T> to_vector() const {
    std::vector<T> values(static_cast<size_t>(numel()));
    read_into(values);
    return values;
  }
  /// "tensor([[1, 2], [3, 4]], shape [2, 2], f32)"; long dimensions are shortened.
  std::string to_string() const;

  // ---- gradients ----
  bool requires_grad() const;
  /// Makes this tensor a leaf that accumulates a gradient. Floating dtypes only. With false it is
  /// frozen: ops do not record it, and backward, through earlier graphs too, neither changes its
  /// gradient nor calls its hooks, until it requires grad again.
  Tensor& requires_grad_(bool on = true);
  bool is_leaf() const;
  /// The gradient accumulated by backward; undefined before the first, and for tensors that an op
  /// made, unless they retain_grad(). A frozen tensor keeps its own until it is cleared, and as long
  /// as it has one an optimizer steps by it.
  Tensor grad() const;
  /// Assigns the gradient (undefined clears it). Shape and device must be this tensor's, and the dtype
  /// grad_dtype(). The tensor is a leaf, or one with retain_grad().
  void set_grad(const Tensor& grad) const;
  /// Makes grad() of a tensor that an op made hold its gradient too, added up over backwards until
  /// set_grad({}) clears it. After an op in place it is the gradient of the new values. No effect on
  /// leaves. AutogradError: the tensor does not require grad.
  void retain_grad() const;
  bool retains_grad() const;
  /// Makes the gradient of a leaf be of another floating dtype than the leaf: what backward adds to it
  /// is converted first, so that a bf16 weight may add up its gradients in f32. With this tensor's own
  /// dtype, the default, it follows the tensor's again. AutogradError: the tensor is no leaf;
  /// DTypeError: it holds a gradient of another dtype, or its gradient has a place in
  /// DistributedDataParallel's memory, which is of another.
  Tensor& set_grad_dtype(DType dtype);
  /// The dtype that grad() has when there is one.
  DType grad_dtype() const;
  /// Accumulates the derivatives of this tensor (one element, unless `gradient` is given) by the
  /// leaves of its graph.
  void backward(const Tensor& gradient = {}, BackwardOptions options = {}) const;
  /// The same data outside the graph.
  Tensor detach() const;
  /// Calls f with the gradient when it is complete; what f returns, if defined, replaces it.
  HookHandle register_hook(std::function<Tensor(const Tensor&)> f) const;
  /// Leaves only: calls f(tensor) right after its gradient was accumulated.
  HookHandle register_post_accumulate_grad_hook(std::function<void(const Tensor&)> f) const;
  Leaf* leaf() const;  // null unless this is a leaf that requires grad
  /// The node that made the tensor (grad_fn in PyTorch); null if it does not require grad.
  const Ref<Node>& node() const {
    const TensorBody& b = body();
    if (b.base && b.graph.load(std::memory_order_acquire) !=
                      b.base->graph.load(std::memory_order_acquire)) [[unlikely]]
      update_view();
    return b.node;
  }

  // ---- views: no copy (reshape, flatten and contiguous copy only when they must) ----
  Tensor view(const Shape& shape) const;     // one size may be -1
  Tensor reshape(const Shape& shape) const;  // one size may be -1
  Tensor flatten(int64_t start = 0, int64_t end = -1) const;
  Tensor transpose(int64_t a, int64_t b) const;
  Tensor t() const { return transpose(0, 1); }
  Tensor permute(const Shape& order) const;
  Tensor squeeze(int64_t dim) const;
  Tensor unsqueeze(int64_t dim) const;
  Tensor expand(const Shape& shape) const;
  Tensor slice(int64_t dim, Slice range) const;
  Tensor narrow(int64_t dim, int64_t start, int64_t length) const;
  Tensor select(int64_t dim, int64_t index) const;
  Tensor operator[](int64_t index) const { return select(0, index); }
  Tensor contiguous() const;

  // ---- copies ----
  Tensor clone() const;
  Tensor to(DType dtype) const;
  Tensor to(Device device) const;

  // ---- in place: recorded like any op, also for the base and for other views of it. A leaf that
  // requires grad, or a view of one, can be changed only under NoGradGuard. ----
  Tensor& copy_(const Tensor& source);  // broadcasts and converts
  Tensor& fill_(Number value);
  Tensor& zero_() { return fill_(0); }
  Tensor& add_(const Tensor& other, Number alpha = 1);  // this += alpha * other
  Tensor& add_(Number value);
  Tensor& sub_(const Tensor& other) { return add_(other, -1); }
  Tensor& mul_(const Tensor& other);
  Tensor& mul_(Number factor);
  Tensor& operator+=(const Tensor& other) { return add_(other); }
  Tensor& operator-=(const Tensor& other) { return sub_(other); }
  Tensor& operator*=(const Tensor& other) { return mul_(other); }

  // ---- the common ops as methods; documented with the free functions ----
  Tensor sum() const;
  Tensor sum(const Shape& dims, bool keepdim = false) const;
  Tensor mean() const;
  Tensor mean(const Shape& dims, bool keepdim = false) const;
  Tensor max() const;
  Tensor argmax(int64_t dim, bool keepdim = false) const;
  Tensor square() const;
  Tensor matmul(const Tensor& other) const;

  TensorBody& body() const {
    LOCKSTEP_CHECK(body_, Error,
                   "tensor: it is undefined (a default-constructed Tensor, or an absent gradient)");
    return *body_;
  }
  const Ref<TensorBody>& ref() const { return body_; }

 private:
  void update_view() const;
  double item_as_double() const;
  int64_t item_as_int() const;
  template <class T>
  void read_into(std::vector<T>& values) const;

  Ref<TensorBody> body_;
};

inline void append(std::string& text, const Tensor& t) { text += t.to_string(); }
/// Writes to_string(); a template so that this header needs no <ostream>.
template <class Stream>
auto operator<<(Stream& out, const Tensor& t) -> decltype(out << std::string()) {
  return out << t.to_string();
}

namespace detail {
/// t, or a copy of it in the host's memory, for whoever reads its elements; not recorded.
LOCKSTEP_API Tensor on_host(const Tensor& t);
}  // namespace detail

template <class T>
void Tensor::read_into(std::vector<T>& values) const {
  const Tensor dense = detail::on_host(detach()).contiguous();
  dispatch_any(dtype(), [&]<class E>(TypeTag<E>) {
    const E* p = dense.data<E>();
    for (size_t i = 0; i < values.size(); ++i) values[i] = cast_element<T>(p[i]);
  });
}

// ---- creation ----

/// Uninitialised elements.
LOCKSTEP_API Tensor empty(const Shape& shape, TensorOptions options = {});
/// Uninitialised, with the given memory order: strides must be a permutation without gaps, else
/// ShapeError.
LOCKSTEP_API Tensor empty_strided(const Shape& shape, const Strides& strides,
                                  TensorOptions options = {});
/// Uninitialised, in shape, memory order, dtype and device of `like`.
LOCKSTEP_API Tensor empty_like(const Tensor& like);
LOCKSTEP_API Tensor full(const Shape& shape, Number value, TensorOptions options = {});
LOCKSTEP_API Tensor zeros(const Shape& shape, TensorOptions options = {});
LOCKSTEP_API Tensor ones(const Shape& shape, TensorOptions options = {});
LOCKSTEP_API Tensor zeros_like(const Tensor& like);
LOCKSTEP_API Tensor ones_like(const Tensor& like);
/// start, start + step, ... below stop; i64 unless `options` says otherwise.
LOCKSTEP_API Tensor arange(int64_t start, int64_t stop, int64_t step = 1,
                           TensorOptions options = {.dtype = DType::i64});
/// A tensor that uses the caller's memory, which must outlive it. `release`, if given, runs when
/// the last tensor that uses the memory is destroyed; it must not throw.
LOCKSTEP_API Tensor from_blob(void* data, const Shape& shape, TensorOptions options = {},
                              std::function<void()> release = {});
/// A 0-d tensor.
LOCKSTEP_API Tensor scalar(Number value, TensorOptions options = {});

/// A copy of `values`, in row-major order; the dtype is T's unless `options` is given.
template <class T>
Tensor tensor(const std::vector<T>& values, const Shape& shape, TensorOptions options) {
  LOCKSTEP_CHECK(shape.numel() == static_cast<int64_t>(values.size()), ShapeError,
                 "tensor: ", values.size(), " values do not fill shape ", shape);
  Tensor t = empty(shape, {.dtype = options.dtype, .device = {}});
  dispatch_any(options.dtype, [&]<class E>(TypeTag<E>) {
    E* p = t.data<E>();
    for (size_t i = 0; i < values.size(); ++i) p[i] = cast_element<E>(static_cast<T>(values[i]));
  });
  t = t.to(options.device);
  return options.requires_grad ? t.requires_grad_() : t;
}
template <class T>
Tensor tensor(const std::vector<T>& values, const Shape& shape) {
  return tensor(values, shape, {.dtype = dtype_of<T>()});
}
template <class T>
Tensor tensor(const std::vector<T>& values) {
  return tensor(values, Shape{static_cast<int64_t>(values.size())});
}

}  // namespace lockstep
