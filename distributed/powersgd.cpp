// PowerSGD's two stages: P = M Q is launched with the bucket; when the work is waited for, P is
// orthogonalised, Q = M^T P is reduced, and P Q^T replaces the gradient.
#include <lockstep/distributed/powersgd.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <optional>
#include <unordered_map>

#include <lockstep/distributed/ddp/orthogonalize.h>
#include <lockstep/tensor/node.h>
#include <lockstep/tensor/ops/elementwise.h>
#include <lockstep/tensor/ops/matmul.h>

namespace lockstep::dist {
namespace {

/// What is remembered of one parameter.
struct Memory {
  Tensor parameter;  // keeps the address by which it is known
  Tensor error;      // [n, m]; undefined: zeros
  Tensor q;          // [m, r]; undefined: to be drawn
};

/// One gradient between the two collectives.
struct Matrix {
  size_t place;     // of its Memory
  Tensor gradient;  // shaped like the parameter
  Tensor m;         // [n, m], with the error added
  Tensor p, q;      // [n, r], [m, r]: parts of what is sent
};

int64_t rank_of(const Tensor& gradient, const PowerSGDOptions& options) {
  const int64_t n = gradient.size(0), m = gradient.numel() / n;
  return std::min({n, m, options.matrix_approximation_rank});
}

bool worth_compressing(const Tensor& gradient, const PowerSGDOptions& options) {
  if (gradient.dim() < 2 || gradient.numel() == 0) return false;
  const int64_t n = gradient.size(0), m = gradient.numel() / n;
  return static_cast<double>((n + m) * rank_of(gradient, options)) * options.min_compression_rate <
         static_cast<double>(n * m);
}

bool is_finite(const Tensor& t) {
  for (double v : t.to_vector<double>())
    if (!std::isfinite(v)) return false;
  return true;
}

/// A collective and what follows it when it is waited for.
class StagedWork final : public Work {
 public:
  StagedWork(WorkPtr first, std::function<void(Milliseconds)> rest, Tensor result)
      : first_(std::move(first)), rest_(std::move(rest)), result_(std::move(result)) {}
  void wait(Milliseconds timeout) override {
    if (failure_) std::rethrow_exception(failure_);
    if (!rest_) return;
    first_->wait(timeout);
    try {
      std::exchange(rest_, nullptr)(timeout);
    } catch (...) {
      failure_ = std::current_exception();
      throw;
    }
    run_then();
  }
  bool is_completed() override {
    first_->is_completed();
    return !rest_ || failure_;
  }
  std::exception_ptr exception() const override {
    return failure_ ? failure_ : first_->exception();
  }
  uint64_t sequence_number() const override { return first_->sequence_number(); }
  std::vector<Tensor> result() const override { return {result_}; }

 private:
  WorkPtr first_;
  std::function<void(Milliseconds)> rest_;
  Tensor result_;
  std::exception_ptr failure_;
};

}  // namespace

struct PowerSGD::State {
  PowerSGDOptions options;
  int64_t iteration = 0;
  CompressionStats stats;
  std::vector<Memory> memories;  // by parameter, in the order in which they were met
  std::unordered_map<const TensorBody*, size_t> places;

  size_t place_of(const Tensor& parameter) {
    const auto [it, is_new] = places.try_emplace(parameter.ref().get(), places.size());
    if (is_new) {
      memories.resize(std::max(memories.size(), places.size()));
      memories[it->second].parameter = parameter;
    }
    return it->second;
  }

  /// Whether what was loaded for a gradient fits it.
  void check(size_t place, const Tensor& kept, std::string_view name, const Shape& shape,
             DType dtype) const {
    LOCKSTEP_CHECK(kept.shape() == shape, ShapeError, "PowerSGD: ", name, ".", place, " is ",
                   kept.shape(), ", parameter ", place, " of shape ",
                   memories[place].parameter.shape(), " needs ", shape,
                   "; load the state of the same model and matrix_approximation_rank");
    LOCKSTEP_CHECK(kept.dtype() == dtype, DTypeError, "PowerSGD: ", name, ".", place, " is ",
                   kept.dtype(), ", the gradient ", dtype);
  }

  /// The gradient as a matrix with its error added, and its Q, ready for use.
  void prepare(Matrix& x) {
    Memory& memory = memories[x.place];
    const Shape shape{x.gradient.size(0), x.gradient.numel() / x.gradient.size(0)};
    x.m = x.gradient.reshape(shape);
    if (options.use_error_feedback && memory.error.defined()) {
      check(x.place, memory.error, "error", shape, x.m.dtype());
      x.m.add_(memory.error);
    }
    if (options.warm_start && memory.q.defined()) {
      check(x.place, memory.q, "q", x.q.shape(), x.m.dtype());
      x.q.copy_(memory.q);
    } else {
      x.q.zero_();
    }
    draw_zero_columns(x.q, {.seed = options.random_seed,
                            .offset = static_cast<uint64_t>(iteration) << 32 | x.place});
    orthogonalize(x.q, options.orthogonalization_epsilon);
  }

  void finish(Matrix& x) {
    Memory& memory = memories[x.place];
    const Tensor approximation = matmul(x.p, x.q.t());  // [n, m]
    const bool keep = is_finite(x.q);
    if (options.use_error_feedback) memory.error = keep ? x.m - approximation : Tensor();
    memory.q = keep && options.warm_start ? x.q : Tensor();
    x.gradient.copy_(approximation.view(x.gradient.shape()));
  }
};

PowerSGD::PowerSGD(PowerSGDOptions o) : state_(std::make_shared<State>()) {
  LOCKSTEP_CHECK(o.matrix_approximation_rank >= 1, ValueError,
                 "PowerSGD: matrix_approximation_rank is at least 1, got ",
                 o.matrix_approximation_rank);
  LOCKSTEP_CHECK(o.start_powerSGD_iter >= 0, ValueError,
                 "PowerSGD: start_powerSGD_iter is at least 0, got ", o.start_powerSGD_iter);
  LOCKSTEP_CHECK(o.min_compression_rate >= 0, ValueError,
                 "PowerSGD: min_compression_rate is at least 0, got ", o.min_compression_rate);
  LOCKSTEP_CHECK(o.orthogonalization_epsilon >= 0, ValueError,
                 "PowerSGD: orthogonalization_epsilon is at least 0, got ",
                 o.orthogonalization_epsilon);
  state_->options = o;
}

const PowerSGDOptions& PowerSGD::options() const { return state_->options; }
int64_t PowerSGD::iteration() const { return state_->iteration; }
PowerSGD::CompressionStats PowerSGD::compression_stats() const { return state_->stats; }

WorkPtr PowerSGD::operator()(GradBucket& bucket) const {
  NoGradGuard no_grad;
  State& s = *state_;
  std::vector<size_t> places;
  for (const Tensor& p : bucket.parameters) places.push_back(s.place_of(p));
  const bool plainly = s.iteration < s.options.start_powerSGD_iter;
  const auto count_step = [&] { s.iteration += bucket.is_last; };
  if (plainly) {
    count_step();
    return bucket.group->all_reduce(bucket.buffer, ReduceOp::avg,
                                    {.label = str_cat("DDP bucket ", bucket.index)});
  }

  std::vector<Matrix> matrices;
  std::vector<Tensor> plain;
  int64_t plain_size = 0, p_size = 0, q_size = 0;
  for (size_t i = 0; i < bucket.gradients.size(); ++i) {
    const Tensor& g = bucket.gradients[i];
    s.stats.numel_before += g.numel();
    if (worth_compressing(g, s.options)) {
      matrices.push_back({places[i], g, {}, {}, {}});
      p_size += rank_of(g, s.options) * g.size(0);
      q_size += rank_of(g, s.options) * (g.numel() / g.size(0));
    } else {
      plain.push_back(g);
      plain_size += g.numel();
    }
  }
  s.stats.numel_after += plain_size + p_size + q_size;

  const TensorOptions like{.dtype = bucket.buffer.dtype(), .device = bucket.buffer.device()};
  // What is averaged plainly, then all P; in the second collective all Q.
  const Tensor first = empty({plain_size + p_size}, like), second = empty({q_size}, like);
  int64_t at = 0, at_q = 0;
  for (const Tensor& g : plain) {
    first.narrow(0, at, g.numel()).copy_(g.reshape({-1}));
    at += g.numel();
  }
  for (Matrix& x : matrices) {
    const int64_t r = rank_of(x.gradient, s.options), n = x.gradient.size(0),
                  m = x.gradient.numel() / n;
    x.p = first.narrow(0, at, n * r).view({n, r});
    x.q = second.narrow(0, at_q, m * r).view({m, r});
    at += n * r;
    at_q += m * r;
    s.prepare(x);
    x.p.copy_(matmul(x.m, x.q));
  }
  count_step();
  ProcessGroup* group = bucket.group;
  const std::string label = str_cat("DDP bucket ", bucket.index, " by PowerSGD");
  WorkPtr work = group->all_reduce(first, ReduceOp::sum, {.label = label + ", P"});
  auto rest = [state = state_, matrices = std::move(matrices), plain = std::move(plain), first,
               second, group, label](Milliseconds timeout) mutable {
    NoGradGuard guard;
    int64_t from = 0;
    for (Tensor& g : plain) {
      g.copy_(first.narrow(0, from, g.numel()).view(g.shape())).mul_(1.0 / group->size());
      from += g.numel();
    }
    if (matrices.empty()) return;
    for (Matrix& x : matrices) {
      orthogonalize(x.p, state->options.orthogonalization_epsilon);
      x.q.copy_(matmul(x.m.t(), x.p));
    }
    group->all_reduce(second, ReduceOp::avg, {.label = label + ", Q"})->wait(timeout);
    for (Matrix& x : matrices) state->finish(x);
  };
  return std::make_shared<StagedWork>(std::move(work), std::move(rest), bucket.buffer);
}

NamedTensors PowerSGD::state_dict() const {
  NoGradGuard no_grad;
  NamedTensors state{
      {"iteration", full({}, static_cast<double>(state_->iteration), {.dtype = DType::i64})}};
  for (size_t k = 0; k < state_->memories.size(); ++k) {
    const Memory& memory = state_->memories[k];
    if (memory.error.defined()) state.emplace_back(str_cat("error.", k), memory.error.clone());
    if (memory.q.defined()) state.emplace_back(str_cat("q.", k), memory.q.clone());
  }
  return state;
}

void PowerSGD::load_state_dict(const NamedTensors& state) {
  NoGradGuard no_grad;
  constexpr size_t kMost = 1 << 20;  // parameters; a limit for corrupt files
  std::optional<int64_t> iteration;
  std::vector<Memory> memories(state_->memories.size());
  for (const auto& [name, t] : state) {
    if (name == "iteration") {
      iteration = t.item<int64_t>();
      continue;
    }
    const size_t dot = name.find('.');
    const std::string_view kind = std::string_view(name).substr(0, dot);
    size_t place = kMost;
    const char *begin = name.data() + std::min(name.size(), dot + 1),
               *end = name.data() + name.size();
    const auto [stop, problem] = std::from_chars(begin, end, place);
    LOCKSTEP_CHECK(dot != std::string::npos && (kind == "error" || kind == "q") && stop == end &&
                       problem == std::errc() && place < kMost,
                   ValueError, "PowerSGD::load_state_dict: \"", name,
                   "\" is not iteration, error.<number> or q.<number>");
    LOCKSTEP_CHECK(t.dim() == 2 && is_floating(t.dtype()), ValueError,
                   "PowerSGD::load_state_dict: ", name, " is a floating matrix, got ", t.dtype(),
                   " ", t.shape());
    memories.resize(std::max(memories.size(), place + 1));
    (kind == "q" ? memories[place].q : memories[place].error) = t.detach().clone();
  }
  LOCKSTEP_CHECK(iteration && *iteration >= 0, ValueError,
                 "PowerSGD::load_state_dict: the state needs \"iteration\", at least 0");
  for (size_t k = 0; k < state_->memories.size(); ++k)
    memories[k].parameter = state_->memories[k].parameter;
  state_->memories = std::move(memories);
  state_->iteration = *iteration;
}

}  // namespace lockstep::dist
