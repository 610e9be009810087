#include <lockstep/tensor/tensor.h>

#include <algorithm>
#include <atomic>

#include <lockstep/tensor/node.h>
#include <lockstep/tensor/ops/copy.h>

namespace lockstep {

TensorBody::~TensorBody() {
  if (is_view && storage) storage->count_view(-1);
  if (leaf) leaf->owner = nullptr;
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
R only_element(const Tensor& t) {
  LOCKSTEP_CHECK(t.numel() == 1, ShapeError, "item: the tensor has shape ", t.shape(),
                 ", not one element");
  return dispatch_any(t.dtype(), [&]<class T>(TypeTag<T>) { return static_cast<R>(*t.data<T>()); });
}
}  // namespace

double Tensor::item_as_double() const { return only_element<double>(*this); }
int64_t Tensor::item_as_int() const { return only_element<int64_t>(*this); }

// ---- gradients ----

bool Tensor::requires_grad() const { return static_cast<bool>(body().node); }
bool Tensor::is_leaf() const { return !body().node || leaf(); }
Leaf* Tensor::leaf() const { return body().node ? body().node->as_leaf() : nullptr; }

Tensor& Tensor::requires_grad_(bool on) {
  TensorBody& b = body();
  LOCKSTEP_CHECK(is_leaf(), AutogradError,
                 "requires_grad_: only a leaf can change; this tensor was made by ", b.node->name(),
                 "; use detach()");
  LOCKSTEP_CHECK(!on || is_floating(b.dtype), DTypeError,
                 "requires_grad_: only floating tensors have gradients, this one is ", b.dtype);
  if (on == requires_grad()) return *this;
  if (!b.leaf) b.leaf = make_ref<Leaf>(&b);
  b.leaf->frozen = !on;
  b.node = on ? b.leaf : nullptr;
  return *this;
}

Tensor Tensor::grad() const {
  const Ref<Leaf>& l = body().leaf;
  return l ? l->gradient : Tensor();
}

void Tensor::set_grad(const Tensor& grad) const {
  const Ref<Leaf>& l = body().leaf;
  LOCKSTEP_CHECK(l, AutogradError, "set_grad: the tensor is not a leaf that requires grad");
  if (grad.defined()) {
    LOCKSTEP_CHECK(grad.shape() == shape(), ShapeError, "set_grad: the gradient has shape ",
                   grad.shape(), ", the tensor ", shape());
    LOCKSTEP_CHECK(grad.dtype() == dtype(), DTypeError, "set_grad: the gradient is ", grad.dtype(),
                   ", the tensor ", dtype());
    LOCKSTEP_CHECK(grad.device() == device(), DeviceError, "set_grad: the gradient is on ",
                   grad.device(), ", the tensor on ", device());
  }
  // `p.set_grad(p.grad().mul_(2))` scales what is there.
  if (!grad.is_same(l->gradient)) l->accumulated = false;
  l->gradient = grad;
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

HookHandle Tensor::register_hook(std::function<Tensor(const Tensor&)> f) const {
  Ref<Node> node = body().node;
  LOCKSTEP_CHECK(node, AutogradError, "register_hook: the tensor does not require grad");
  if (!node->hooks) node->hooks = std::make_unique<std::vector<std::pair<uint64_t, Node::Hook>>>();
  const uint64_t id = next_hook_id();
  node->hooks->emplace_back(id, std::move(f));
  return HookHandle(
      [node, id] { std::erase_if(*node->hooks, [&](auto& h) { return h.first == id; }); });
}

HookHandle Tensor::register_post_accumulate_grad_hook(std::function<void(const Tensor&)> f) const {
  Leaf* l = leaf();
  LOCKSTEP_CHECK(l, AutogradError,
                 "register_post_accumulate_grad_hook: the tensor is not a leaf that requires grad");
  const uint64_t id = next_hook_id();
  l->post_hooks.emplace_back(id, std::move(f));
  return HookHandle([kept = Ref<Leaf>(l), id] {
    std::erase_if(kept->post_hooks, [&](auto& h) { return h.first == id; });
  });
}

// ---- creation ----

Tensor empty_strided(const Shape& shape, const Strides& strides, TensorOptions options) {
  auto bytes = static_cast<int64_t>(size_of(options.dtype));
  for (int64_t d : shape) {
    LOCKSTEP_CHECK(d >= 0, ShapeError, "empty: negative size in shape ", shape);
    LOCKSTEP_CHECK(!__builtin_mul_overflow(bytes, d, &bytes), OutOfMemory, "empty: shape ", shape,
                   " of ", options.dtype, " has more bytes than 64 bits can count");
  }
  auto body = make_ref<TensorBody>();
  body->storage = Storage::allocate(static_cast<size_t>(bytes), options.device);
  body->shape = shape;
  body->strides = strides;
  body->dtype = options.dtype;
  Tensor t(std::move(body));
  return options.requires_grad ? t.requires_grad_() : t;
}
Tensor empty(const Shape& shape, TensorOptions options) {
  return empty_strided(shape, contiguous_strides(shape), options);
}
Tensor empty_like(const Tensor& like) {
  const TensorOptions options{.dtype = like.dtype(), .device = like.device()};
  return like.is_channels_last() ? empty_strided(like.shape(), like.strides(), options)
                                 : empty(like.shape(), options);
}
Tensor full(const Shape& shape, double value, TensorOptions options) {
  Tensor t = empty(shape, {.dtype = options.dtype, .device = options.device});
  t.fill_(value);
  return options.requires_grad ? t.requires_grad_() : t;
}
Tensor zeros(const Shape& shape, TensorOptions options) { return full(shape, 0, options); }
Tensor ones(const Shape& shape, TensorOptions options) { return full(shape, 1, options); }
Tensor zeros_like(const Tensor& like) { return empty_like(like).zero_(); }
Tensor ones_like(const Tensor& like) { return empty_like(like).fill_(1); }
Tensor scalar(double value, TensorOptions options) { return full({}, value, options); }

Tensor arange(int64_t start, int64_t stop, int64_t step, TensorOptions options) {
  LOCKSTEP_CHECK(step != 0, ValueError, "arange: step is 0");
  const int64_t n = std::max<int64_t>(0, (stop - start + step - (step > 0 ? 1 : -1)) / step);
  Tensor t = empty({n}, {.dtype = options.dtype});
  dispatch_any(options.dtype, [&]<class T>(TypeTag<T>) {
    for (int64_t i = 0; i < n; ++i) t.data<T>()[i] = static_cast<T>(start + i * step);
  });
  t = t.to(options.device);
  return options.requires_grad ? t.requires_grad_() : t;
}

Tensor from_blob(void* data, const Shape& shape, TensorOptions options,
                 std::function<void()> release) {
  LOCKSTEP_CHECK(data || shape.numel() == 0, ValueError, "from_blob: null data for shape ", shape);
  auto body = make_ref<TensorBody>();
  body->storage =
      make_ref<Storage>(data, static_cast<size_t>(shape.numel()) * size_of(options.dtype),
                        options.device, std::move(release));
  body->shape = shape;
  body->strides = contiguous_strides(shape);
  body->dtype = options.dtype;
  Tensor t(std::move(body));
  return options.requires_grad ? t.requires_grad_() : t;
}

// ---- in place ----

Tensor& Tensor::fill_(double value) {
  LOCKSTEP_CHECK(!(is_grad_enabled() && requires_grad()), AutogradError,
                 "fill_: in-place change of a tensor that requires grad; use NoGradGuard");
  detail::fill_kernel(*this, value);
  storage().bump_version();
  return *this;
}

// ---- printing ----

namespace {

void print_dim(std::string& text, const Tensor& t, int64_t edge) {
  if (t.dim() == 0) {
    if (t.dtype() == DType::boolean)
      append(text, t.item<bool>());
    else if (is_floating(t.dtype())) {
      char buffer[32];  // to_chars: snprintf would write the locale's decimal point
      text.append(buffer, std::to_chars(buffer, buffer + sizeof buffer, t.item<double>(),
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
  if (device().is_cpu()) {
    print_dim(text, detach(), numel() > 200 ? 3 : std::numeric_limits<int32_t>::max());
    text += ", ";
  }
  text += str_cat("shape ", shape(), ", ", dtype());
  if (!device().is_cpu()) text += str_cat(", ", device());
  if (requires_grad())
    text += is_leaf() ? std::string(", requires_grad") : str_cat(", grad_fn ", node()->name());
  return text + ")";
}

}  // namespace lockstep
