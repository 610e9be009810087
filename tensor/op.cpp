#include <lockstep/tensor/op.h>

namespace lockstep::detail {

void fail_changed_input(const char* op, const Tensor& x, size_t i) {
  fail<AutogradError>(op, ": its forward changed input ", i, ", of shape ", x.shape(),
                      ", in place, so that the gradient of other uses of it would be wrong; change "
                      "a clone(), or make the op by apply_in_place");
}

const Tensor* source_of(const char* op, const Tensor& y, std::span<const Tensor* const> inputs) {
  LOCKSTEP_CHECK(y.defined(), Error, op, ": its forward returned an undefined tensor");
  TensorBody& body = y.body();
  if (body.untracked_view && body.storage->use_count() == 1) body.untracked_view = false;
  for (const Tensor* x : inputs)
    if (x->defined() &&
        (x->is_same(y) || (body.untracked_view && x->body().storage == body.storage)))
      return x;
  return nullptr;
}

}  // namespace lockstep::detail
