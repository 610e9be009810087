#include <lockstep/nn/module.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include <lockstep/nn/entries.h>
#include <lockstep/nn/registry.h>
#include <lockstep/tensor/node.h>

namespace lockstep::nn {

// ---- construction ----

Module::Module() { detail::part_appears(this, detail::Part::module); }
Module::Module(Module&& other) noexcept
    : training_(other.training_),
      moved_from_(std::exchange(other.moved_from_, true)),
      belongs_(other.external_.load(std::memory_order_relaxed)),
      external_(other.external_.load(std::memory_order_relaxed)) {
  detail::module_moves(this, &other);
}
Module& Module::operator=(Module&& other) noexcept {
  training_ = other.training_;
  if (this != &other) moved_from_ = std::exchange(other.moved_from_, true);
  return *this;
}
Module::~Module() { detail::part_disappears(this); }

// ---- traversal ----

namespace detail {

std::string next_field_name(std::string_view& names) {
  const size_t comma = std::min(names.find(','), names.size());
  std::string name(names.substr(0, comma));
  names.remove_prefix(std::min(comma + 1, names.size()));
  std::erase(name, ' ');
  return name;
}

namespace {

struct Collector final : FieldVisitor {
  Entries found;
  void parameter(const std::string& name, Parameter& p) override {
    found.parameters.emplace_back(name, &p);
  }
  void buffer(const std::string& name, Buffer& b) override { found.buffers.emplace_back(name, &b); }
  void module(const std::string& name, Module& m) override { found.modules.emplace_back(name, &m); }
  void reference(const void* part, Module* m) override { found.references.emplace_back(part, m); }
  void list(const PositionalModules& list) override { found.lists.push_back(&list); }
  void field(const std::string& name, const void* at, size_t size, size_t alignment) override {
    found.fields.push_back({name, reinterpret_cast<uintptr_t>(at), size, alignment});
  }
};

/// Calls f(path, module, its entries) for the module and all below it, parents first.
template <class F>
void traverse(const Module& module, const std::string& path, const F& f) {
  const Entries entries = entries_of(module);
  f(path, const_cast<Module&>(module), entries);
  for (auto& [name, child] : entries.modules)
    traverse(*child, path.empty() ? name : path + "." + name, f);
}

}  // namespace

Entries entries_of(const Module& module) {
  check_class(module);
  Collector collector;
  const_cast<Module&>(module).visit(collector);  // a visit changes nothing
  return std::move(collector.found);
}

void for_each_module(const Module& module, const ModuleFunction& f, bool always) {
  const auto now = static_cast<uint32_t>(parts_constructed());
  if (always || module.checked_at_.load(std::memory_order_relaxed) != now) {
    std::vector<Unnamed> pointed;
    traverse(module, "", [&](const std::string&, Module& m, const Entries& entries) {
      for (auto& [name, child] : entries.modules) permit_calls(*child);
      for (auto& [part, other] : entries.references)
        if (other) permit_calls(*other);
      check_fields(m, entries, pointed);
    });
    check_still_unnamed(pointed);
    module.checked_at_.store(now, std::memory_order_relaxed);
  }
  if (f) traverse(module, "", f);
}

bool same_elements(const Tensor& a, const Tensor& b) {
  if (a.is_same(b)) return true;
  const bool same = a.numel() ? a.data_ptr() == b.data_ptr() : &a.storage() == &b.storage();
  return same && a.shape() == b.shape() && a.strides() == b.strides() && a.dtype() == b.dtype();
}
std::vector<size_t> first_of_same(const std::vector<Tensor>& tensors) {
  std::vector<size_t> first;
  std::unordered_multimap<const void*, size_t> known;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& t = tensors[i];
    const void* key = t.numel() ? t.data_ptr() : static_cast<const void*>(&t.storage());
    const auto [begin, end] = known.equal_range(key);
    const auto same = std::find_if(
        begin, end, [&](const auto& entry) { return same_elements(tensors[entry.second], t); });
    first.push_back(same == end ? i : same->second);
    if (same == end) known.emplace(key, i);
  }
  return first;
}

}  // namespace detail

namespace {

std::string join(const std::string& prefix, const std::string& name) {
  return prefix.empty() ? name : prefix + "." + name;
}

template <class Member>
NamedTensors named(const Module& module, Member list) {
  NamedTensors found;
  std::unordered_set<const void*> seen;
  detail::for_each_module(
      module, [&](const std::string& prefix, Module&, const detail::Entries& entries) {
        for (auto& [name, t] : entries.*list)
          if (t->defined() && seen.insert(t->ref().get()).second)
            found.emplace_back(join(prefix, name), *t);
      });
  return found;
}

/// Collects the tensors alone: names take longer than the rest, and training loops need none.
class Tensors final : public FieldVisitor {
 public:
  std::vector<Tensor> found;

  Tensors(const Module& module, detail::Part what) : what_(what) {
    detail::for_each_module(module, {});
    collect(const_cast<Module&>(module));
  }
  void parameter(const std::string&, Parameter& p) override { add(p, detail::Part::parameter); }
  void buffer(const std::string&, Buffer& b) override { add(b, detail::Part::buffer); }
  void module(const std::string&, Module& m) override { pending_.push_back(&m); }

 private:
  void add(const Tensor& t, detail::Part part) {
    if (part == what_ && t.defined() && seen_.insert(t.ref().get()).second) found.push_back(t);
  }
  void collect(Module& m) {
    const size_t first = pending_.size();
    m.visit(*this);
    for (size_t i = first, last = pending_.size(); i < last; ++i) collect(*pending_[i]);
    pending_.resize(first);
  }

  detail::Part what_;
  std::vector<Module*> pending_;
  std::unordered_set<const void*> seen_;
};

}  // namespace

NamedTensors Module::named_parameters() const { return named(*this, &detail::Entries::parameters); }
NamedTensors Module::named_buffers() const { return named(*this, &detail::Entries::buffers); }
std::vector<Tensor> Module::parameters() const {
  return Tensors(*this, detail::Part::parameter).found;
}
std::vector<Tensor> Module::buffers() const { return Tensors(*this, detail::Part::buffer).found; }

std::vector<std::pair<std::string, Module*>> Module::named_modules() {
  std::vector<std::pair<std::string, Module*>> found;
  detail::for_each_module(
      *this, [&](const std::string& name, Module& m, auto&) { found.emplace_back(name, &m); });
  return found;
}
std::vector<std::pair<std::string, Module*>> Module::named_children() {
  return detail::entries_of(*this).modules;
}

// ---- modes ----

void Module::train(bool on) {
  for (auto& [name, m] : named_modules()) m->training_ = on;
}
void Module::zero_grad(bool set_to_none) {
  for (const Tensor& p : parameters())
    if (const Ref<Leaf>& leaf = p.body().leaf) leaf->zero_grad(set_to_none);
}
void Module::requires_grad_(bool on) {
  for (Tensor& p : parameters()) p.requires_grad_(on);
}

EvalGuard::EvalGuard(Module& module) {
  for (auto& [name, m] : module.named_modules()) modes_.emplace_back(m, m->training_);
  for (auto& [m, training] : modes_) m->training_ = false;
}
EvalGuard::~EvalGuard() {
  for (auto& [m, training] : modes_) m->training_ = training;
}

// ---- conversion ----

namespace {

/// Puts the storage, layout and dtype of `with` inside the body of t, and converts the gradient.
void replace_storage(const Tensor& t, const Tensor& with) {
  TensorBody& body = t.body();
  if (with.storage().data() == body.storage->data() && with.dtype() == body.dtype) return;
  body.base = nullptr;
  body.storage = with.body().storage;
  body.offset = with.body().offset;
  body.strides = with.strides();
  body.dtype = with.dtype();
  if (const Ref<Leaf>& leaf = body.leaf) {
    leaf->output().dtype = with.dtype();
    leaf->output().device = with.device();
    if (leaf->gradient.defined())
      leaf->gradient = leaf->gradient.detach().to(leaf->gradient_dtype()).to(with.device());
  }
}

/// Converts the tensors where they are; those that share their elements still do.
template <class Target>
void convert(const std::vector<Tensor>& tensors, Target target) {
  const NoGradGuard guard;
  const std::vector<size_t> first = detail::first_of_same(tensors);
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Tensor from = tensors[first[i]].detach();
    replace_storage(tensors[i], first[i] == i ? from.to(target) : from);
  }
}

}  // namespace

void Module::convert_to(Device device) {
  std::vector<Tensor> tensors = parameters();
  for (Tensor& b : buffers()) tensors.push_back(std::move(b));
  convert(tensors, device);
}
void Module::convert_to(DType dtype) {
  LOCKSTEP_CHECK(is_floating(dtype), DTypeError,
                 "to: a module's parameters are of floating dtype, not ", dtype);
  std::vector<Tensor> tensors = parameters();
  for (Tensor& b : buffers())
    if (b.is_floating_point()) tensors.push_back(std::move(b));
  convert(tensors, dtype);
}

// ---- text ----

std::string Module::extra_repr() const { return {}; }
std::string Module::brief() const { return extra_repr(); }

std::string Module::to_string() const {
  std::string text = module_type().name;
  const auto children = detail::entries_of(*this).modules;
  text += str_cat("(", extra_repr());
  for (auto& [name, child] : children) {
    text += str_cat("\n  (", name, "): ");
    for (char c : child->to_string()) {
      text += c;
      if (c == '\n') text += "  ";
    }
  }
  return text + (children.empty() ? ")" : "\n)");
}

void Module::add_place(Error& error) const noexcept try {
  const Error::Place& inner = error.place();
  const std::string type = module_type().name;
  std::string name;
  if (inner.outermost && inner.outermost != this)
    detail::traverse(*this, "", [&](const std::string& path, Module& m, auto&) {
      if (&m == inner.outermost) name = path;
    });
  if (!name.empty()) {
    std::string path = inner.path.empty() ? name : name + "." + inner.path;
    const std::string where = str_cat("in ", type, ".", path, " (", inner.innermost, ")");
    error.set_place({this, std::move(path), inner.innermost}, where, true);
  } else {
    std::string self = type;
    if (const std::string detail = brief(); !detail.empty()) self += str_cat(" ", detail);
    const std::string where = str_cat("in ", self);
    error.set_place({this, "", std::move(self)}, where, false);
  }
} catch (...) {
  // The error tells what is wrong, even without the place.
}

namespace detail {

void fail_not_unary(const Module& module) {
  fail<Error>(module.module_type().name,
              ": its forward does not map one Tensor to one Tensor, so it cannot be called ",
              "through Module; call the object under its own type");
}
void fail_not_clonable(const Module& module) {
  fail<Error>("clone: ", module.module_type().name,
              " cannot be moved, or has a named member that cannot be assigned ",
              "(const, a reference)");
}

}  // namespace detail
}  // namespace lockstep::nn
