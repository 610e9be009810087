#include <lockstep/distributed/accumulation.h>

#include <lockstep/tensor/node.h>
#include <lockstep/tensor/ops/elementwise.h>
#include <lockstep/tensor/warning.h>

namespace lockstep::dist {

Accumulation::Accumulation(Reducer* reducer, std::vector<Tensor> parameters, Group group,
                           AccumulationOptions options)
    : reducer_(reducer),
      parameters_(std::move(parameters)),
      group_(std::move(group)),
      steps_(options.steps) {
  LOCKSTEP_CHECK(steps_ >= 1, ValueError, "Accumulation: a window has at least one step, got ",
                 steps_);
  check_same_steps();
  if (reducer_) reducer_->set_exact_windows(true);
}

void Accumulation::check_same_steps() const {
  const Tensor all = group_.all_gather(tensor<int64_t>({steps_}));  // [ranks, 1]
  const int64_t* steps = all.data<int64_t>();
  for (int r = 1; r < group_.size(); ++r)
    LOCKSTEP_CHECK(steps[r] == steps[0], ValueError, "Accumulation: steps ", steps[0],
                   " on rank 0, ", steps[r], " on rank ", r, "; pass the same on every rank");
}

Accumulation::~Accumulation() {
  if (position_ > 0 && std::uncaught_exceptions() == exceptions_) try {
      warn("Accumulation: it ends within a window, after micro-batch ", position_, " of ", steps_,
           "; their gradients are in no step, and the next window adds to them; call "
           "step(optimizer, true) at the end, or keep one Accumulation for all epochs");
    } catch (...) {  // a handler's
    }
  if (!reducer_) return;
  reducer_->flag().force(std::nullopt);
  reducer_->set_exact_windows(false);
}

void Accumulation::backward(const Tensor& loss_sum, int64_t count) {
  LOCKSTEP_CHECK(count >= 0, ValueError, "Accumulation: a batch of ", count, " targets");
  LOCKSTEP_CHECK(position_ < steps_, Error, "Accumulation: the window of ", steps_,
                 " micro-batches is full; call step() after each backward");
  check_gradients_kept();
  add_loss(loss_sum);
  targets_ += static_cast<double>(count);
  ++position_;
  const bool last = position_ == steps_;
  try {
    if (reducer_) {
      reducer_->flag().force(last);
      // Not earlier: a backward that throws before the first launch leaves nothing behind on the
      // other ranks, and this rank's next window takes its place. Not later: a rank that closes its
      // window needs the sums before it can take part.
      if (last) reducer_->before_first_launch([this] { sum_over_ranks(); });
    }
    loss_sum.backward();
    if (reducer_) reducer_->before_first_launch(nullptr);
  } catch (...) {
    drop_window();
    throw;
  }
  accumulated_.clear();
  for (const Tensor& p : parameters_)
    if (p.requires_grad() && p.grad().defined()) accumulated_.push_back(p);
}

void Accumulation::add_loss(const Tensor& loss_sum) {
  LOCKSTEP_CHECK(loss_sum.numel() == 1, ShapeError, "Accumulation: the loss is one number, got ",
                 loss_sum.shape());
  const NoGradGuard guard;
  const Tensor loss = loss_sum.detach().view({}).to(DType::f64);
  loss_ = loss_.defined() ? loss_ + loss : loss.clone();
}

void Accumulation::check_gradients_kept() {
  for (const Tensor& p : accumulated_) {
    if (p.grad().defined()) continue;
    const Shape shape = p.shape();
    const int64_t position = position_;
    drop_window();
    fail<Error>("Accumulation: the gradient of a parameter of shape ", shape,
                " was cleared after micro-batch ", position, " of a window of ", steps_,
                ", whose sum it holds; leave zero_grad() out, since step() clears the gradients at "
                "the end of each window");
  }
}

void Accumulation::sum_over_ranks() {
  sums_ = tensor<double>({targets_, static_cast<double>(position_)});
  if (!loss_.defined()) loss_ = zeros({}, {.dtype = DType::f64});
  ProcessGroup& group = reducer_ ? reducer_->group() : group_.process_group();
  work_ = group.all_reduce(sums_, ReduceOp::sum, {.label = "the window's count"});
  if (group.size() > 1)
    loss_work_ = group.all_reduce(loss_, ReduceOp::sum, {.label = "the window's loss"});
}

void Accumulation::drop_window() {
  if (reducer_) reducer_->before_first_launch(nullptr);
  position_ = 0;
  targets_ = 0;
  loss_ = Tensor();
  accumulated_.clear();
  work_ = loss_work_ = nullptr;
  for (const Tensor& p : parameters_)  // a frozen one's gradient is no part of the window
    if (const Ref<Leaf>& leaf = p.body().leaf; leaf && p.requires_grad()) leaf->zero_grad(true);
}

bool Accumulation::finish(bool close) {
  if (position_ < steps_ && !close) return false;
  check_gradients_kept();
  // Not in a short window, and not where the last micro-batch did not reach the module.
  const bool is_reduced = !reducer_ || work_;
  try {
    if (!work_) sum_over_ranks();
    work_->wait();
    if (loss_work_) loss_work_->wait();
    const double targets = sums_[0].item<double>(), batches = sums_[1].item<double>();
    if (batches == 0) {  // no rank has begun a window
      work_ = loss_work_ = nullptr;
      loss_ = Tensor();
      return false;
    }
    if (!is_reduced) reducer_->reduce_now(position_ == 0);
    LOCKSTEP_CHECK(targets > 0, Error,
                   "Accumulation: the window's micro-batches have no targets on any rank");
    mean_loss_ = loss_ / targets;
    count_ = static_cast<int64_t>(targets);
    average(targets);
  } catch (...) {
    drop_window();
    throw;
  }
  work_ = loss_work_ = nullptr;
  position_ = 0;
  targets_ = 0;
  loss_ = Tensor();
  accumulated_.clear();
  return true;
}

/// What DDP left is the sum over the window, averaged over the ranks.
void Accumulation::average(double targets) {
  const double factor = static_cast<double>(group_.size()) / targets;
  if (reducer_) return reducer_->scale_reduced(factor);
  NoGradGuard guard;
  for (Tensor& p : parameters_)  // a kept gradient is not changed
    if (const Tensor g = p.grad(); g.defined() && p.requires_grad()) p.set_grad(g * factor);
}

bool Accumulation::step(optim::Optimizer& optimizer, bool close) {
  bool stepped = false;
  while (finish(close)) {
    optimizer.step();
    optimizer.zero_grad();
    stepped = true;
    if (!close) break;
  }
  return stepped;
}

}  // namespace lockstep::dist
