// Sequential: modules of any kind, one after the other.
//
//   nn::Sequential net{nn::Linear{784, 128}, nn::ReLU{}, nn::Linear{128, 10}};
//
// Its parameters are named by position ("0.weight", "2.bias"). A Linear that a ReLU follows runs as
// one fused product, without a separate pass for the bias and the ReLU; results and gradients are
// bitwise those of the two layers. A subclass names the field `modules`:
//
//   struct Block : nn::Sequential {
//     explicit Block(int64_t n) : Sequential{nn::Linear{n, n}, nn::LayerNorm{n}, nn::ReLU{}} {}
//     LOCKSTEP_MODULE(Block, modules)
//   };
#pragma once

#include <concepts>

#include <lockstep/nn/module.h>

namespace lockstep::nn {

/// A module whose forward maps one tensor to one. Module itself is one: its call operator throws
/// where the object's forward does something else.
template <class M>
concept UnaryModule = std::derived_from<M, Module> && requires(M& m, Tensor x) {
  { m(std::move(x)) } -> std::convertible_to<Tensor>;
};

class LOCKSTEP_API Sequential : public Module {
 public:
  Sequential() = default;
  template <UnaryModule... Modules>
  requires(sizeof...(Modules) > 0) explicit Sequential(Modules... parts) {
    (push_back(std::move(parts)), ...);
  }

  template <UnaryModule M>
  Sequential& push_back(M module) {
    return push_back(std::unique_ptr<Module>(std::make_unique<M>(std::move(module))));
  }
  Sequential& push_back(std::unique_ptr<Module> module);

  size_t size() const { return modules.size(); }
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

 protected:
  PositionalModules modules;
  LOCKSTEP_MODULE(Sequential, modules)
};

}  // namespace lockstep::nn
