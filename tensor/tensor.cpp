#include <lockstep/tensor/tensor.h>

#include <algorithm>
#include <atomic>
#include <cmath>

#include <lockstep/tensor/node.h>
#include <lockstep/tensor/ops/copy.h>

namespace lockstep {

TensorBody::~TensorBody() {
  if (leaf) leaf->owner_is_destroyed();
}

// ---- what it is ----

bool Tensor::is_contiguous() const {
  const TensorBody& b = body();
  int64_t expected = 1;
  for (int i = b.shape.dims() - 1; i >= 0; --i) {
    if (b.shape[i] == 0) return true;
    if (b.shape[i] != 1 && b.strides[i] != expected) return false;
    expected *= b.shape[i];
  }
  return true;
}

bool Tensor::is_channels_last() const {
  const TensorBody& b = body();
  if (b.shape.dims() != 4 || b.shape.numel() == 0) return false;
  int64_t expected = 1;
  for (int i : {1, 3, 2, 0}) {
    if (b.shape[i] != 1 && b.strides[i] != expected) return false;
    expected *= b.shape[i];
  }
  return true;
}

// ---- its data ----

namespace {
template <class R>
R only_element(const Tensor& any) {
  LOCKSTEP_CHECK(any.numel() == 1, ShapeError, "item: the tensor has shape ", any.shape(),
                 ", not one element");
  const Tensor t = detail::on_host(any);
  return dispatch_any(t.dtype(), [&]<class T>(TypeTag<T>) { return static_cast<R>(*t.data<T>()); });
}
}  // namespace

double Tensor::item_as_double() const { return only_element<double>(*this); }
int64_t Tensor::item_as_int() const { return only_element<int64_t>(*this); }

// ---- gradients ----

bool Tensor::requires_grad() const { return static_cast<bool>(node()); }
bool Tensor::is_leaf() const { return !node() || leaf(); }
Leaf* Tensor::leaf() const { return node() ? node()->as_leaf() : nullptr; }

Tensor& Tensor::requires_grad_(bool on) {
  TensorBody& b = body();
  LOCKSTEP_CHECK(is_leaf(), AutogradError,
                 "requires_grad_: only a leaf can change; this tensor was made by ", node()->name(),
                 "; use detach()");
  LOCKSTEP_CHECK(!on || is_floating(b.dtype), DTypeError,
                 "requires_grad_: only floating tensors have gradients, this one is ", b.dtype);
  if (on == requires_grad()) return *this;
  if (!b.leaf) b.leaf = make_ref<Leaf>(&b);
  b.leaf->frozen = !on;
  b.leaf->retains = false;
  b.base = nullptr;  // a leaf is the root of its own graph
  b.node = on ? b.leaf : nullptr;
  b.output = 0;
  return *this;
}

Tensor Tensor::grad() const {
  const Ref<Leaf>& l = body().leaf;
  return l ? l->gradient : Tensor();
}

void Tensor::set_grad(const Tensor& grad) const {
  const Ref<Leaf>& l = body().leaf;
  LOCKSTEP_CHECK((is_leaf() || retains_grad()) && is_floating_point(), AutogradError,
                 "set_grad: only a floating leaf holds a gradient; this tensor is ",
                 is_leaf() ? str_cat(dtype())
                           : str_cat("made by ", node()->name(), "; call retain_grad() before"));
  if (grad.defined()) {
    LOCKSTEP_CHECK(!grad.is_same(*this) && grad.body().base != ref(), AutogradError,
                   "set_grad: a tensor cannot be its own gradient, nor can a view of it; detach() it");
    LOCKSTEP_CHECK(grad.shape() == shape(), ShapeError, "set_grad: the gradient has shape ",
                   grad.shape(), ", the tensor ", shape());
    LOCKSTEP_CHECK(grad.dtype() == grad_dtype(), DTypeError, "set_grad: the gradient is ",
                   grad.dtype(), ", the tensor ", dtype(),
                   grad_dtype() == dtype() ? std::string()
                                           : str_cat(" with gradients in ", grad_dtype()));
    LOCKSTEP_CHECK(grad.device() == device(), DeviceError, "set_grad: the gradient is on ",
                   grad.device(), ", the tensor on ", device());
  }
  if (!l) {  // like a frozen parameter: it holds a gradient, and no backward adds to it
    body().leaf = make_ref<Leaf>(&body());
    l->frozen = true;
  }
  // `p.set_grad(p.grad().mul_(2))` scales what is there.
  if (!grad.is_same(l->gradient)) l->accumulated = false;
  l->gradient = grad;
}

Tensor& Tensor::set_grad_dtype(DType dtype) {
  TensorBody& b = body();
  LOCKSTEP_CHECK(is_leaf() && is_floating_point(), AutogradError,
                 "set_grad_dtype: only a floating leaf holds a gradient; this tensor is ",
                 is_leaf() ? str_cat(b.dtype) : str_cat("made by ", node()->name()));
  LOCKSTEP_CHECK(is_floating(dtype), DTypeError, "set_grad_dtype: gradients are floating, not ",
                 dtype);
  if (!b.leaf) {
    b.leaf = make_ref<Leaf>(&b);
    b.leaf->frozen = true;
  }
  for (const Tensor* there : {&b.leaf->gradient, &b.leaf->slot})
    LOCKSTEP_CHECK(!there->defined() || there->dtype() == dtype, DTypeError,
                   "set_grad_dtype: the gradient is to be ", dtype,
                   there == &b.leaf->gradient ? ", and the one that is there is "
                                              : ", and its place in DistributedDataParallel's "
                                                "memory is ",
                   there->dtype(),
                   there == &b.leaf->gradient ? "; clear it first" : "; set it before wrapping");
  b.leaf->grad_dtype = dtype == b.dtype ? std::nullopt : std::optional(dtype);
  return *this;
}

DType Tensor::grad_dtype() const {
  const Ref<Leaf>& l = body().leaf;
  return l ? l->gradient_dtype() : dtype();
}

void Tensor::retain_grad() const {
  LOCKSTEP_CHECK(node(), AutogradError, "retain_grad: the tensor does not require grad");
  if (is_leaf() || retains_grad()) return;
  TensorBody& b = body();
  if (!b.leaf) b.leaf = make_ref<Leaf>(&b);
  b.leaf->retains = true;
  b.node->output(b.output).make_hooks().retained.push_back(b.leaf);
}

bool Tensor::retains_grad() const {
  const Ref<Leaf>& l = body().leaf;
  return l && l->retains;
}

Tensor Tensor::detach() const {
  const TensorBody& b = body();
  auto copy = make_ref<TensorBody>();
  copy->storage = b.storage;
  copy->offset = b.offset;
  copy->shape = b.shape;
  copy->strides = b.strides;
  copy->dtype = b.dtype;
  return Tensor(std::move(copy));
}

namespace {
uint64_t next_hook_id() {
  static std::atomic<uint64_t> id{0};
  return ++id;
}
}  // namespace

namespace {
template <class Hooks>
HookHandle handle(const std::shared_ptr<Hooks>& hooks, uint64_t id) {
  return HookHandle([weak = std::weak_ptr(hooks), id] {
    if (const auto alive = weak.lock())
      std::erase_if(*alive, [&](auto& h) { return h.first == id; });
  });
}
}  // namespace

HookHandle Tensor::register_hook(std::function<Tensor(const Tensor&)> f) const {
  const Ref<Node>& n = node();
  LOCKSTEP_CHECK(n, AutogradError, "register_hook: the tensor does not require grad");
  Node::Output& output = n->output(body().output);
  const uint64_t id = next_hook_id();
  auto& list = output.make_hooks().list;
  list.emplace_back(id, std::move(f));
  return handle(std::shared_ptr<std::decay_t<decltype(list)>>(output.hooks, &list), id);
}

HookHandle Tensor::register_post_accumulate_grad_hook(std::function<void(const Tensor&)> f) const {
  Leaf* l = leaf();
  LOCKSTEP_CHECK(l, AutogradError,
                 "register_post_accumulate_grad_hook: the tensor is not a leaf that requires grad");
  const uint64_t id = next_hook_id();
  l->post_hooks->emplace_back(id, std::move(f));
  return handle(l->post_hooks, id);
}

// ---- creation ----

namespace {
Tensor empty_with(const Shape& shape, const Strides& strides, int64_t numel,
                  TensorOptions options) {
  size_t bytes;
  LOCKSTEP_CHECK(
      !__builtin_mul_overflow(static_cast<size_t>(numel), size_of(options.dtype), &bytes),
      OutOfMemory, "empty: shape ", shape, " of ", options.dtype,
      " has more bytes than 64 bits can count");
  auto body = make_ref<TensorBody>();
  body->storage = Storage::allocate(bytes, options.device);
  body->shape = shape;
  body->strides = strides;
  body->dtype = options.dtype;
  Tensor t(std::move(body));
  if (options.requires_grad) t.requires_grad_();
  return t;
}
}  // namespace

Tensor empty_strided(const Shape& shape, const Strides& strides, TensorOptions options) {
  const int64_t numel = checked_numel("empty_strided", shape);
  bool forward = strides.dims() == shape.dims();
  __int128 last = 0;  // the place of the last element
  for (int d = 0; forward && d < shape.dims(); ++d) {
    if (shape[d] <= 1) continue;
    forward = strides[d] > 0;
    last += static_cast<__int128>(shape[d] - 1) * strides[d];
  }
  LOCKSTEP_CHECK(numel == 0 || (forward && last == numel - 1), ShapeError,
                 "empty_strided: strides ", strides, " do not place the elements of shape ", shape,
                 " one after the other, without gaps, in some order of the dimensions");
  return empty_with(shape, strides, numel, options);
}
Tensor empty(const Shape& shape, TensorOptions options) {
  const int64_t numel = checked_numel("empty", shape);
  return empty_with(shape, contiguous_strides(shape), numel, options);
}
Tensor empty_like(const Tensor& like) {
  const TensorOptions options{.dtype = like.dtype(), .device = like.device()};
  return like.is_channels_last() ? empty_strided(like.shape(), like.strides(), options)
                                 : empty(like.shape(), options);
}
Tensor full(const Shape& shape, Number value, TensorOptions options) {
  Tensor t = empty(shape, {.dtype = options.dtype, .device = options.device});
  t.fill_(value);
  return options.requires_grad ? t.requires_grad_() : t;
}
Tensor zeros(const Shape& shape, TensorOptions options) { return full(shape, 0, options); }
Tensor ones(const Shape& shape, TensorOptions options) { return full(shape, 1, options); }
Tensor zeros_like(const Tensor& like) { return empty_like(like).zero_(); }
Tensor ones_like(const Tensor& like) { return empty_like(like).fill_(1); }
Tensor scalar(Number value, TensorOptions options) { return full({}, value, options); }

Tensor arange(int64_t start, int64_t stop, int64_t step, TensorOptions options) {
  LOCKSTEP_CHECK(step != 0, ValueError, "arange: step is 0");
  const __int128 span = static_cast<__int128>(stop) - start + step - (step > 0 ? 1 : -1);
  const __int128 count = std::max<__int128>(0, span / step);
  LOCKSTEP_CHECK(count <= std::numeric_limits<int64_t>::max(), ShapeError, "arange: from ", start,
                 " to ", stop, " there are more elements than 64 bits can count");
  const auto n = static_cast<int64_t>(count);
  Tensor t = empty({n}, {.dtype = options.dtype, .device = options.device});
  kernels::arange(t, start, step);
  return options.requires_grad ? t.requires_grad_() : t;
}

Tensor from_blob(void* data, const Shape& shape, TensorOptions options,
                 std::function<void()> release) {
  const int64_t numel = checked_numel("from_blob", shape);
  int64_t bytes;
  LOCKSTEP_CHECK(
      !__builtin_mul_overflow(numel, static_cast<int64_t>(size_of(options.dtype)), &bytes),
      ShapeError, "from_blob: shape ", shape, " of ", options.dtype,
      " has more bytes than 64 bits can count");
  LOCKSTEP_CHECK(data || numel == 0, ValueError, "from_blob: null data for shape ", shape);
  LOCKSTEP_CHECK(!options.requires_grad || is_floating(options.dtype), DTypeError,
                 "from_blob: only floating tensors can require grad, not ", options.dtype);
  auto body = make_ref<TensorBody>();
  body->storage =
      make_ref<Storage>(data, static_cast<size_t>(bytes), options.device, std::move(release));
  body->shape = shape;
  body->strides = contiguous_strides(shape);
  body->dtype = options.dtype;
  Tensor t(std::move(body));
  return options.requires_grad ? t.requires_grad_() : t;
}

// ---- printing ----

namespace {

void print_dim(std::string& text, const Tensor& t, int64_t edge) {
  if (t.dim() == 0) {
    if (t.dtype() == DType::boolean)
      append(text, t.item<bool>());
    else if (is_floating(t.dtype())) {
      const double value = t.item<double>();
      char buffer[32];  // to_chars: snprintf would write the locale's decimal point
      text.append(buffer, std::to_chars(buffer, buffer + sizeof buffer,
                                        std::isnan(value) ? std::abs(value) : value,  // no "-nan"
                                        std::chars_format::general, 5)
                              .ptr);
    } else
      append(text, t.item<int64_t>());
    return;
  }
  text += '[';
  const int64_t n = t.size(0);
  for (int64_t i = 0; i < n; ++i) {
    if (i) text += ", ";
    if (n > 2 * edge && i == edge) {
      text += "..., ";
      i = n - edge;
    }
    print_dim(text, t[i], edge);
  }
  text += ']';
}

}  // namespace

std::string Tensor::to_string() const {
  if (!defined()) return "tensor(undefined)";
  std::string text = "tensor(";
  const bool is_long = numel() > 200 || numel() == 0;  // an empty one may have many empty rows
  print_dim(text, detail::on_host(detach()), is_long ? 3 : std::numeric_limits<int32_t>::max());
  text += ", ";
  text += str_cat("shape ", shape(), ", ", dtype());
  if (!device().is_cpu()) text += str_cat(", ", device());
  if (requires_grad())
    text += is_leaf() ? std::string(", requires_grad") : str_cat(", grad_fn ", node()->name());
  return text + ")";
}

}  // namespace lockstep
