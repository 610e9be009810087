#include <lockstep/nn/sequential.h>

#include <lockstep/nn/activation.h>
#include <lockstep/nn/linear.h>

namespace lockstep::nn {

Sequential& Sequential::push_back(std::unique_ptr<Module> module) {
  LOCKSTEP_CHECK(module, ValueError, "Sequential: module ", size(), " is null");
  Linear* linear = dynamic_cast<Linear*>(module.get());
  const bool is_relu = dynamic_cast<ReLU*>(module.get());
  items_.push_back({std::move(module), linear, is_relu});
  return *this;
}

Module& Sequential::operator[](size_t i) {
  LOCKSTEP_CHECK(i < size(), IndexError, "Sequential: there is no module ", i, ", only ", size());
  return *items_[i].module;
}

Tensor Sequential::forward(Tensor x) {
  // An observer wants to see each module called.
  const bool fuse = detail::call_observers.load(std::memory_order_relaxed) == 0;
  for (size_t i = 0; i < size(); ++i) {
    Item& item = items_[i];
    if (fuse && item.linear && i + 1 < size() && items_[i + 1].is_relu) {
      x = (*item.linear)(x, Activation::relu);
      ++i;
    } else {
      x = (*item.module)(std::move(x));
    }
  }
  return x;
}

void Sequential::visit(FieldVisitor& v) {
  for (size_t i = 0; i < size(); ++i) v.module(std::to_string(i), *items_[i].module);
}

Sequential Sequential::clone_with(CloneMap& map) {
  Sequential copy;
  for (Item& item : items_) copy.push_back(item.module->clone_any(map));
  copy.Module::operator=(std::move(*this));  // all a Module itself has is its mode
  return copy;
}
Sequential Sequential::clone() {
  CloneMap map(false);
  return clone_with(map);
}
Sequential Sequential::share() {
  CloneMap map(true);
  return clone_with(map);
}
std::unique_ptr<Module> Sequential::clone_any(CloneMap& map) {
  return std::make_unique<Sequential>(clone_with(map));
}

}  // namespace lockstep::nn
