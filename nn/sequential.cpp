#include <lockstep/nn/sequential.h>

#include <lockstep/nn/activation.h>
#include <lockstep/nn/linear.h>

namespace lockstep::nn {
namespace {

/// Whether the module is an M and no subclass, whose forward may be another.
template <class M>
bool is_exactly(const Module& module) {
  return typeid(module) == typeid(M);
}

}  // namespace

Sequential& Sequential::push_back(std::unique_ptr<Module> module) {
  LOCKSTEP_CHECK(module, ValueError, "Sequential: module ", size(), " is null");
  modules.push_back(std::move(module));
  detail::refilled(*this);  // one that was moved from may be filled anew
  return *this;
}

Module& Sequential::operator[](size_t i) {
  LOCKSTEP_CHECK(i < size(), IndexError, "Sequential: there is no module ", i, ", only ", size());
  return *modules[i];
}

Tensor Sequential::forward(Tensor x) {
  // An observer wants to see each module called.
  const bool fuse = !detail::is_observed();
  for (size_t i = 0; i < size(); ++i) {
    Module& module = *modules[i];
    if (fuse && i + 1 < size() && is_exactly<Linear>(module) && is_exactly<ReLU>(*modules[i + 1]))
      x = static_cast<Linear&>(module)(x, Activation::relu), ++i;
    else
      x = module(std::move(x));
  }
  return x;
}

}  // namespace lockstep::nn
