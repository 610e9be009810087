// In-place ops in the graph. An in-place op on x becomes a node whose first input is x before the
// op. If x is a view, its base gets a node that is the previous base with the view's elements
// replaced, and every other view of the base is outdated: node() then gives it a new node that
// reads its elements from the base. This is PyTorch's CopySlices, made of ordinary nodes.
#include <mutex>

#include <lockstep/tensor/op.h>
#include <lockstep/tensor/ops/copy.h>
#include <lockstep/tensor/ops/reduce.h>

namespace lockstep {
namespace {

bool repeats_elements(const Shape& shape, const Strides& strides) {
  for (int d = 0; d < shape.dims(); ++d)
    if (strides[d] == 0 && shape[d] > 1) return true;
  return false;
}

/// Where the elements of a view lie among those of its base.
struct ViewInBase {
  Shape base_shape;
  Strides base_strides;
  Shape shape;
  Strides strides;
  int64_t offset;  // from the base's first element

  ViewInBase(const TensorBody& base, const TensorBody& view)
      : base_shape(base.shape),
        base_strides(base.strides),
        shape(view.shape),
        strides(view.strides),
        offset(view.offset - base.offset) {}

  /// New memory in the base's shape and strides, like t in the rest.
  Tensor empty_base(const Tensor& t) const {
    int64_t last = 0;
    for (int d = 0; d < base_shape.dims(); ++d) last += (base_shape[d] - 1) * base_strides[d];
    Tensor y =
        empty({base_shape.numel() ? last + 1 : 0}, {.dtype = t.dtype(), .device = t.device()});
    y.body().shape = base_shape;
    y.body().strides = base_strides;
    return y;
  }
  /// The view's elements of t, which has the base's shape and strides: shares its storage.
  Tensor view_of(const Tensor& t) const {
    Tensor y = t.detach();
    TensorBody& b = y.body();
    b.offset += offset;
    b.shape = shape;
    b.strides = strides;
    b.untracked_view = true;
    return y;
  }
};

// Three linear maps between tensors of the base's shape and of the view's shape; each one's
// derivative is another one, or itself.

/// The view's elements of a tensor of the base's shape.
struct TakeView {
  static constexpr const char* name = "take_view";
  static constexpr unsigned saves = 0;
  ViewInBase at;
  Tensor forward(const Tensor& x) const {
    if (x.strides() == at.base_strides) return at.view_of(x);
    const Tensor dense = at.empty_base(x);
    kernels::copy(dense, x);
    return at.view_of(dense);
  }
  void backward(const Saved&, const Tensor& dy, InputGradients& dx) const;
};

/// A tensor of the base's shape that is x at the view's elements and zero elsewhere.
struct PutView {
  static constexpr const char* name = "put_view";
  static constexpr unsigned saves = 0;
  ViewInBase at;
  Tensor forward(const Tensor& x) const {
    Tensor y = at.empty_base(x);
    kernels::fill(y, 0);
    if (!repeats_elements(at.shape, at.strides)) {
      kernels::copy(at.view_of(y), x);
      return y;
    }
    // An expanded view: what is repeated adds up.
    Shape once = at.shape;
    for (int d = 0; d < once.dims(); ++d)
      if (at.strides[d] == 0) once[d] = std::min<int64_t>(once[d], 1);
    Tensor view = at.view_of(y);
    view.body().shape = once;
    kernels::copy(view, sum_to(x, once));
    return y;
  }
  void backward(const Saved&, const Tensor& dy, InputGradients& dx) const {
    dx.set(0, apply(TakeView{at}, dy));
  }
};
void TakeView::backward(const Saved&, const Tensor& dy, InputGradients& dx) const {
  dx.set(0, apply(PutView{at}, dy));
}

/// x, of the base's shape, with zeros at the view's elements.
struct EraseView {
  static constexpr const char* name = "erase_view";
  static constexpr unsigned saves = 0;
  ViewInBase at;
  Tensor forward(const Tensor& x) const {
    Tensor y = at.empty_base(x);
    kernels::copy(y, x);
    kernels::fill(at.view_of(y), 0);
    return y;
  }
  void backward(const Saved&, const Tensor& dy, InputGradients& dx) const {
    dx.set(0, apply(EraseView{at}, dy));
  }
};

/// The base (input 0) with the view's elements replaced by those of input 1.
struct ReplaceView {
  static constexpr const char* name = "replace_view";
  static constexpr unsigned saves = 0;
  ViewInBase at;
  void backward(const Saved&, const Tensor& dy, InputGradients& dx) const {
    if (dx.needed(0)) dx.set(0, apply(EraseView{at}, dy));
    if (dx.needed(1)) dx.set(1, apply(TakeView{at}, dy));
  }
};

/// An outdated view, read from its base again.
struct ReadView {
  static constexpr const char* name = "read_view";
  static constexpr unsigned saves = 0;
  ViewInBase at;
  void backward(const Saved&, const Tensor& dy, InputGradients& dx) const {
    dx.set(0, apply(PutView{at}, dy));
  }
};

/// The node of an op whose result is in y already.
template <class Op, class... Inputs>
Ref<Node> node_of(Op op, const Tensor& y, const Inputs&... inputs) {
  const std::array<const Tensor*, sizeof...(Inputs)> all{&inputs...};
  Saver saver(Op::name, false);
  return make_ref<OpNode<Op, sizeof...(Inputs), 1>>(
      std::move(op), detail::ListSpan<const Tensor* const, sizeof...(Inputs)>(all),
      detail::ListSpan<const Tensor, 1>(&y, 1), saver);
}

/// Gives x a new place in the graph. Its tensor hooks stay with the old values, and a gradient that it
/// retains is that of the new ones.
void move_to(const Tensor& x, Ref<Node> node) {
  const Edge old{x.body().node, x.body().output};
  detail::attach(x, {std::move(node)});
  if (!x.retains_grad()) return;
  const Ref<Leaf>& leaf = x.body().leaf;
  if (old) std::erase(old.node->output(old.output).make_hooks().retained, leaf);
  if (x.body().node) x.body().node->output().make_hooks().retained.push_back(leaf);
}

}  // namespace

void Tensor::update_view() const {
  static std::mutex mutex;  // of threads that read one outdated view
  const std::lock_guard lock(mutex);
  TensorBody& b = body();
  const uint32_t graph = b.base->graph.load(std::memory_order_acquire);
  if (b.graph.load(std::memory_order_relaxed) == graph) return;
  const Tensor base(b.base);
  Ref<Node> read;
  if (base.node()) read = node_of(ReadView{{*b.base, b}}, *this, base);
  move_to(*this, std::move(read));
  b.graph.store(graph, std::memory_order_release);
}

namespace detail {

void check_in_place(const char* op, const Tensor& x, bool records) {
  if (x.storage().is_read_only()) {
    const std::string_view name = op;
    x.storage().check_writable(name.ends_with('_') ? std::string(name) : str_cat(name, '_'));
  }
  LOCKSTEP_CHECK(!repeats_elements(x.shape(), x.strides()), ShapeError, op,
                 ": in-place change of a tensor that repeats its elements in memory (shape ",
                 x.shape(), ", strides ", x.strides(), "); clone() it first");
  if (!records) return;
  LOCKSTEP_CHECK(!x.leaf(), AutogradError, op,
                 ": in-place change of a leaf that requires grad; use the out-of-place form, or "
                 "NoGradGuard");
  const TensorBody& root = x.body().base ? *x.body().base : x.body();
  LOCKSTEP_CHECK(!root.node || !root.node->as_leaf(), AutogradError, op,
                 ": in-place change of a view of a leaf that requires grad; use NoGradGuard, or "
                 "change a clone() of the leaf");
  LOCKSTEP_CHECK(
      !root.untracked_view, AutogradError, op,
      ": in-place change of a view that was made under NoGradGuard, so that its base is not "
      "recorded; make the view in grad mode, or clone() it");
  LOCKSTEP_CHECK(
      !x.body().base || !repeats_elements(root.shape, root.strides), AutogradError, op,
      ": in-place change of a view of a tensor that repeats its elements in memory (shape ",
      root.shape, ", strides ", root.strides, "); clone() it first");
}

void attach_in_place(const Tensor& x, Ref<Node> node) {
  TensorBody& b = x.body();
  if (!b.base) {
    move_to(x, std::move(node));
    b.graph.fetch_add(1, std::memory_order_acq_rel);
    return;
  }
  const Tensor base(b.base);
  move_to(x, std::move(node));
  move_to(base, node_of(ReplaceView{{*b.base, b}}, base, base, x));
  const uint32_t graph = b.base->graph.fetch_add(1, std::memory_order_acq_rel) + 1;
  // A retained gradient of the base has what comes through x from now on, too: x reads from the base,
  // as the other views do. Otherwise x keeps the shorter way.
  if (base.retains_grad() || x.retains_grad())
    x.node();
  else
    b.graph.store(graph, std::memory_order_release);
}

}  // namespace detail

// ---- copy_ and fill_ ----

namespace {

struct Copy {
  static constexpr const char* name = "copy_";
  static constexpr unsigned saves = 0;
  Shape source_shape = {};
  DType source_dtype = DType::f32;
  Tensor forward(const Tensor& x, const Tensor& source) {
    source_shape = source.shape();
    source_dtype = source.dtype();
    if (x.data_ptr() != source.data_ptr()) kernels::copy(x, source);  // else it is x itself
    return x;
  }
  void backward(const Saved&, const Tensor& dy, InputGradients& dx) const {
    if (dx.needed(0)) dx.set(0, zeros_like(dy));
    if (dx.needed(1)) dx.set(1, sum_to(dy, source_shape).to(source_dtype));
  }
};

struct Fill {
  static constexpr const char* name = "fill_";
  static constexpr unsigned saves = 0;
  Number value;
  Tensor forward(const Tensor& x) const {
    kernels::fill(x, value);
    return x;
  }
  void backward(const Saved&, const Tensor& dy, InputGradients& dx) const {
    dx.set(0, zeros_like(dy));
  }
};

}  // namespace

Tensor& Tensor::copy_(const Tensor& source) {
  LOCKSTEP_CHECK(broadcast_shapes("copy_", shape(), source.shape()) == shape(), ShapeError,
                 "copy_: a source of shape ", source.shape(), " does not broadcast to ", shape());
  if (source.device() != device()) return copy_(source.to(device()));
  const bool common = detail::overlaps(*this, source);
  apply_in_place(Copy{}, *this, *this, common ? source.clone() : source);
  return *this;
}

Tensor& Tensor::fill_(Number value) {
  apply_in_place(Fill{value}, *this, *this);
  return *this;
}

}  // namespace lockstep
