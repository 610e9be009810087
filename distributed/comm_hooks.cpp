#include <lockstep/distributed/comm_hooks.h>

#include <lockstep/tensor/node.h>

namespace lockstep::dist::hooks {
namespace {

CommHook compress_to(DType wire) {
  return [wire](GradBucket& bucket) {
    NoGradGuard no_grad;
    bucket.buffer.mul_(1.0 / bucket.group->size());
    const Tensor sent = bucket.buffer.to(wire);  // [elements]
    WorkPtr work = bucket.group->all_reduce(
        sent, ReduceOp::sum, {.label = str_cat("DDP bucket ", bucket.index, " in ", wire)});
    work->then([buffer = bucket.buffer, sent]() mutable {
      NoGradGuard guard;
      buffer.copy_(sent);
    });
    return work;
  };
}

}  // namespace

CommHook all_reduce() {
  return [](GradBucket& bucket) {
    return bucket.group->all_reduce(bucket.buffer, ReduceOp::avg,
                                    {.label = str_cat("DDP bucket ", bucket.index)});
  };
}
CommHook fp16_compress() { return compress_to(DType::f16); }
CommHook bf16_compress() { return compress_to(DType::bf16); }

}  // namespace lockstep::dist::hooks
