#include <lockstep/nn/batch_norm.h>

#include <algorithm>

namespace lockstep::nn {

BatchNorm::BatchNorm(int64_t features, BatchNormOptions o) : num_features(features), options(o) {
  LOCKSTEP_CHECK(features > 0, ValueError, "BatchNorm: needs features > 0, got ", features);
  const TensorOptions made{.dtype = o.dtype};
  if (o.affine) {
    weight = ones({features}, made);
    bias = zeros({features}, made);
  }
  if (o.track_running_stats) {
    running_mean = zeros({features}, made);
    running_var = ones({features}, made);
    num_batches_tracked = zeros({}, {.dtype = DType::i64});
  }
}

std::string BatchNorm::extra_repr() const {
  return str_cat(num_features, ", eps=", options.eps,
                 ", momentum=", options.momentum ? str_cat(*options.momentum) : "None",
                 ", affine=", options.affine ? "True" : "False",
                 ", track_running_stats=", options.track_running_stats ? "True" : "False",
                 reduction ? ", sync=True" : "");
}
std::string BatchNorm::brief() const { return str_cat(num_features); }

Tensor BatchNorm::normalize(const Tensor& x, std::initializer_list<int> dims) {
  const char* type = module_type().name;
  LOCKSTEP_CHECK(std::find(dims.begin(), dims.end(), x.dim()) != dims.end(), ShapeError, type,
                 ": the input has ", x.dim(), " dimensions (shape ", x.shape(), "), expected ",
                 *dims.begin(), dims.size() > 1 ? " or 3" : "");
  // The batches that the running statistics have seen: no empty one, and none that is refused below.
  const bool counts =
      is_training() && num_batches_tracked.defined() && (x.numel() > 0 || reduction);
  Tensor y = batch_norm(x, running_mean, running_var, weight, bias, is_training(),
                        options.momentum.value_or(0), options.eps, reduction,
                        options.momentum ? Tensor() : num_batches_tracked);
  if (counts) num_batches_tracked.add_(1);
  return y;
}

}  // namespace lockstep::nn
