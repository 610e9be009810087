#include <lockstep/distributed/sync_batch_norm.h>

#include <lockstep/nn/batch_norm.h>
#include <lockstep/tensor/ops/batch_norm.h>

namespace lockstep::dist {
namespace {

class BetweenRanks final : public BatchNormReduction {
 public:
  explicit BetweenRanks(std::shared_ptr<ProcessGroup> group) : group_(std::move(group)) {}

  Tensor gather(const Tensor& t) override {
    Shape shape{group_->size()};
    for (int64_t d : t.shape()) shape.push_back(d);
    const Tensor all = empty(shape, {.dtype = t.dtype(), .device = t.device()});
    group_->all_gather(all, t, {.label = "SyncBatchNorm's statistics"})->wait();
    return all;
  }
  void sum(const Tensor& t) override {
    group_->all_reduce(t, ReduceOp::sum, {.label = "SyncBatchNorm's gradient sums"})->wait();
  }

 private:
  std::shared_ptr<ProcessGroup> group_;
};

}  // namespace

int convert_sync_batchnorm(nn::Module& net, const Group& group) {
  const auto between = std::make_shared<BetweenRanks>(group.process_group().child());
  int converted = 0;
  for (const auto& [name, module] : net.named_modules())
    if (auto* norm = dynamic_cast<nn::BatchNorm*>(module)) {
      norm->reduction = between;
      ++converted;
    }
  return converted;
}

}  // namespace lockstep::dist
