#include <lockstep/nn/module.h>

#include <algorithm>
#include <unordered_set>

#include <lockstep/nn/entries.h>
#include <lockstep/nn/registry.h>
#include <lockstep/tensor/node.h>

namespace lockstep::nn {

// ---- life ----

Module::Module() { detail::part_appears(this, detail::Part::module); }
Module::Module(Module&& other) noexcept : training_(other.training_) {
  detail::part_moves(this, &other, detail::Part::module);
}
Module& Module::operator=(Module&& other) noexcept {
  training_ = other.training_;
  return *this;
}
Module::~Module() { detail::part_disappears(this); }

// ---- what is in it ----

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
      for (auto& [name, child] : entries.modules) external(*child);
      for (auto& [part, other] : entries.references)
        if (other) external(*other);
      check_fields(m, entries, pointed);
    });
    check_still_unnamed(pointed);
    module.checked_at_.store(now, std::memory_order_relaxed);
  }
  if (f) traverse(module, "", f);
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

std::vector<Tensor> without_names(const NamedTensors& named) {
  std::vector<Tensor> tensors;
  for (auto& [name, t] : named) tensors.push_back(t);
  return tensors;
}

}  // namespace

NamedTensors Module::named_parameters() const { return named(*this, &detail::Entries::parameters); }
NamedTensors Module::named_buffers() const { return named(*this, &detail::Entries::buffers); }
std::vector<Tensor> Module::parameters() const { return without_names(named_parameters()); }
std::vector<Tensor> Module::buffers() const { return without_names(named_buffers()); }

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

// ---- moving ----

namespace {

/// Replaces the storage inside the body of t, and that of its gradient, by converted copies.
template <class Target>
void convert(const Tensor& t, Target target) {
  const NoGradGuard guard;
  const Tensor with = t.detach().to(target);
  TensorBody& body = t.body();
  if (with.storage().data() == body.storage->data() && with.dtype() == body.dtype) return;
  body.base = nullptr;
  body.storage = with.body().storage;
  body.offset = with.body().offset;
  body.strides = with.strides();
  body.dtype = with.dtype();
  if (const Ref<Leaf>& leaf = body.leaf) {
    leaf->dtype = with.dtype();
    leaf->device = with.device();
    if (leaf->gradient.defined()) leaf->gradient = leaf->gradient.detach().to(target);
  }
}

}  // namespace

void Module::convert_to(Device device) {
  for (auto& [name, t] : named_parameters()) convert(t, device);
  for (auto& [name, t] : named_buffers()) convert(t, device);
}
void Module::convert_to(DType dtype) {
  LOCKSTEP_CHECK(is_floating(dtype), DTypeError,
                 "to: a module's parameters are of floating dtype, not ", dtype);
  for (auto& [name, t] : named_parameters()) convert(t, dtype);
  for (auto& [name, t] : named_buffers())
    if (t.is_floating_point()) convert(t, dtype);
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

void Module::add_place(Error& error) const {
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
