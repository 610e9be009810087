// Parameters that a backward does not use, on some ranks or on all: with find_unused_parameters they are left
// alone or averaged, without it they are an error of the same backward on every rank; never a hang, and never
// ranks that drift apart in silence. Expected numbers are worked by hand.
#include "cases.h"

namespace {

using namespace cases;

struct Layers : nn::Module {
  nn::Linear a{3, 2}, b{3, 2};
  std::pair<Tensor, Tensor> forward(Tensor x) { return {a(x), b(x)}; }
  LOCKSTEP_MODULE(Layers, a, b)
};

/// x = rank + 1, whose mean is (W + 1) / 2.
Tensor own(const Group& g) { return f64(g.rank() + 1.0); }
double mean_x(const Group& g) { return (g.size() + 1) / 2.0; }

// ---- used by none ----

/// Three steps in which b has no gradient, or one that the user assigned, different on each rank.
void leave_alone(const Group& g, DistributedDataParallelOptions options, bool adam, bool assigned) {
  const auto recorder = recording(g);
  DistributedDataParallel net{Two{}, Group(recorder), std::move(options)};
  Two& m = net.module();
  optim::SGD sgd{net.parameters(), {.lr = 0.1, .momentum = 0.9, .weight_decay = 0.1}};
  optim::AdamW adamw{net.parameters(), {.lr = 0.1, .weight_decay = 0.1}};
  double a = 2, momentum = 0;
  for (int step = 0; step < 3; ++step) {
    net.zero_grad();
    if (assigned) m.b.set_grad(f64(7.0 + g.rank()));
    recorder->log().clear();
    net(own(g)).first.backward();
    require(recorder->reductions() == net.stats().buckets.size(), "one reduction per bucket");
    near(m.a.grad().item<double>(), mean_x(g), "a.grad");
    if (assigned)
      require(m.b.grad().item<double>() == 7.0 + g.rank(), "b.grad is what was assigned");
    else
      require(!m.b.grad().defined(), "b.grad came into being");
    adam ? adamw.step() : sgd.step();
    same_bits(g, m.a, "a");
    if (!adam) {
      momentum = (step ? 0.9 * momentum : 0) + mean_x(g) + 0.1 * a;
      a -= 0.1 * momentum;
      near(m.a.item<double>(), a, "a");
    }
  }
  require(assigned || m.b.item<double>() == 3, "b moved without a gradient");
}

void unused_by_all(Group g) {
  for (const bool static_graph : {false, true})
    for (const auto& options :
         layouts({.find_unused_parameters = true, .static_graph = static_graph}))
      for (const bool adam : {false, true})
        for (const bool assigned : {false, true}) leave_alone(g, options, adam, assigned);
}

/// A gradient of earlier steps is neither averaged again nor lost, and counts where one rank adds to it.
void gradient_of_earlier_steps(Group g) {
  for (const auto& options : layouts({.find_unused_parameters = true})) {
    DistributedDataParallel net{Two{}, g, options};
    Two& m = net.module();
    const double mean = mean_x(g);
    auto both = [&] {
      auto [ya, yb] = net(own(g));
      (ya + yb).backward();
    };
    both();
    net(own(g)).first.backward();
    near(m.a.grad().item<double>(), 2 * mean, "a, twice");
    near(m.b.grad().item<double>(), mean, "b, of the first backward");
    auto [ya, yb] = net(f64(g.size()));
    (g.rank() == 0 ? ya + yb : ya).backward();
    near(m.b.grad().item<double>(), mean + 1, "b, and W / W of rank 0");
    near(m.a.grad().item<double>(), 2 * mean + g.size(), "a");
    in_step(g, net);
    net.zero_grad(false);
    net(own(g)).first.backward();
    require(m.b.grad().defined() && m.b.grad().item<double>() == 0, "zeros stay zeros");
    net.zero_grad();
    net(own(g)).first.backward();
    require(!m.b.grad().defined(), "none stays none");
    both();
    near(m.b.grad().item<double>(), mean, "used again");
  }
}

// ---- used by some ----

void used_by_one(Group g) {
  const int size = g.size();
  for (int user = 0; user < size; ++user)
    for (const auto& options : layouts({.find_unused_parameters = true}))
      for (const bool assigned : {false, true}) {
        DistributedDataParallel net{Two{}, g, options};
        Two& m = net.module();
        optim::SGD opt{net.parameters(), {.lr = 0.1, .momentum = 0.9}};
        for (int step = 0; step < 2; ++step) {
          opt.zero_grad();
          // What a rank that does not use b was told by hand goes into the mean.
          if (assigned && g.rank() != user) m.b.set_grad(f64(7));
          auto [ya, yb] = net(f64(1));
          (g.rank() == user ? ya + 4.0 * yb : ya).backward();
          near(m.a.grad().item<double>(), 1, "a.grad");
          near(m.b.grad().item<double>(), (4.0 + (assigned ? 7 * (size - 1) : 0)) / size, "b.grad");
          opt.step();
          in_step(g, net);
        }
      }
}

struct Three : nn::Module {
  nn::Parameter p{f64(1)}, q{f64({2, 3})}, r{f64(4)};
  std::vector<Tensor> forward(Tensor x) { return {p * x, (q * x).sum(), r * x}; }
  LOCKSTEP_MODULE(Three, p, q, r)
};

/// Each rank uses a parameter of its own, another one in each step.
void each_its_own(Group g) {
  for (const auto& options : layouts({.find_unused_parameters = true})) {
    DistributedDataParallel net{Three{}, g, options};
    for (int step = 0; step < 4; ++step) {
      net.zero_grad();
      const auto at = [&](int rank) { return static_cast<size_t>(rank + step) % 3; };
      net(own(g))[at(g.rank())].backward();
      for (size_t i = 0; i < 3; ++i) {
        double want = 0;
        bool used = false;
        for (int r = 0; r < g.size(); ++r)
          if (at(r) == i) want += (r + 1.0) / g.size(), used = true;
        const Tensor grad = net.parameters()[i].grad();
        require(grad.defined() == used, "a gradient where one is due");
        for (const double v : used ? grad.to_vector<double>() : std::vector<double>{})
          near(v, want, "gradient");
      }
      in_step(g, net);
    }
  }
}

// ---- an output that the loss does not use ----

struct InVector : nn::Module {
  nn::Parameter a{f64(2)}, b{f64(3)};
  std::vector<std::vector<Tensor>> forward(Tensor x) { return {{a * x}, {b * x, x}}; }
  LOCKSTEP_MODULE(InVector, a, b)
};
struct InMap : nn::Module {
  nn::Parameter a{f64(2)}, b{f64(3)};
  std::map<std::string, Tensor> forward(Tensor x) { return {{"used", a * x}, {"other", b * x}}; }
  LOCKSTEP_MODULE(InMap, a, b)
};
struct Answer {
  Tensor used;
  std::optional<Tensor> other;
  Tensor constant, absent;
};
struct InStruct : nn::Module {
  nn::Parameter a{f64(2)}, b{f64(3)};
  Answer forward(Tensor x) { return {a * x, b * x, (b * x).detach(), {}}; }
  LOCKSTEP_MODULE(InStruct, a, b)
};

template <class M>
void unused_output(const Group& g, const std::function<Tensor(DistributedDataParallel<M>&)>& first,
                   const std::function<Tensor(DistributedDataParallel<M>&)>& second) {
  for (const auto& options : layouts({.find_unused_parameters = true})) {
    DistributedDataParallel net{M{}, g, options};
    for (int step = 0; step < 3; ++step) {
      net.zero_grad();
      first(net).backward();
      near(net.module().a.grad().template item<double>(), mean_x(g), "a.grad");
      require(!net.module().b.grad().defined(), "b.grad came into being");
    }
  }
  for (const auto& options : layouts()) {
    DistributedDataParallel net{M{}, g, options};
    for (int step = 0; step < 3; ++step)
      refuses(g, {"b received no gradient on rank", "find_unused_parameters"},
              [&] { first(net).backward(); });
    (first(net) + second(net)).backward();
    near(net.module().a.grad().template item<double>(), mean_x(g), "a.grad after the errors");
    near(net.module().b.grad().template item<double>(), mean_x(g), "b.grad after the errors");
  }
}

void unused_outputs(Group g) {
  const Tensor x = own(g);
  unused_output<Two>(
      g, [&](auto& net) { return net(x).first; }, [&](auto& net) { return net(x).second; });
  unused_output<InVector>(
      g, [&](auto& net) { return net(x)[0][0]; }, [&](auto& net) { return net(x)[1][0]; });
  unused_output<InMap>(
      g, [&](auto& net) { return net(x).at("used"); },
      [&](auto& net) { return net(x).at("other"); });
  unused_output<InStruct>(
      g, [&](auto& net) { return net(x).used; }, [&](auto& net) { return *net(x).other; });
}

// ---- the flag is off ----

/// The very first step, which is the only one: it says so itself, on every rank.
void error_in_first_step(Group g) {
  for (int odd = -1; odd < g.size(); ++odd)  // -1: no rank uses b
    for (const bool buffers : {true, false})
      for (const auto& options : layouts({.broadcast_buffers = buffers})) {
        manual_seed(static_cast<uint64_t>(g.rank()));
        DistributedDataParallel net{Layers{}.to(DType::f64), g, options};
        const Tensor x = full({4, 3}, g.rank() + 1.0, {.dtype = DType::f64});
        refuses(g,
                {str_cat("b.weight, b.bias received no gradient on rank ", std::max(odd, 0)),
                 "find_unused_parameters"},
                [&] {
                  auto [ya, yb] = net(x);
                  (odd < 0 || g.rank() == odd ? ya.mean() : ya.mean() + yb.mean()).backward();
                });
        for (const Tensor& p : net.parameters())
          require(!p.grad().defined(), "a gradient is left after the error");
        optim::SGD opt{net.parameters(), {.lr = 0.1}};
        opt.step();
        in_step(g, net);
        auto [ya, yb] = net(x);
        (ya.mean() + yb.mean()).backward();
        for (const double v : net.module().b.weight.grad().to_vector<double>())
          near(v, mean_x(g) / 2, "b.weight.grad after the error");
        opt.step();
        in_step(g, net);
      }
}

// ---- accumulation ----

/// The local micro-batches use one layer and the synchronised one the other, or ranks differ in that.
void used_in_a_local_micro_batch(Group g) {
  for (const bool find : {true, false})
    for (const bool crosswise : {false, true})
      for (const auto& options : layouts({.find_unused_parameters = find})) {
        const auto recorder = recording(g);
        manual_seed(5);
        DistributedDataParallel net{Layers{}.to(DType::f64), Group(recorder), options};
        const Tensor x = full({4, 3}, g.rank() + 1.0, {.dtype = DType::f64});
        const bool b_first = crosswise && g.rank() % 2 == 1;
        for (int window = 0; window < 3; ++window) {
          net.zero_grad();
          recorder->log().clear();
          {
            const auto local = net.no_sync();
            auto [ya, yb] = net(x);
            (b_first ? yb : ya).sum().backward();
          }
          require(recorder->log().empty(), "a local backward communicates");
          auto [ya, yb] = net(x);
          (b_first ? ya : yb).sum().backward();
          for (const auto& [name, p] : net.named_parameters())
            for (const double v : p.grad().to_vector<double>())
              near(v, contains(name, "bias") ? 4 : 4 * mean_x(g), name + ".grad");
          require(recorder->reductions() == net.stats().buckets.size(), "one round in all");
          in_step(g, net);
        }
      }
}

void used_in_a_local_micro_batch_and_reduced_later(Group g) {
  DistributedDataParallel net{Two{}, g, {.find_unused_parameters = true}};
  Two& m = net.module();
  {
    const auto local = net.no_sync();
    net(own(g)).first.backward();
  }
  net.reduce_now();
  near(m.a.grad().item<double>(), mean_x(g), "a.grad");
  require(!m.b.grad().defined(), "b.grad came into being");
  net.zero_grad();
  // Rank 0 alone has used b in the local part.
  {
    const auto local = net.no_sync();
    auto [ya, yb] = net(own(g));
    (g.rank() == 0 ? ya + yb : ya).backward();
  }
  net(own(g)).first.backward();
  near(m.a.grad().item<double>(), 2 * mean_x(g), "a.grad");
  near(m.b.grad().item<double>(), 1.0 / g.size(), "b.grad");
}

// ---- frozen before wrapping, and never used ----

struct WithIdle : nn::Module {
  nn::Parameter w{f64(0)};
  nn::BatchNorm1d idle{3};
  Tensor forward(Tensor x) { return w * x; }
  LOCKSTEP_MODULE(WithIdle, w, idle)
};

void frozen_and_idle(Group g) {
  WithIdle module;
  module.to(DType::f64);
  module.idle.weight.requires_grad_(false);
  {
    NoGradGuard guard;
    module.idle.weight.fill_(g.rank() + 5.0);
    module.idle.bias.fill_(g.rank() + 8.0);
  }
  const auto recorder = recording(g);
  DistributedDataParallel net{module, Group(recorder), {.find_unused_parameters = true}};
  optim::SGD opt{net.parameters(), {.lr = 0.01, .momentum = 0.5}};
  // Each rank has points of its own on the line y = 3 x; sums of squares.
  const Tensor x = tensor<double>({0.5 + g.rank(), 1.0, -0.25 * (g.rank() + 1)});
  for (int step = 0; step < 500; ++step) {
    opt.zero_grad();
    recorder->log().clear();
    mse_loss(net(x), x * 3.0, Reduction::sum).backward();
    require(recorder->reductions() == net.stats().buckets.size(), "one reduction per bucket");
    opt.step();
  }
  near(module.w.item<double>(), 3, "w");
  same_bits(g, module.w, "w");
  require(module.idle.weight.to_vector<double>() == std::vector<double>(3, 5), "rank 0's weight");
  require(module.idle.bias.to_vector<double>() == std::vector<double>(3, 8), "rank 0's bias");
  require(!module.idle.bias.grad().defined(), "the idle bias has a gradient");
  for (const auto& bucket : net.stats().buckets)
    for (const std::string& name : bucket.parameters)
      require(name != "idle.weight", "a frozen parameter is in a bucket");
}

}  // namespace

const std::vector<cases::Case>& cases::all() {
  static const std::vector<Case> list{
      {"what no rank uses is left alone", 2, unused_by_all},
      {"what none of three ranks uses is left alone", 3, unused_by_all},
      {"a gradient of earlier steps is kept while it is not used", 2, gradient_of_earlier_steps},
      {"the same on three ranks", 3, gradient_of_earlier_steps},
      {"what one of two ranks uses is averaged over both", 2, used_by_one},
      {"what one of three ranks uses is averaged over all", 3, used_by_one},
      {"each of two ranks uses another parameter", 2, each_its_own},
      {"each of three ranks uses another parameter", 3, each_its_own},
      {"an output that the loss does not use, in any container", 2, unused_outputs},
      {"a first step that leaves out a layer is an error of that step", 2, error_in_first_step},
      {"the same where one of three ranks leaves it out", 3, error_in_first_step},
      {"a layer used in a local micro-batch alone", 2, used_in_a_local_micro_batch},
      {"the same on three ranks of which the second is different", 3, used_in_a_local_micro_batch},
      {"what local micro-batches left is reduced later", 3,
       used_in_a_local_micro_batch_and_reduced_later},
      {"a frozen parameter of an idle layer", 2, frozen_and_idle},
  };
  return list;
}
