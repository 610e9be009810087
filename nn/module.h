// Module: a layer or model made of plain members. LOCKSTEP_MODULE names the members once;
// parameters, names, moving to a device, the state dict, cloning, printing and summaries all derive
// from that.
//
//   struct Net : nn::Module {
//     nn::Linear fc1{784, 128}, fc2{128, 10};
//     Tensor forward(Tensor x) { return fc2(relu(fc1(x))); }
//     LOCKSTEP_MODULE(Net, fc1, fc2)
//   };
//
// A module is movable and not copyable, since a copied layer would silently share or double its
// weights: clone() copies the weights, share() says that they are the same. One that was moved from
// has no parameters, and is an Error to call, save or clone until it is assigned to.
#pragma once

#include <lockstep/nn/call.h>
#include <lockstep/nn/clone.h>
#include <lockstep/nn/fields.h>
#include <lockstep/tensor/safetensors.h>

namespace lockstep::nn {

/// What the macro knows of a module's class.
struct ModuleType {
  const char* name;
  size_t size, alignment;
  const std::type_info* id;
};

struct LoadOptions {
  bool strict = true;  // every name must be on both sides
};
/// The names that a load_state_dict without `strict` passed over.
struct LoadResult {
  std::vector<std::string> missing, unexpected;
};

namespace detail {
struct Entries;
using ModuleFunction =
    std::function<void(const std::string& path, Module& m, const Entries& entries)>;
void for_each_module(const Module& module, const ModuleFunction& f, bool always);
}  // namespace detail

class LOCKSTEP_API Module {
 public:
  Module();
  Module(Module&& other) noexcept;
  Module& operator=(Module&& other) noexcept;
  virtual ~Module();

  // ---- tensors: order and names are PyTorch's; a tensor under several names is listed once ----
  std::vector<Tensor> parameters() const;
  NamedTensors named_parameters() const;
  std::vector<Tensor> buffers() const;
  NamedTensors named_buffers() const;
  /// This module (named "") and all below it.
  std::vector<std::pair<std::string, Module*>> named_modules();
  /// The modules that are fields of this one.
  std::vector<std::pair<std::string, Module*>> named_children();

  // ---- modes and gradients ----
  /// Training mode: dropout drops, batch norm uses and updates batch statistics. On by default.
  void train(bool on = true);
  void eval() { train(false); }
  bool is_training() const { return training_; }
  void zero_grad(bool set_to_none = true);
  void requires_grad_(bool on = true);

  // ---- state ----
  /// Parameters and persistent buffers by name, as tensors that share their data; tied ones under
  /// each name.
  NamedTensors state_dict() const;
  /// Copies the values in, converting dtype and device. Names that do not fit (unless not strict)
  /// and shapes that do not fit are a ValueError that lists them all, and then nothing has been
  /// changed.
  LoadResult load_state_dict(const NamedTensors& state, LoadOptions options = {});
  /// The state dict as a safetensors file; see <lockstep/tensor/safetensors.h>.
  void save(const std::string& path) const;
  LoadResult load(const std::string& path, LoadOptions options = {});

  // ---- text ----
  /// As PyTorch prints modules.
  std::string to_string() const;
  /// What stands between the parentheses: "in_features=784, out_features=128, bias=True".
  virtual std::string extra_repr() const;
  /// What errors and summaries add to the type: "784->128". extra_repr() unless overridden.
  virtual std::string brief() const;

  /// Calls forward of a module that maps one tensor to one; another kind throws Error.
  Tensor operator()(Tensor x) { return forward_any(std::move(x)); }

  // ---- implemented by LOCKSTEP_MODULE ----
  /// Named for the compiler's message about a class that lacks the macro.
  virtual void this_class_needs_LOCKSTEP_MODULE() const = 0;
  virtual void visit(FieldVisitor& v) = 0;
  virtual ModuleType module_type() const = 0;
  virtual Tensor forward_any(Tensor x) = 0;
  virtual std::unique_ptr<Module> clone_any(CloneMap& map) = 0;

  // ---- what the macro's functions call ----
  /// Changes the storage inside every parameter, gradient and buffer.
  void convert_to(Device device);
  /// The same for those of floating dtype.
  void convert_to(DType dtype);
  /// Adds this module to the place that an error on its way out names; where that fails, the error
  /// stays as it is.
  void add_place(Error& error) const noexcept;

 private:
  friend class detail::CallScope;
  friend class EvalGuard;
  friend void detail::permit_calls(Module& module);
  friend void detail::check_not_moved_from(const Module& module);
  friend void detail::refilled(Module& module);
  friend void detail::for_each_module(const Module&, const detail::ModuleFunction&, bool);
  template <class M>
  friend M& external(M& module);

  bool training_ = true;
  bool moved_from_ = false;                  // and not assigned to since
  std::atomic<bool> graph_checked_ = false;  // see detail::GraphCheck
  std::atomic<bool> belongs_ = false;   // a field of a module, or permitted inside other forwards
  std::atomic<bool> external_ = false;  // see external()
  // detail::parts_constructed() when the fields of all that is in it were last checked
  mutable std::atomic<uint32_t> checked_at_ = 0;
};

inline void append(std::string& text, const Module& m) { text += m.to_string(); }
template <class Stream>
auto operator<<(Stream& out, const Module& m) -> decltype(out << std::string()) {
  return out << m.to_string();
}

template <class M>
M& external(M& module) {
  static_cast<Module&>(module).external_.store(true, std::memory_order_relaxed);
  detail::permit_calls(module);
  return module;
}

/// Puts a module and all below it into eval mode while it lives; then each has the mode again that
/// it had before, also after an exception: a batch norm that was frozen by eval() stays frozen. No
/// module may be added, moved or removed meanwhile.
class LOCKSTEP_API EvalGuard {
 public:
  explicit EvalGuard(Module& module);
  ~EvalGuard();
  EvalGuard(const EvalGuard&) = delete;
  EvalGuard& operator=(const EvalGuard&) = delete;

 private:
  std::vector<std::pair<Module*, bool>> modes_;
};

namespace detail {

[[noreturn]] LOCKSTEP_API void fail_not_clonable(const Module& module);

template <class M>
std::unique_ptr<Module> clone_unique(M& module, CloneMap& map) {
  auto can = []<class... Fields>(Fields&...) {
    return std::bool_constant<can_clone<M, Fields...>>();
  };
  if constexpr (decltype(module.with_fields(can))::value)
    return std::unique_ptr<Module>(new M(clone_module(module, map)));
  else
    fail_not_clonable(module);
}

}  // namespace detail
}  // namespace lockstep::nn

/// LOCKSTEP_MODULE(Type, fields...), the last line of a module, of a subclass of a module too; not of
/// a class within a function, which C++ allows no member templates. Name
/// every member that holds modules, parameters or buffers, those of the base class included (and,
/// for clone(), whatever else is not a plain number). One that is left out is an Error: at the
/// first traversal where the class holds or points to it, at the first call where it is used. A
/// module that another object owns is a std::reference_wrapper, or external().
/// The macro makes the call operator, to(Device), to(DType), clone() and share():
///   y = net(x);   net.to(device);   Net{}.to(device, DType::f64);   Net other = net.clone();
/// A clone has no gradients and no hooks. clone() and share() must not run while another thread uses
/// the module otherwise; several may clone it.
#define LOCKSTEP_MODULE(Type, ...)                                                             \
 public:                                                                                       \
  template <class Self = Type, class... Args>                                                  \
  auto operator()(Args&&... args)                                                              \
      ->decltype(std::declval<Self&>().forward(std::forward<Args>(args)...)) {                 \
    return ::lockstep::nn::detail::call(*this, std::forward<Args>(args)...);                   \
  }                                                                                            \
  template <class... Targets>                                                                  \
  Type& to(Targets... targets)& {                                                              \
    (this->convert_to(targets), ...);                                                          \
    return *this;                                                                              \
  }                                                                                            \
  template <class... Targets>                                                                  \
  Type to(Targets... targets)&& {                                                              \
    ::lockstep::nn::detail::check_not_sliced("to", *this, typeid(Type));                       \
    (this->convert_to(targets), ...);                                                          \
    return std::move(*this);                                                                   \
  }                                                                                            \
  template <class M = Type>                                                                    \
  M clone_with(::lockstep::nn::CloneMap& map) {                                                \
    return ::lockstep::nn::detail::clone_module(*this, map);                                   \
  }                                                                                            \
  template <class M = Type>                                                                    \
  M clone() {                                                                                  \
    ::lockstep::nn::CloneMap map(false);                                                       \
    return clone_with(map);                                                                    \
  }                                                                                            \
  template <class M = Type>                                                                    \
  M share() {                                                                                  \
    ::lockstep::nn::CloneMap map(true);                                                        \
    return clone_with(map);                                                                    \
  }                                                                                            \
  template <class F>                                                                           \
  decltype(auto) with_fields(F&& lockstep_f) {                                                 \
    return lockstep_f(__VA_ARGS__);                                                            \
  }                                                                                            \
  void this_class_needs_LOCKSTEP_MODULE() const override {}                                    \
  void visit(::lockstep::nn::FieldVisitor& lockstep_v) override {                              \
    ::lockstep::nn::detail::visit_fields(lockstep_v, #__VA_ARGS__ __VA_OPT__(, ) __VA_ARGS__); \
  }                                                                                            \
  ::lockstep::nn::ModuleType module_type() const override {                                    \
    return {#Type, sizeof(Type), alignof(Type), &typeid(Type)};                                \
  }                                                                                            \
  ::lockstep::Tensor forward_any(::lockstep::Tensor x) override {                              \
    return ::lockstep::nn::detail::call_unary(*this, std::move(x));                            \
  }                                                                                            \
  std::unique_ptr<::lockstep::nn::Module> clone_any(::lockstep::nn::CloneMap& map) override {  \
    return ::lockstep::nn::detail::clone_unique(*this, map);                                   \
  }
