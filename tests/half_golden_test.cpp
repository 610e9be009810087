// f16 and bf16 against what PyTorch computed in them (golden/make_half.py), forward and backward: within two units in
// the last place of the dtype, relative to the largest element, since both round once from sums in f32.
#include <doctest/doctest.h>

#include <lockstep/lockstep.h>

#include "golden.h"

using namespace lockstep;

namespace {

using Function = std::function<Tensor(const std::vector<Tensor>&)>;

void compare(const std::string& name, size_t inputs, const Function& f) {
  static const Golden golden("half.safetensors");
  for (DType t : {DType::f16, DType::bf16}) {
    const std::string at = (t == DType::f16 ? "float16/" : "bfloat16/") + name;
    INFO(at);
    std::vector<Tensor> x;
    for (size_t i = 0; i < inputs; ++i)
      x.push_back(golden[at + "/x" + std::to_string(i)].to(t).requires_grad_());
    const auto near = [&](const Tensor& got, const Tensor& want) {
      CHECK(got.dtype() == t);
      const double unit = t == DType::f16 ? 0x1p-10 : 0x1p-7;
      const double largest = amax(abs(want)).item<double>();
      CHECK(difference(got, want) <= 2 * unit * largest);
    };
    const Tensor y = f(x);
    near(y.detach(), golden[at + "/y"]);
    const auto dx = autograd::grad({y}, x, {golden[at + "/dy"].to(t)});
    for (size_t i = 0; i < inputs; ++i) near(dx[i], golden[at + "/dx" + std::to_string(i)]);
  }
}

}  // namespace

TEST_CASE("half golden: element-wise ops") {
  compare("add", 2, [](auto& x) { return x[0] + x[1]; });
  compare("mul", 2, [](auto& x) { return x[0] * x[1]; });
  compare("div", 2, [](auto& x) { return x[0] / x[1]; });
  compare("exp", 1, [](auto& x) { return exp(x[0]); });
  compare("tanh", 1, [](auto& x) { return tanh(x[0]); });
  compare("gelu", 1, [](auto& x) { return gelu(x[0]); });
  compare("silu", 1, [](auto& x) { return silu(x[0]); });
}
TEST_CASE("half golden: reductions") {
  compare("sum", 1, [](auto& x) { return sum(x[0], {1}); });
  compare("mean", 1, [](auto& x) { return mean(x[0], {0}); });
  compare("norm", 1, [](auto& x) { return norm(x[0], {1}); });
  compare("amax", 1, [](auto& x) { return amax(x[0], {1}); });
}
TEST_CASE("half golden: softmax, losses and norms") {
  compare("softmax", 1, [](auto& x) { return softmax(x[0], 1); });
  compare("log_softmax", 1, [](auto& x) { return log_softmax(x[0], 1); });
  compare("cross_entropy", 1,
          [](auto& x) { return cross_entropy(x[0], tensor<int64_t>({3, 0, -100, 2, 0})); });
  compare("layer_norm", 3, [](auto& x) { return layer_norm(x[0], {40}, x[1], x[2]); });
}
TEST_CASE("half golden: products and pooling") {
  compare("matmul", 2, [](auto& x) { return matmul(x[0], x[1]); });
  compare("linear", 3, [](auto& x) { return linear(x[0], x[1], x[2]); });
  compare("conv2d", 3, [](auto& x) { return conv2d(x[0], x[1], x[2], {.padding = 1}); });
  compare("max_pool2d", 1, [](auto& x) { return max_pool2d(x[0], 2); });
}
