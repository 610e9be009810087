// Reductions, softmax, losses, norms and joins against what PyTorch computed (golden/make_ops.py),
// forward and backward.
#include "op_check.h"

#include <lockstep/tensor/ops/batch_norm.h>
#include <lockstep/tensor/ops/cross_entropy.h>
#include <lockstep/tensor/ops/join.h>
#include <lockstep/tensor/ops/layer_norm.h>
#include <lockstep/tensor/ops/mse_loss.h>
#include <lockstep/tensor/ops/softmax.h>
#include <lockstep/tensor/safetensors.h>

using namespace lockstep;
using namespace op_check;

namespace {

const Tensor& golden(const std::string& name) {
  static const Safetensors file = load_safetensors(LOCKSTEP_TEST_DATA "/golden/ops.safetensors");
  return file.at(name);
}

/// f of the case's inputs against its y, and the gradients for its dy against its dx; in f64 and in
/// f32.
void compare(const std::string& name, int inputs, const Function& f) {
  for (DType dtype : {DType::f64, DType::f32}) {
    std::vector<Tensor> x;
    for (int i = 0; i < inputs; ++i)
      x.push_back(golden(name + "/x" + std::to_string(i)).to(dtype).clone().requires_grad_());
    const Tensor y = f(x);
    CHECK(y.shape() == golden(name + "/y").shape());
    const double tolerance = dtype == DType::f64 ? 1e-12 : 2e-5;
    check_close(name, y, golden(name + "/y").to_vector<double>(), tolerance);
    const auto dx = autograd::grad({y}, x, {golden(name + "/dy").to(dtype)});
    for (int i = 0; i < inputs; ++i)
      check_close(name + " gradient " + std::to_string(i), dx[size_t(i)],
                  golden(name + "/dx" + std::to_string(i)).to_vector<double>(), tolerance);
  }
}

}  // namespace

TEST_CASE("reductions") {
  compare("sum", 1, [](auto& x) { return x[0].sum({0, 2}); });
  compare("mean", 1, [](auto& x) { return x[0].mean({0, 2}, true); });
  compare("var", 1, [](auto& x) { return var(x[0], {0, 2}); });
  compare("var_all", 1, [](auto& x) { return var(x[0], {}, 0); });
  compare("max", 1, [](auto& x) { return x[0].max(); });
  compare("max_dim", 1, [](auto& x) { return max(x[0], 1).values; });
  check_close("indices", max(golden("max_dim/x0"), 1).indices,
              golden("max_dim/indices").to_vector<double>(), 0);
}

TEST_CASE("softmax and losses") {
  compare("softmax", 1, [](auto& x) { return softmax(x[0] * 3, 1); });
  compare("log_softmax", 1, [](auto& x) { return log_softmax(x[0] * 3, 2); });
  const std::pair<const char*, Reduction> reductions[] = {
      {"mean", Reduction::mean}, {"sum", Reduction::sum}, {"none", Reduction::none}};
  for (const auto& named : reductions)
    for (const char* smoothing : {"0.0", "0.1"})
      compare(str_cat("cross_entropy_", named.first, "_", smoothing), 1, [&](auto& x) {
        return cross_entropy(x[0], golden("cross_entropy/target"),
                             {.reduction = named.second, .label_smoothing = std::stod(smoothing)});
      });
  compare("cross_entropy_2d", 1, [](auto& x) {
    return cross_entropy(x[0], golden("cross_entropy_2d/target"), {.label_smoothing = 0.2});
  });
  compare("mse_loss", 2, [](auto& x) { return mse_loss(x[0], x[1]); });
}

TEST_CASE("norms") {
  compare("layer_norm", 3, [](auto& x) { return layer_norm(x[0], {4, 5}, x[1], x[2], 1e-3); });
  for (const std::string name : {"batch_norm_2d", "batch_norm_4d", "batch_norm_eval"})
    compare(name, 3, [&](auto& x) {
      const DType dtype = x[0].dtype();
      Tensor mean = golden(name + "/mean_before").to(dtype).clone(),
             var = golden(name + "/var_before").to(dtype).clone();
      const Tensor y =
          batch_norm(x[0], mean, var, x[1], x[2], name != "batch_norm_eval", 0.2, 1e-3);
      check_close("running mean", mean, golden(name + "/mean_after").to_vector<double>(),
                  tolerance_of(dtype));
      check_close("running variance", var, golden(name + "/var_after").to_vector<double>(),
                  tolerance_of(dtype));
      return y;
    });
}

TEST_CASE("joins") {
  compare("cat", 2, [](auto& x) { return cat({x[0], x[1]}, 1); });
  compare("stack", 2, [](auto& x) { return stack({x[0], x[1]}, 1); });
}
