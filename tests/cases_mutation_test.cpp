// What happens to a model after it was wrapped: parameters are frozen or moved, gradients are made around the
// wrapper or by autograd::grad. Each is followed, or refused by name on every rank, or said in a warning;
// ranks never drift apart in silence. Expected numbers are worked by hand.
#include "cases.h"

namespace {

using namespace cases;

double own(const Group& g) { return g.rank() + 1.0; }
double mean_x(const Group& g) { return (g.size() + 1) / 2.0; }

Tensor sum_of(DistributedDataParallel<Two>& net, double x) {
  auto [ya, yb] = net(f64(x));
  return ya + yb;
}

// ---- frozen and unfrozen ----

void frozen_everywhere(Group g) {
  for (const bool find : {false, true})
    for (const bool b_first : {false, true})
      for (const auto& options : layouts({.find_unused_parameters = find})) {
        DistributedDataParallel net{Two{}, g, options};
        Two& m = net.module();
        Tensor frozen = b_first ? m.b : m.a, other = b_first ? m.a : m.b;
        optim::SGD opt{net.parameters(), {.lr = 0.125}};
        auto step = [&](const std::string& what) {
          net.zero_grad();
          sum_of(net, own(g)).backward();
          near(other.grad().item<double>(), mean_x(g), "the other gradient, " + what);
          in_step(g, net);
          opt.step();
        };
        step("before");
        frozen.requires_grad_(false);
        const double value = frozen.item<double>();
        for (int k = 0; k < 2; ++k) {
          step("while it is frozen");
          require(frozen.item<double>() == value, "a frozen value moved");
          require(!frozen.grad().defined(), "a frozen parameter got a gradient");
        }
        frozen.requires_grad_(true);
        for (int k = 0; k < 2; ++k) {
          step("after");
          near(frozen.grad().item<double>(), mean_x(g), "gradient after");
        }
        near(frozen.item<double>(), value - 0.25 * mean_x(g), "two steps after");
      }
}

/// What the gradient of a parameter is when it is frozen, different on every rank.
enum class Kept { scaled, assigned, alias, local, local_after_sync };

/// A frozen parameter keeps its gradient bit for bit, though its bucket is reduced; trained again, the
/// gradient is what the next backward adds to and averages.
void frozen_gradient_stays(Group g) {
  using enum Kept;
  const double own_x = own(g), mean = mean_x(g);
  auto kept_on = [&](Kept kept, int r) {
    const double x = r + 1.0;
    return kept == scaled || kept == alias ? mean * x / 3
           : kept == assigned              ? x / 7
           : kept == local                 ? x
                                           : mean + x;
  };
  for (const bool find : {false, true})
    for (const bool b_first : {false, true})
      for (const Kept kept : {scaled, assigned, alias, local, local_after_sync})
        for (const auto& options : layouts({.find_unused_parameters = find})) {
          DistributedDataParallel net{Two{}, g, options};
          Two& m = net.module();
          Tensor frozen = b_first ? m.b : m.a, other = b_first ? m.a : m.b;
          if (kept != local) sum_of(net, own_x).backward();
          if (kept == scaled || kept == alias) frozen.set_grad(frozen.grad().mul_(own_x / 3));
          if (kept == alias) frozen.set_grad(frozen.grad().detach());
          if (kept == assigned) frozen.set_grad(f64(own_x / 7));
          if (kept == local || kept == local_after_sync) {
            auto guard = net.no_sync();
            sum_of(net, own_x).backward();
          }
          const double want = frozen.grad().item<double>();
          near(want, kept_on(kept, g.rank()), "the gradient before");
          for (int k = 1; k <= 3; ++k) {
            other.set_grad({});
            const Tensor sum = sum_of(net, k * own_x);
            if (k == 1) frozen.requires_grad_(false);  // while a graph reaches it
            (k == 1 ? sum : sum_of(net, k * own_x)).backward();
            near(other.grad().item<double>(), k * mean, "the other gradient");
            require(frozen.grad().item<double>() == want, "a frozen gradient moved");
          }
          frozen.requires_grad_(true);
          other.set_grad({});
          require(frozen.grad().item<double>() == want, "a gradient moved when it was unfrozen");
          double added = mean;
          if (find && (kept == local || kept == local_after_sync)) {
            // What local backwards left is due, though this backward adds nothing.
            auto [ya, yb] = net(f64(own_x));
            (b_first ? ya : yb).backward();
            added = 0;
          } else {
            sum_of(net, own_x).backward();
          }
          near(frozen.grad().item<double>(),
               mean_over(g, [&](int r) { return kept_on(kept, r); }) + added, "trained again");
          near(other.grad().item<double>(), mean, "the other gradient at the end");
          in_step(g, net);
        }
}

/// When the wrapper goes, a frozen gradient moves out of the bucket like any other.
void frozen_when_the_wrapper_goes(Group g) {
  Two module;
  {
    DistributedDataParallel net{module, g};
    sum_of(net, own(g)).backward();
    module.b.grad().mul_(own(g));
    module.b.requires_grad_(false);
  }
  near(module.b.grad().item<double>(), mean_x(g) * own(g), "the frozen gradient");
  module.b.requires_grad_(true);
  module(f64(own(g))).second.backward();
  near(module.b.grad().item<double>(), mean_x(g) * own(g) + own(g), "a bare module's gradient");
}

void frozen_on_one_rank(Group g) {
  for (int odd = 0; odd < g.size(); ++odd)
    for (const bool find : {false, true})
      for (const auto& options : layouts({.find_unused_parameters = find})) {
        DistributedDataParallel net{Two{}, g, options};
        sum_of(net, own(g)).backward();
        net.zero_grad();
        if (g.rank() == odd) net.module().b.requires_grad_(false);
        const int other = odd == 0 ? 1 : odd;
        refuses(g,
                {"b: requires_grad changed after wrapping", str_cat("rank 0 ", odd != 0),
                 str_cat("rank ", other, odd == 0 ? " true" : " false")},
                [&] { sum_of(net, own(g)).backward(); });
        same_bits(g, net.module().a, "a");
      }
}

void unfrozen_after_wrapping(Group g) {
  for (const bool find : {false, true})
    for (int odd = -1; odd < g.size(); ++odd) {  // -1: on every rank
      Two module;
      module.b.requires_grad_(false);
      DistributedDataParallel net{module, g, {.find_unused_parameters = find}};
      sum_of(net, own(g)).backward();
      near(module.a.grad().item<double>(), mean_x(g), "a.grad");
      net.zero_grad();
      if (odd < 0 || g.rank() == odd) module.b.requires_grad_(true);
      refuses(g, {"b: requires_grad changed after wrapping"},
              [&] { sum_of(net, own(g)).backward(); });
    }
}

// ---- moved, or replaced ----

void to_another_dtype_and_back(Group g) {
  for (const auto& options : layouts()) {
    DistributedDataParallel net{Two{}, g, options};
    Two& m = net.module();
    sum_of(net, own(g)).backward();
    net.zero_grad();
    m.to(DType::f32);
    refuses(g, {"f64", "f32"}, [&] {
      auto [ya, yb] = net(scalar(own(g)));
      (ya + yb).backward();
    });
    m.to(DType::f64);
    // Reduced as before, or refused by name; never local in silence.
    std::string text;
    try {
      net.zero_grad();
      sum_of(net, own(g)).backward();
      near(m.a.grad().item<double>(), mean_x(g), "a.grad after the way back");
      near(m.b.grad().item<double>(), mean_x(g), "b.grad after the way back");
    } catch (const Error& e) {
      text = e.what();
    }
    require(text.empty() || contains(text, "a"), text);
    same_bits(g, f64(text.empty()), "whether it is refused");
  }
}

void replaced_storage(Group g) {
  for (const auto& options : layouts()) {
    DistributedDataParallel net{Two{}, g, options};
    Two& m = net.module();
    sum_of(net, own(g)).backward();
    // Loading replaces values and keeps the parameters.
    m.load_state_dict({{"a", f64(5)}, {"b", f64(6)}});
    net.zero_grad();
    sum_of(net, own(g)).backward();
    near(m.a.grad().item<double>(), mean_x(g), "a.grad after loading");
    in_step(g, net);
    // Another parameter in the place of one that is known.
    net.zero_grad();
    m.b = nn::Parameter(f64(8));
    std::string text;
    try {
      sum_of(net, own(g)).backward();
      near(m.b.grad().item<double>(), mean_x(g), "the gradient of a replaced parameter");
    } catch (const Error& e) {
      text = e.what();
    }
    require(text.empty() || contains(text, "b"), text);
  }
}

/// Found on every rank, also where it happened on one, and where an unused parameter would be legal.
void replaced_on_one_rank(Group g) {
  DistributedDataParallel net{Two{}, g, {.find_unused_parameters = true}};
  sum_of(net, own(g)).backward();
  if (g.rank() == g.size() - 1) net.module().b = nn::Parameter(f64(8));
  sum_of(net, own(g)).backward();
}

/// The hooks go with the wrapper, also after an exception.
void wrapper_removed(Group g) {
  Two module;
  {
    DistributedDataParallel net{module, g};
    refuses(g, {"b received no gradient"}, [&] { net(f64(own(g))).first.backward(); });
  }
  module.zero_grad();
  auto [ya, yb] = module(f64(own(g)));
  (ya + yb).backward();
  near(module.a.grad().item<double>(), own(g), "a bare module's gradient");
  no_warning();
  module.zero_grad();
  DistributedDataParallel again{module, g};
  sum_of(again, own(g)).backward();
  near(module.a.grad().item<double>(), mean_x(g), "wrapped again");
}

// ---- around the wrapper ----

void through_the_inner_module(Group g) {
  for (const auto& options : layouts()) {
    Two inner;
    DistributedDataParallel net{inner, g, options};
    optim::SGD opt{net.parameters(), {.lr = 0.125}};
    for (int step = 0; step < 2; ++step) {
      opt.zero_grad();
      auto [ya, yb] = inner(f64(own(g)));
      (ya + yb).backward();
      near(inner.a.grad().item<double>(), own(g), "local");
      opt.step();
    }
    near(inner.a.item<double>(), 2 - 0.25 * own(g), "a rank's own a");
    one_warning(g, "without a forward");
    opt.zero_grad();
    sum_of(net, own(g)).backward();
    near(inner.a.grad().item<double>(), mean_x(g), "through the wrapper");
    near(inner.b.grad().item<double>(), mean_x(g), "through the wrapper");
    // A local gradient that was not cleared is reduced with the next, once.
    opt.step();
    opt.zero_grad();
    auto [ya, yb] = inner(f64(own(g)));
    (ya + yb).backward();
    sum_of(net, own(g)).backward();
    near(inner.a.grad().item<double>(), 2 * mean_x(g), "the whole gradient");
    no_warning();
  }
}

/// Between a forward through the wrapper and the optimizer's step its flag holds.
void flag_holds_until_the_step(Group g) {
  DistributedDataParallel net{Two{}, g};
  sum_of(net, own(g)).backward();
  auto [ya, yb] = net.module()(f64(own(g)));
  (ya + yb).backward();
  near(net.module().a.grad().item<double>(), 2 * mean_x(g), "synchronised");
  in_step(g, net);
  no_warning();
}

/// a x + b
struct Affine : nn::Module {
  nn::Parameter a{f64(2)}, b{f64(3)};
  Tensor forward(Tensor x) { return a * x + b; }
  LOCKSTEP_MODULE(Affine, a, b)
};

/// A write between forward and backward that backward has no need of: still synchronised.
void written_between_forward_and_backward(Group g) {
  for (const auto& options : layouts())
    for (const bool alone : {false, true}) {
      DistributedDataParallel net{Affine{}, g, options};
      Affine& m = net.module();
      const Tensor y = net(f64(own(g)));
      {
        const NoGradGuard guard;
        if (!alone || g.rank() == 0) m.b.fill_(alone ? 3 : 4);
      }
      y.backward();
      near(m.a.grad().item<double>(), mean_x(g), "a.grad");
      near(m.b.grad().item<double>(), 1, "b.grad");
      in_step(g, net);
      no_warning();
    }
}

// ---- derivatives of derivatives ----

void create_graph(Group g) {
  for (const auto& options : layouts()) {
    DistributedDataParallel net{Two{}, g, options};
    Two& m = net.module();
    for (int step = 0; step < 2; ++step) {
      net.zero_grad();
      sum_of(net, own(g)).square().backward({}, {.create_graph = true});  // (5 x)^2
      const double want = mean_over(g, [](int r) { return 10.0 * (r + 1) * (r + 1); });
      near(m.a.grad().item<double>(), want, "a.grad");
      near(m.b.grad().item<double>(), want, "b.grad");
      require(g.size() == 1 || !m.a.grad().requires_grad(), "an averaged gradient has a graph");
      in_step(g, net);
    }
    net.zero_grad();  // on one rank the gradient's graph holds the parameter, which holds the gradient
    if (g.size() == 1)
      no_warning();
    else
      one_warning(g, "all-reduce");
  }
}

void grad_leaves_nothing_behind(Group g) {
  for (const bool static_graph : {false, true})
    for (const auto& options : layouts({.static_graph = static_graph})) {
      const auto recorder = recording(g);
      DistributedDataParallel net{Two{}, Group(recorder), options};
      Two& m = net.module();
      recorder->log().clear();
      for (int step = 0; step < 2; ++step) {
        net.zero_grad();
        if (step == 0 || g.rank() == 0) {  // on all ranks, then on one alone
          const Tensor loss = sum_of(net, own(g)).square();
          near(autograd::grad({loss}, {m.a, m.b})[1].item<double>(), 10 * own(g) * own(g), "grad");
        }
        require(!m.a.grad().defined(), "grad wrote a gradient");
        require(step > 0 || recorder->log().empty(), "grad communicates");
        sum_of(net, own(g)).backward();
        near(m.a.grad().item<double>(), mean_x(g), "a.grad in the next step");
        in_step(g, net);
      }
      no_warning();
    }
}

/// The gradient of a gradient: x (d out / d x)^2 with out = (a + b) x.
void gradient_penalty(Group g) {
  for (const auto& options : layouts()) {
    DistributedDataParallel net{Two{}, g, options};
    Two& m = net.module();
    for (int step = 0; step < 2; ++step) {
      net.zero_grad();
      Tensor x = f64(own(g)).requires_grad_();
      auto [ya, yb] = net(x);
      const Tensor out = ya + yb;
      const Tensor slope = autograd::grad({out}, {x}, {}, {.create_graph = true})[0];
      (out + slope.square() * own(g)).backward();
      near(m.a.grad().item<double>(), 11 * mean_x(g), "a.grad");  // x + 2 (a + b) x
      near(m.b.grad().item<double>(), 11 * mean_x(g), "b.grad");
      in_step(g, net);
    }
    no_warning();
  }
}

}  // namespace

const std::vector<cases::Case>& cases::all() {
  static const std::vector<Case> list{
      {"frozen on all ranks, and unfrozen again", 2, frozen_everywhere},
      {"frozen on all of three ranks", 3, frozen_everywhere},
      {"a frozen gradient stays", 2, frozen_gradient_stays},
      {"a frozen gradient stays on three ranks", 3, frozen_gradient_stays},
      {"frozen when the wrapper goes", 2, frozen_when_the_wrapper_goes},
      {"frozen on one of two ranks", 2, frozen_on_one_rank},
      {"frozen on one of three ranks", 3, frozen_on_one_rank},
      {"frozen when wrapped, and trained later", 3, unfrozen_after_wrapping},
      {"moved to another dtype and back", 2, to_another_dtype_and_back},
      {"values loaded, a parameter replaced", 2, replaced_storage},
      {"a parameter replaced on one rank",
       2,
       replaced_on_one_rank,
       {"b is not the parameter that it was", "rank 1"}},
      {"the wrapper is gone", 2, wrapper_removed},
      {"a backward through the inner module", 2, through_the_inner_module},
      {"a backward through the inner module on three ranks", 3, through_the_inner_module},
      {"the flag holds until the step", 3, flag_holds_until_the_step},
      {"written between forward and backward", 2, written_between_forward_and_backward},
      {"create_graph on one rank", 1, create_graph},
      {"create_graph on two ranks", 2, create_graph},
      {"autograd::grad leaves nothing behind", 2, grad_leaves_nothing_behind},
      {"a gradient penalty", 3, gradient_penalty},
  };
  return list;
}
