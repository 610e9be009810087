// Gradients that a program keeps, under DistributedDataParallel: later backwards and reductions write
// into the same buckets and change none of them.
#include <doctest/doctest.h>

#include "ddp_helpers.h"

namespace {

/// Runs `steps` on one, two and three ranks.
void on_ranks(const std::function<void(Group)>& steps) {
  for (const int world : {1, 2, 3}) CHECK_NOTHROW(run_local(world, steps, kQuick));
}

double mean_of_ranks(Group g) { return (g.size() + 1) / 2.0; }  // of rank + 1

}  // namespace

TEST_CASE("a gradient kept under DistributedDataParallel outlives later steps") {
  on_ranks([](Group g) {
    for (const bool to_none : {true, false}) {
      DistributedDataParallel net{Scalar{}, g};
      nn::Parameter& w = net.module().w;
      std::vector<Tensor> kept;
      std::vector<double> values;
      for (int step = 0; step < 4; ++step) {
        if (to_none || step == 0) net.zero_grad();  // otherwise it accumulates
        net(f64((1 + step) * (g.rank() + 1.0))).backward();
        const Tensor grad = w.grad();
        kept.insert(kept.end(), {grad, grad.detach(), grad.reshape({1})});
        values.insert(values.end(), 3, grad.item<double>());
      }
      for (size_t i = 0; i < kept.size(); ++i)
        near(kept[i].reshape({}).item<double>(), values[i], str_cat("kept ", i));
      near(values[3], mean_of_ranks(g) * (to_none ? 2 : 3), "the second step's gradient");
    }
  });
}

TEST_CASE("a gradient kept from local backwards is not changed by the reduction") {
  on_ranks([](Group g) {
    DistributedDataParallel net{Two{}, g, {.find_unused_parameters = true}};
    Two& m = net.module();
    Tensor of_a, of_b;
    {
      auto guard = net.no_sync();
      auto [ya, yb] = net(f64(g.rank() + 1.0));
      (ya + yb).backward();
      of_a = m.a.grad();
      of_b = m.b.grad();
    }
    net(f64(0)).first.backward();  // b goes into the reduction as it is
    near(of_a.item<double>(), g.rank() + 1.0, "a, kept");
    near(of_b.item<double>(), g.rank() + 1.0, "b, kept");
    near(m.a.grad().item<double>(), mean_of_ranks(g), "a");
    near(m.b.grad().item<double>(), mean_of_ranks(g), "b");
  });
}

TEST_CASE("a gradient that a hook keeps is this rank's own, for good") {
  on_ranks([](Group g) {
    nn::Linear l{2, 1, {.bias = false}};
    l.to(DType::f64);
    DistributedDataParallel net{l, g};
    std::vector<Tensor> kept;
    l.weight.register_hook([&](const Tensor& grad) -> Tensor {
      kept.push_back(grad);
      return {};
    });
    l.weight.register_post_accumulate_grad_hook([&](const Tensor& p) { kept.push_back(p.grad()); });
    for (int step = 0; step < 3; ++step) {
      net.zero_grad();
      net(full({1, 2}, (1 + step) * (g.rank() + 1.0), {.dtype = DType::f64})).sum().backward();
      near(l.weight.grad()[0][0].item<double>(), (1 + step) * mean_of_ranks(g), "the gradient");
    }
    require(kept.size() == 6, "hooks");
    for (size_t i = 0; i < kept.size(); ++i)
      near(kept[i][0][0].item<double>(), (1.0 + static_cast<double>(i / 2)) * (g.rank() + 1),
           str_cat("kept ", i));
  });
}

TEST_CASE("a gradient kept from one window of Accumulation is not scaled or overwritten") {
  on_ranks([](Group g) {
    DistributedDataParallel net{Scalar{}, g};
    optim::SGD opt{net.parameters(), {.lr = 0}};
    dist::Accumulation acc{net, g, {.steps = 2}};
    std::vector<Tensor> kept;
    for (int step = 0; step < 4; ++step) {
      acc.backward(net(f64(1 + step)), 1);
      kept.push_back(net.module().w.grad());
      if (acc.finish()) net.zero_grad();
    }
    near(kept[0].item<double>(), 1, "local");
    near(kept[1].item<double>(), 3, "reduced");
    near(kept[2].item<double>(), 3, "local");
    near(kept[3].item<double>(), 7, "reduced");
  });
}

TEST_CASE("a kept gradient outlives whatever clears or changes the next one") {
  struct Way {
    bool to_none, clips, records;
    double bucket_mb;
  };
  std::vector<Way> ways;
  for (int i = 0; i < 16; ++i)
    ways.push_back({(i & 1) != 0, (i & 2) != 0, (i & 4) != 0, i & 8 ? 1e-6 : 25});
  on_ranks([&](Group g) {
    for (const Way& way : ways) {
      DistributedDataParallel net{
          Two{}, g, {.bucket_cap_mb = way.bucket_mb, .first_bucket_mb = way.bucket_mb}};
      Two& m = net.module();
      std::vector<std::pair<Tensor, double>> kept;
      const auto keep = [&](const Tensor& t) { kept.emplace_back(t, t.item<double>()); };
      m.a.register_hook([&](const Tensor& grad) -> Tensor {
        keep(grad);
        return {};
      });
      // On one rank that is the gradient which is clipped in place below.
      m.b.register_post_accumulate_grad_hook([&](const Tensor& p) {
        if (g.size() > 1 || !way.clips) keep(p.grad());
      });
      for (int step = 0; step < 4; ++step) {  // the buckets change their order after the first
        const auto backward = [&](bool records) {
          auto [ya, yb] = net(f64((1 + step) * (g.rank() + 1.0)));
          (g.rank() == 0 ? ya + yb : yb + ya).backward({}, {.create_graph = records});
        };
        if (step == 2) {
          const auto guard = net.no_sync();
          backward(false);
          keep(m.a.grad());
          keep(m.b.grad().detach());
        }
        backward(way.records);
        const double passes = step == 2 ? 2 : 1;
        near(m.a.grad().item<double>(), passes * (1 + step) * mean_of_ranks(g), "a's gradient");
        if (way.clips) optim::clip_grad_norm_(net.parameters(), 0.5);
        keep(m.a.grad().detach());
        keep(m.b.grad().detach());
        net.zero_grad(way.to_none);
        require(way.to_none ? !m.a.grad().defined() : m.a.grad().item<double>() == 0, "cleared");
      }
      for (size_t i = 0; i < kept.size(); ++i)
        near(kept[i].first.item<double>(), kept[i].second, str_cat("kept ", i));
      net.zero_grad();  // gradients with a graph hold their parameters
    }
  });
}

TEST_CASE("a kept gradient outlives a round without a backward") {
  on_ranks([](Group g) {
    DistributedDataParallel net{Scalar{}, g};
    Tensor kept;
    {
      const auto guard = net.no_sync();
      net(f64(g.rank() + 1.0)).backward();
      kept = net.module().w.grad();
    }
    net.reduce_now();
    near(kept.item<double>(), g.rank() + 1.0, "kept");
    if (g.size() > 1) near(net.module().w.grad().item<double>(), mean_of_ranks(g), "reduced");
    kept = net.module().w.grad();
    const double value = kept.item<double>();
    net.zero_grad();
    net.join(
        [&] {
          for (int i = 0; i <= g.rank(); ++i) net(f64(9)).backward();
        },
        {.divide_by_initial_world_size = false});
    near(kept.item<double>(), value, "kept over join");
  });
}

TEST_CASE("gradients that nobody keeps stay in their buckets without a copy") {
  CHECK_NOTHROW(run_local(
      2,
      [](Group g) {
        DistributedDataParallel net{Scalar{}, g};
        const auto step = [&] {
          net.zero_grad();
          net(f64(1)).backward();
        };
        step();
        step();  // after the rebuild of the buckets
        nn::Parameter& w = net.module().w;
        const void* place = w.grad().data_ptr();
        const Storage* storage = &w.grad().storage();
        step();
        require(w.grad().data_ptr() == place && &w.grad().storage() == storage, "the same slot");
        const Tensor kept = w.grad();
        step();
        require(w.grad().data_ptr() == place, "the bucket's memory");
        require(kept.data_ptr() != place, "memory of its own");
      },
      kQuick));
}
