#include <lockstep/autograd/gradcheck.h>

#include <cmath>

#include <lockstep/autograd/grad.h>
#include <lockstep/tensor/node.h>
#include <lockstep/tensor/ops/elementwise.h>
#include <lockstep/tensor/random.h>

namespace lockstep::autograd {
namespace {

/// A fixed tensor of numbers in [0.5, 1.5): a plain sum would not detect permuted elements.
Tensor weights(const Tensor& like, uint64_t offset) {
  const RandomKey key{.seed = 20, .offset = offset};
  std::vector<double> values;
  for (int64_t i = 0; i < like.numel(); ++i)
    values.push_back(0.5 + RandomKey::uniform(key.block(static_cast<uint64_t>(i))[0]));
  return tensor(values, like.shape(), {.dtype = DType::f64, .device = like.device()});
}

std::vector<Tensor> trainable(const std::vector<Tensor>& inputs) {
  std::vector<Tensor> list;
  for (const Tensor& x : inputs)
    if (x.requires_grad()) list.push_back(x);
  return list;
}

/// The comparison; `recorded` takes the gradient under create_graph, which ops compute by ops
/// instead of derivative kernels.
void compare(const Differentiable& f, const std::vector<Tensor>& inputs, GradcheckOptions options,
             bool recorded) {
  for (size_t i = 0; i < inputs.size(); ++i)
    LOCKSTEP_CHECK(!inputs[i].requires_grad() || inputs[i].dtype() == DType::f64, DTypeError,
                   "gradcheck: input ", i, " is ", inputs[i].dtype(), "; differences need f64");
  const std::vector<Tensor> wanted = trainable(inputs);
  LOCKSTEP_CHECK(!wanted.empty(), AutogradError, "gradcheck: no input requires grad");
  const Tensor y = f(inputs);
  const Tensor v = weights(y, 0);
  const auto gradients =
      grad({(y * v).sum()}, wanted, {}, {.create_graph = recorded, .allow_unused = true});
  auto value = [&] { return (f(inputs).detach() * v).sum().item<double>(); };
  for (size_t k = 0; k < wanted.size(); ++k) {
    const Tensor x = wanted[k].detach();  // shares its storage
    LOCKSTEP_CHECK(x.is_contiguous(), ShapeError, "gradcheck: inputs must be contiguous");
    x.storage().check_writable("gradcheck");  // its elements are moved and put back
    const std::vector<double> dx = gradients[k].defined()
                                       ? gradients[k].to_vector<double>()
                                       : std::vector<double>(static_cast<size_t>(x.numel())),
                              before = x.to_vector<double>();
    for (int64_t i = 0; i < x.numel(); ++i) {
      Tensor element = x.view({x.numel()})[i];
      const double at = before[static_cast<size_t>(i)];
      const double above = (element.fill_(at + options.step), value());
      const double below = (element.fill_(at - options.step), value());
      element.fill_(at);
      const double numeric = (above - below) / (2 * options.step),
                   analytic = dx[static_cast<size_t>(i)];
      LOCKSTEP_CHECK(
          std::abs(analytic - numeric) <= options.atol + options.rtol * std::abs(numeric),
          AutogradError, "gradcheck: by element ", i, " of the input ", k, " that requires grad ",
          recorded ? "a recorded backward gives " : "backward gives ", analytic,
          ", differences give ", numeric);
    }
  }
}

}  // namespace

void gradcheck(const Differentiable& f, const std::vector<Tensor>& inputs,
               GradcheckOptions options) {
  compare(f, inputs, options, false);
}

void gradgradcheck(const Differentiable& f, const std::vector<Tensor>& inputs,
                   GradcheckOptions options) {
  compare(f, inputs, options, true);
  compare(
      [&](const std::vector<Tensor>& in) {
        const Tensor y = f(in);
        Tensor total = scalar(0, {.dtype = DType::f64});
        uint64_t offset = 1;
        const auto gradients = grad({(y * weights(y, 0)).sum()}, trainable(in), {},
                                    {.create_graph = true, .allow_unused = true});
        for (const Tensor& g : gradients)
          if (g.defined()) total = total + (g * weights(g, offset++)).sum().to(Device());
        // A gradient that does not depend on the inputs has no graph; the second derivative is then
        // zero.
        for (const Tensor& x : trainable(in)) total = total + (x * 0.0).sum().to(Device());
        return total;
      },
      inputs, options, false);
}

}  // namespace lockstep::autograd
