// Sequential: modules of any kind, one after the other.
//
//   nn::Sequential net{nn::Linear{784, 128}, nn::ReLU{}, nn::Linear{128, 10}};
//
// Its parameters are named by position ("0.weight", "2.bias"). A Linear that a ReLU follows runs as
// one fused product, so that net above costs no separate pass for the bias and the ReLU.
#pragma once

#include <concepts>

#include <lockstep/nn/module.h>

namespace lockstep::nn {

struct Linear;

class LOCKSTEP_API Sequential : public Module {
 public:
  Sequential() = default;
  template <std::derived_from<Module>... Modules>
  requires(sizeof...(Modules) > 0) explicit Sequential(Modules... modules) {
    (push_back(std::move(modules)), ...);
  }

  template <std::derived_from<Module> M>
  Sequential& push_back(M module) {
    return push_back(std::unique_ptr<Module>(std::make_unique<M>(std::move(module))));
  }
  Sequential& push_back(std::unique_ptr<Module> module);

  size_t size() const { return items_.size(); }
  /// The i-th module; IndexError when there is none.
  Module& operator[](size_t i);
  /// The i-th module as an M; ValueError when it is something else.
  template <std::derived_from<Module> M>
  M& at(size_t i) {
    M* m = dynamic_cast<M*>(&(*this)[i]);
    LOCKSTEP_CHECK(m, ValueError, "Sequential: module ", i, " is a ",
                   (*this)[i].module_type().name);
    return *m;
  }

  Tensor forward(Tensor x);

  // What LOCKSTEP_MODULE makes, with positions for names.
  Tensor operator()(Tensor x) { return detail::call(*this, std::move(x)); }
  template <class... Targets>
  Sequential& to(Targets... targets) & {
    (convert_to(targets), ...);
    return *this;
  }
  template <class... Targets>
  Sequential to(Targets... targets) && {
    (convert_to(targets), ...);
    return std::move(*this);
  }
  Sequential clone();
  Sequential share();
  Sequential clone_with(CloneMap& map);
  void visit(FieldVisitor& v) override;
  ModuleType module_type() const override {
    return {"Sequential", sizeof(Sequential), alignof(Sequential)};
  }
  Tensor forward_any(Tensor x) override { return (*this)(std::move(x)); }
  std::unique_ptr<Module> clone_any(CloneMap& map) override;

 private:
  struct Item {
    std::unique_ptr<Module> module;
    Linear* linear;  // the module, if it is one
    bool is_relu;
  };
  std::vector<Item> items_;
};

}  // namespace lockstep::nn
