// When a backward is synchronised: no_sync and what decides, several forwards and backwards, static graphs,
// and modules with buffers that run more than once before a backward (GANs). Expected numbers are worked by
// hand, or come from one process that has the whole batch.
#include "cases.h"

namespace {

using namespace cases;

// ---- the forward decides ----

double first(int rank) { return std::vector<double>{1, 2, 4}[static_cast<size_t>(rank)]; }
double second(int rank) { return std::vector<double>{3, 5, 8}[static_cast<size_t>(rank)]; }
double both(int rank) { return first(rank) + second(rank); }

/// a x + 2 b x
Tensor loss_of(DistributedDataParallel<Two>& net, double x) {
  auto [ya, yb] = net(f64(x));
  return ya + 2.0 * yb;
}
/// The gradients of `sum`, which is what the x's add up to.
void expect(DistributedDataParallel<Two>& net, double sum, const std::string& what) {
  near(net.module().a.grad().item<double>(), sum, "a.grad, " + what);
  near(net.module().b.grad().item<double>(), 2 * sum, "b.grad, " + what);
}

void local_then_synchronised(Group g) {
  for (const bool static_graph : {false, true})
    for (const auto& options : layouts({.static_graph = static_graph})) {
      const auto recorder = recording(g);
      DistributedDataParallel net{Two{}, Group(recorder), options};
      for (int window = 0; window < 3; ++window) {
        net.zero_grad();
        recorder->log().clear();
        {
          const auto outer = net.no_sync();
          { const auto inner = net.no_sync(); }
          const auto off = net.no_sync(false);
          loss_of(net, first(g.rank())).backward();
        }
        expect(net, first(g.rank()), "local");
        require(recorder->log().empty(), "a local backward communicates");
        loss_of(net, second(g.rank())).backward();
        expect(net, mean_over(g, both), "the window");  // 5.5 on two ranks
        require(recorder->reductions() == net.stats().buckets.size(), "one round");
        in_step(g, net);
      }
      no_warning();
    }
}

void forward_and_backward_differ(Group g) {
  for (const auto& options : layouts())
    for (const bool forward_inside : {true, false}) {
      DistributedDataParallel net{Two{}, g, options};
      {
        const auto local = net.no_sync();
        loss_of(net, first(g.rank())).backward();
      }
      Tensor y;
      {
        const auto local = net.no_sync(forward_inside);
        y = loss_of(net, second(g.rank()));
      }
      no_warning();
      {
        const auto local = net.no_sync(!forward_inside);
        y.backward();
      }
      expect(net, forward_inside ? both(g.rank()) : mean_over(g, both), "variant");
      one_warning(g, "forward");
      // What stayed local goes with the next.
      loss_of(net, 1).backward();
      expect(net, mean_over(g, both) + 1, "afterwards");
      in_step(g, net);
      no_warning();
    }
}

void several_forwards_and_backwards(Group g) {
  for (const auto& options : layouts()) {
    DistributedDataParallel net{Two{}, g, options};
    const double x = first(g.rank()), mean = mean_over(g, first);
    Tensor y1, y2;
    {
      const auto local = net.no_sync();
      y1 = loss_of(net, x);
    }
    y2 = loss_of(net, second(g.rank()));
    (y1 + y2).backward();
    expect(net, mean_over(g, both), "the last forward was outside");
    no_warning();

    net.zero_grad();
    y1 = loss_of(net, x);
    {
      const auto local = net.no_sync();
      y2 = loss_of(net, second(g.rank()));
    }
    (y1 + y2).backward();
    expect(net, both(g.rank()), "the last forward was inside");
    one_warning(g, "forward");

    net.zero_grad();
    y1 = loss_of(net, x);
    y1.backward({}, {.retain_graph = true});
    expect(net, mean, "the first backward");
    y1.backward();
    expect(net, 2 * mean, "the second backward");

    // An evaluation decides nothing.
    net.zero_grad();
    y1 = loss_of(net, x);
    {
      NoGradGuard guard;
      const auto local = net.no_sync();
      loss_of(net, 100);
    }
    y1.backward();
    expect(net, mean, "with an evaluation in between");
    in_step(g, net);
    no_warning();
  }
}

void different_numbers_of_local_backwards(Group g) {
  for (const auto& options : layouts()) {
    DistributedDataParallel net{Two{}, g, options};
    for (int window = 0; window < 2; ++window) {
      net.zero_grad();
      for (int i = 0; i < (g.rank() == 0 ? 1 : 3); ++i) {
        const auto local = net.no_sync();
        loss_of(net, first(g.rank())).backward();
      }
      loss_of(net, second(g.rank())).backward();
      expect(net, mean_over(g, [](int r) { return (r == 0 ? 1 : 3) * first(r) + second(r); }),
             "all that was accumulated");
      in_step(g, net);
      if (window == 0 && g.rank() == 0) {
        require(warnings().size() == 1, str_cat(warnings().size(), " warnings on rank 0"));
        require(contains(warnings()[0], "1") && contains(warnings()[0], "3"), warnings()[0]);
        warnings().clear();
      }
      no_warning();
    }
  }
}

/// No count has to be set for several synchronised backwards before a step.
void several_backwards_before_a_step(Group g) {
  for (const auto& options : layouts({.find_unused_parameters = true})) {
    DistributedDataParallel net{Two{}, g, options};
    optim::SGD opt{net.parameters(), {.lr = 0.5}};
    for (int i = 0; i < 3; ++i) loss_of(net, first(g.rank()) * (i + 1)).backward();
    const double mean = mean_over(g, first);
    expect(net, 6 * mean, "three backwards");
    opt.step();
    near(net.module().a.item<double>(), 2 - 3 * mean, "a");
    opt.zero_grad();
    auto [ya, yb] = net(f64(1));
    (g.rank() == 0 ? ya + 4.0 * yb : ya).backward();
    near(net.module().a.grad().item<double>(), 1, "a.grad");
    near(net.module().b.grad().item<double>(), 4.0 / g.size(), "b.grad");
    opt.step();
    in_step(g, net);
  }
}

// ---- static graphs ----

void forwards_without_backward(Group g) {
  for (const bool find : {false, true})
    for (const auto& options : layouts({.find_unused_parameters = find, .static_graph = true})) {
      const auto recorder = recording(g);
      DistributedDataParallel net{Two{}, Group(recorder), options};
      const double x = first(g.rank()), mean = mean_over(g, first);
      loss_of(net, 100);  // to warm up
      Tensor out1 = loss_of(net, x), out2 = loss_of(net, second(g.rank()));
      out2.backward();
      expect(net, mean_over(g, second), "the second output");
      out1.backward();
      expect(net, mean_over(g, both), "and the first");
      for (int step = 0; step < 3; ++step) {
        net.zero_grad();
        if (g.rank() == 0) {  // an evaluation on one rank alone
          net.eval();
          loss_of(net, 100);
          net.train();
        }
        recorder->log().clear();
        loss_of(net, x).backward();
        expect(net, mean, "a step");
        require(recorder->reductions() == net.stats().buckets.size() &&
                    recorder->log().size() == recorder->reductions(),
                "a static graph sends more than its buckets");
        out1 = loss_of(net, x), out2 = loss_of(net, second(g.rank()));
        (out1 + out2).backward();
        expect(net, mean + mean_over(g, both), "both outputs");
        in_step(g, net);
      }
    }
}

void changed_graph(Group g) {
  for (int odd = 0; odd < g.size(); ++odd)
    for (const auto& options : layouts({.static_graph = true})) {
      // A parameter less, and one more than in the first step.
      DistributedDataParallel less{Two{}, g, options}, more{Two{}, g, options};
      for (int step = 0; step < 2; ++step) {
        loss_of(less, first(g.rank())).backward();
        more(f64(1)).first.backward();
      }
      refuses(g, {"static_graph", "b ", str_cat("rank ", odd)}, [&] {
        auto [ya, yb] = less(f64(1));
        (g.rank() == odd ? ya : ya + yb).backward();
      });
      refuses(g, {"static_graph", "b ", str_cat("rank ", odd)}, [&] {
        auto [ya, yb] = more(f64(1));
        (g.rank() == odd ? ya + yb : ya).backward();
      });
    }
}

// ---- buffers, and several forwards before a backward ----

/// sum(lin(z) * buf), and each forward moves the buffer by the rank's own amount, in storage of its own.
struct Masked : nn::Module {
  nn::Linear lin{3, 2};
  nn::Buffer buf{f64({1, 2})};
  double moves = 0;
  Tensor forward(Tensor z) {  // [3]
    const Tensor y = (lin(z) * buf).sum();
    if (moves != 0) buf = buf + f64(moves);
    return y;
  }
  LOCKSTEP_MODULE(Masked, lin, buf, moves)
};

void two_forwards_with_a_buffer(Group g) {
  for (const bool moving : {false, true})
    for (const bool broadcast : {true, false})
      for (const auto& options : layouts({.broadcast_buffers = broadcast})) {
        Masked module;
        module.lin.to(DType::f64);
        module.moves = moving ? g.rank() + 1.0 : 0;
        DistributedDataParallel net{module, g, options};
        const Tensor fake = f64({1, 2, 3}) * (g.rank() + 1.0), real = f64({5, -1, 2});
        const auto moves_of = [&](int r) { return moving ? r + 1.0 : 0; };
        const auto source = [&](int r) { return broadcast ? 0 : r; };  // of rank r's buffer
        for (int step = 0; step < 3; ++step) {
          net.zero_grad();
          const Tensor first = net(fake), second = net(real);
          (first + second).backward();
          const auto grad = module.lin.weight.grad().to_vector<double>();  // [2, 3]
          for (size_t j = 0; j < 2; ++j)
            for (size_t k = 0; k < 3; ++k)
              near(grad[3 * j + k],
                   mean_over(g,
                             [&](int r) {
                               const double f = std::vector<double>{1, 2, 3}[k] * (r + 1),
                                            t = std::vector<double>{5, -1, 2}[k];
                               const double before =
                                   static_cast<double>(j) + 1 + 2 * step * moves_of(source(r));
                               return before * f + (before + moves_of(r)) * t;
                             }),
                   "weight.grad");
          for (int j = 0; j < 2; ++j)
            near(module.buf[j].item<double>(), j + 1 + 2 * (step + 1) * moves_of(source(g.rank())),
                 "the buffer");
          // An evaluation on one rank is nobody else's matter.
          if (g.rank() == g.size() - 1) {
            NoGradGuard guard;
            const double moves = std::exchange(module.moves, 0);
            net(real);
            module.moves = moves;
          }
        }
        in_step(g, net);
      }
}

/// BatchNorm in training against a bare copy on each rank, whose gradients are averaged by hand.
void two_forwards_with_batch_norm(Group g) {
  for (const bool broadcast : {true, false})
    for (const auto& options : layouts({.broadcast_buffers = broadcast})) {
      manual_seed(4);
      nn::Sequential module{nn::Linear{3, 4}, nn::BatchNorm1d{4}};
      module.to(DType::f64);
      nn::Sequential bare = module.clone();
      DistributedDataParallel net{module, g, options};
      manual_seed(10 + static_cast<uint64_t>(g.rank()));
      for (int step = 0; step < 3; ++step) {
        const Tensor real = randn({6, 3}, {.dtype = DType::f64}),
                     fake = randn({6, 3}, {.dtype = DType::f64});
        net.zero_grad();
        bare.zero_grad();
        const Tensor first = net(real), second = net(fake);
        (first.square().mean() + (second * 3.0).sum()).backward();
        const Tensor bare_first = bare(real), bare_second = bare(fake);
        (bare_first.square().mean() + (bare_second * 3.0).sum()).backward();
        const auto a = net.named_parameters(), b = bare.named_parameters();
        for (size_t i = 0; i < a.size(); ++i) {
          const Tensor want = b[i].second.grad().clone();
          g.all_reduce(want, dist::ReduceOp::avg);
          const auto got = a[i].second.grad().to_vector<double>(), mean = want.to_vector<double>();
          for (size_t k = 0; k < got.size(); ++k)
            require(std::abs(got[k] - mean[k]) <= 1e-12, a[i].first + ".grad");
        }
        for (size_t i = 0; i < bare.buffers().size(); ++i) {
          const Tensor want = bare.buffers()[i];
          if (broadcast) g.broadcast(want, 0);
          require(net.named_buffers()[i].second.to_vector<double>() == want.to_vector<double>(),
                  net.named_buffers()[i].first + (broadcast ? " is not rank 0's" : " moved"));
        }
        in_step(g, net);
      }
    }
}

struct Generator2 : nn::Module {
  nn::Linear in{2, 5}, out{5, 3};
  Tensor forward(Tensor z) { return out(tanh(in(z))); }  // [B, 2] -> [B, 3]
  LOCKSTEP_MODULE(Generator2, in, out)
};
struct Critic : nn::Module {
  nn::Linear in{3, 4}, out{4, 1};
  Tensor forward(Tensor x) { return out(tanh(in(x))); }  // [B, 3] -> [B, 1]
  LOCKSTEP_MODULE(Critic, in, out)
};

/// The weights of a GAN after some steps on a batch of six, split among the ranks.
std::vector<Tensor> train_gan(const Group& g, DistributedDataParallelOptions options, bool freeze) {
  manual_seed(6);
  const Tensor z = randn({6, 2}, {.dtype = DType::f64}), x = randn({6, 3}, {.dtype = DType::f64});
  const int64_t n = 6 / g.size();
  const Tensor my_z = z.narrow(0, g.rank() * n, n), my_x = x.narrow(0, g.rank() * n, n);
  Generator2 generator;
  Critic critic;
  generator.to(DType::f64), critic.to(DType::f64);
  DistributedDataParallel maker{generator, g, options};
  DistributedDataParallel judge{critic, g, options};
  optim::Adam make{maker.parameters(), {.lr = 0.01}}, judging{judge.parameters(), {.lr = 0.01}};
  for (int step = 0; step < 3; ++step) {
    judging.zero_grad();
    const Tensor fake = maker(my_z);
    (judge(fake.detach()).square().mean() + (judge(my_x) - 1.0).square().mean()).backward();
    judging.step();
    make.zero_grad();
    if (freeze) critic.requires_grad_(false);
    (judge(maker(my_z)) - 1.0).square().mean().backward();
    if (freeze) critic.requires_grad_(true);
    make.step();
  }
  std::vector<Tensor> all = maker.parameters();
  for (const Tensor& p : judge.parameters()) all.push_back(p);
  return all;
}

void adversaries(Group g) {
  for (const auto& options : layouts())
    for (const bool freeze : {false, true}) {
      const auto mine = train_gan(g, options, freeze), one = train_gan(Group(), {}, freeze);
      for (size_t i = 0; i < one.size(); ++i) {
        all_near(mine[i], one[i], str_cat("parameter ", i), 1e-9);  // Adam's root magnifies
        same_bits(g, mine[i], str_cat("parameter ", i));
      }
    }
}

}  // namespace

const std::vector<cases::Case>& cases::all() {
  static const std::vector<Case> list{
      {"no_sync accumulates, and the next backward reduces all once", 2, local_then_synchronised},
      {"the same on three ranks", 3, local_then_synchronised},
      {"where forward and backward differ the forward decides", 2, forward_and_backward_differ},
      {"the forward decides on three ranks", 3, forward_and_backward_differ},
      {"several forwards and several backwards", 2, several_forwards_and_backwards},
      {"ranks with different numbers of local backwards", 3, different_numbers_of_local_backwards},
      {"three backwards before a step", 2, several_backwards_before_a_step},
      {"a static graph with forwards that have no backward", 2, forwards_without_backward},
      {"a static graph that changes", 3, changed_graph},
      {"two forwards with a buffer before one backward", 2, two_forwards_with_a_buffer},
      {"the same with buffers of three ranks", 3, two_forwards_with_a_buffer},
      {"two forwards with batch norm before one backward", 2, two_forwards_with_batch_norm},
      {"a generator and a critic, as in one process", 2, adversaries},
      {"a generator and a critic on three ranks", 3, adversaries},
  };
  return list;
}
