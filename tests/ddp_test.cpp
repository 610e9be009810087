// What DistributedDataParallel does, rule by rule, on ranks as threads. Expected numbers are worked
// by hand.
#include <doctest/doctest.h>

#include <atomic>
#include <mutex>
#include <string>
#include <vector>

#include "ddp_helpers.h"
#include "wrapped_group.h"

namespace {

struct Odd : nn::Module {  // parameters of no dimension, of no element, and an ordinary one
  nn::Parameter s{f64(2)}, none{zeros({0, 3}, {.dtype = DType::f64})}, v{f64({1, 2})};
  Tensor forward(Tensor x) { return (v * x).sum() * s + none.sum(); }
  LOCKSTEP_MODULE(Odd, s, none, v)
};

}  // namespace

TEST_CASE("gradients are averaged, and at world size 1 nothing is attached") {
  for (int size : {1, 2, 3, 4})
    CHECK_NOTHROW(run_local(
        size,
        [size](Group group) {
          DistributedDataParallel net{Scalar{}, group};
          net(f64(group.rank() + 1.0)).backward();
          near(net.module().w.grad().item<double>(), (size + 1) / 2.0, "mean of 1 .. W");
          require((net.module().w.leaf()->watcher != nullptr) == (size > 1),
                  "watched only with peers");
        },
        kQuick));
}

TEST_CASE("mean losses equal the joint batch, sum losses are W times smaller") {
  for (int size : {2, 3, 4})
    CHECK_NOTHROW(run_local(
        size,
        [size](Group group) {
          manual_seed(1);
          const Tensor x = randn({12, 5}, {.dtype = DType::f64}),
                       y = randn({12, 2}, {.dtype = DType::f64});
          const int64_t n = 12 / size;
          for (bool mean : {true, false}) {
            manual_seed(2);
            nn::Linear one{5, 2}, many{5, 2};
            one.to(DType::f64);
            many.to(DType::f64);
            many.load_state_dict(one.state_dict());
            auto loss = [mean](Tensor p, Tensor q) {
              return mean ? mse_loss(p, q) : (p - q).square().sum();
            };
            loss(one(x), y).backward();
            DistributedDataParallel net{many, group};
            loss(net(x.narrow(0, group.rank() * n, n)), y.narrow(0, group.rank() * n, n))
                .backward();
            const auto a = one.weight.grad().to_vector<double>(),
                       b = many.weight.grad().to_vector<double>();
            for (size_t i = 0; i < a.size(); ++i) near(b[i] * (mean ? 1 : size), a[i], "gradient");
            equal_on_all(group, many.weight.grad(), "gradient");
          }
        },
        kQuick));
}

TEST_CASE("construction gives every rank rank 0's values, buffers too") {
  for (bool broadcast_buffers : {true, false})
    CHECK_NOTHROW(run_local(
        3,
        [&](Group group) {
          manual_seed(static_cast<uint64_t>(group.rank()));
          nn::BatchNorm1d bn{4};
          nn::Linear linear{3, 4};
          {
            NoGradGuard guard;
            bn.running_mean.fill_(group.rank() + 5);
          }
          nn::Sequential model{std::move(linear), std::move(bn)};
          DistributedDataParallel net{model, group, {.broadcast_buffers = broadcast_buffers}};
          for (const Tensor& p : net.parameters()) equal_on_all(group, p, "parameter");
          for (const auto& [name, b] : net.named_buffers()) equal_on_all(group, b, name);
          near(net.named_buffers()[0].second[0].item<double>(), 5, "rank 0's running mean");
        },
        kQuick));
}

TEST_CASE("different modules are refused on every rank, with both descriptions") {
  auto check = [](const std::vector<std::string>& all, std::vector<std::string> parts) {
    for (const std::string& text : all)
      for (const std::string& part : parts) CHECK_MESSAGE(contains(text, part), text);
  };
  check(texts(3,
              [](Group g) {
                nn::Sequential s = g.rank() == 1
                                       ? nn::Sequential{nn::Linear{3, 4}, nn::Linear{4, 4}}
                                       : nn::Sequential{nn::Linear{3, 4}};
                DistributedDataParallel net{s, g};
              }),
        {"rank 0 has 2 parameters", "rank 1 has 4", "1.weight"});
  check(texts(2,
              [](Group g) {
                nn::Linear l = g.rank() ? nn::Linear{4, 3} : nn::Linear{3, 4};
                DistributedDataParallel net{l, g};
              }),
        {"weight", "[4, 3]", "[3, 4]"});
  check(texts(2,
              [](Group g) {
                nn::Linear l{3, 4};
                if (g.rank()) l.to(DType::f64);
                DistributedDataParallel net{l, g};
              }),
        {"weight", "f32", "f64"});
  check(texts(2,
              [](Group g) {
                nn::Linear l{3, 4};
                if (g.rank()) l.weight.requires_grad_(false);
                DistributedDataParallel net{l, g};
              }),
        {"weight", "frozen", "trainable"});
  check(texts(2,
              [](Group g) {
                nn::Linear l{3, 4};
                if (g.rank()) l.requires_grad_(false);
                DistributedDataParallel net{l, g};
              }),
        {"weight", "frozen", "trainable"});
  check(texts(2,
              [](Group g) {
                nn::BatchNorm1d b{g.rank() ? 3 : 3};
                if (g.rank()) b.running_mean = zeros({4});
                DistributedDataParallel net{b, g};
              }),
        {"running_mean", "[4]"});
  check(texts(2,
              [](Group g) {
                nn::Linear l{3, 4};
                l.requires_grad_(false);
                DistributedDataParallel net{l, g};
              }),
        {"no parameter that requires grad"});
}

TEST_CASE("a 0-d, an empty and no buffer: all work") {
  CHECK_NOTHROW(run_local(
      2,
      [](Group g) {
        DistributedDataParallel net{Odd{}, g};
        net(f64(g.rank() + 1.0)).backward();  // s: 3x, v: 2x
        near(net.module().s.grad().item<double>(), 4.5, "s");
        near(net.module().v.grad()[1].item<double>(), 3, "v");
        require(net.module().none.grad().numel() == 0, "none");
      },
      kQuick));
}

TEST_CASE("gradients are views of the buckets, after every way of clearing them") {
  CHECK_NOTHROW(run_local(
      2,
      [](Group g) {
        nn::Linear l{3, 2};
        l.to(DType::f64);
        DistributedDataParallel net{l, g};
        optim::SGD opt{net.parameters(), {.lr = 0.1}};
        const Tensor x = ones({4, 3}, {.dtype = DType::f64}).mul_(g.rank() + 1.0);  // mean 1.5
        for (int step = 0; step < 5; ++step)
          for (int way = 0; way < 3; ++way) {
            if (way == 0) opt.zero_grad(true);
            if (way == 1) opt.zero_grad(false);
            if (way == 2) {
              opt.zero_grad();
              l.weight.set_grad(
                  ones({2, 3}, {.dtype = DType::f64}));  // adopted: its value counts as accumulated
            }
            net(x).sum().backward();
            for (double v : l.weight.grad().to_vector<double>())
              near(v, way == 2 ? 7 : 6, "weight");
            require(l.weight.grad().is_same(l.weight.leaf()->slot), "the gradient is the slot");
            equal_on_all(g, l.weight.grad(), "gradient");
          }
        require(net.stats().gradient_bytes <= 64 + 64, "gradient memory is the bucket");
      },
      kQuick));
}

TEST_CASE(
    "the forward decides: no_sync accumulates and the next synchronised backward reduces all, "
    "once") {
  const std::vector<double> first{1, 2}, second{3, 5};
  CHECK_NOTHROW(run_local(
      2,
      [&](Group g) {
        const auto r = static_cast<size_t>(g.rank());
        DistributedDataParallel net{Scalar{}, g};
        {
          auto guard = net.no_sync();
          net(f64(first[r])).backward();
        }
        near(net.module().w.grad().item<double>(), first[r], "local");
        net(f64(second[r])).backward();
        near(net.module().w.grad().item<double>(), 5.5, "(4 + 7) / 2");
        require(net.stats().synchronised_backwards == 1 && net.stats().local_backwards == 1,
                "counts");
      },
      kQuick));
  for (bool forward_inside : {true, false}) {
    Warnings warnings;
    CHECK_NOTHROW(run_local(
        2,
        [&](Group g) {
          const auto r = static_cast<size_t>(g.rank());
          DistributedDataParallel net{Scalar{}, g};
          {
            auto guard = net.no_sync();
            net(f64(first[r])).backward();
          }
          Tensor y;
          {
            auto guard = net.no_sync(forward_inside);
            y = net(f64(second[r]));
          }
          auto guard = net.no_sync(!forward_inside);
          y.backward();
          near(net.module().w.grad().item<double>(), forward_inside ? first[r] + second[r] : 5.5,
               "variant");
        },
        kQuick));
    REQUIRE(warnings.all.size() == 2);  // one on each rank
    CHECK(contains(warnings.all[0], "the forward decides"));
  }
}

TEST_CASE("several synchronised backwards before a step sum their averages") {
  CHECK_NOTHROW(run_local(
      2,
      [](Group g) {
        DistributedDataParallel net{Scalar{}, g};
        for (int i = 0; i < 3; ++i) net(f64(g.rank() + 1.0)).backward();
        near(net.module().w.grad().item<double>(), 4.5, "3 x 1.5");
      },
      kQuick));
}

TEST_CASE(
    "a parameter without gradient is an error of the same backward, on every rank, and the group "
    "lives on") {
  run_local(
      2,
      [](Group g) {
        DistributedDataParallel net{Two{}, g};
        auto& m = net.module();
        const Tensor x = f64(g.rank() + 1.0);
        std::string text;
        try {
          auto [ya, yb] = net(x);
          (g.rank() == 1 ? ya : ya + yb).backward();
        } catch (const DistError& e) {
          text = e.what();
        }
        require(contains(text, "b received no gradient on rank 1") &&
                    contains(text, "find_unused_parameters"),
                "text: " + text);
        require(!m.a.grad().defined() && !m.b.grad().defined(),
                "gradients are none after the error");
        auto [ya, yb] = net(x);
        (ya + yb).backward();
        near(m.a.grad().item<double>(), 1.5, "a afterwards");
        g.barrier();
      },
      kQuick);
}

TEST_CASE(
    "find_unused_parameters: unused by all stays untouched, unused by some is averaged over all") {
  CHECK_NOTHROW(run_local(
      2,
      [](Group g) {
        for (bool assigned : {false, true}) {
          DistributedDataParallel net{Two{}, g, {.find_unused_parameters = true}};
          auto& m = net.module();
          optim::SGD opt{net.parameters(), {.lr = 0.1, .momentum = 0.9, .weight_decay = 0.1}};
          for (int step = 0; step < 3; ++step) {
            opt.zero_grad();
            if (assigned) m.b.set_grad(f64(7));
            auto [ya, yb] = net(f64(g.rank() + 1.0));
            ya.backward();
            near(m.a.grad().item<double>(), 1.5, "a");
            if (assigned)
              near(m.b.grad().item<double>(), 7, "b keeps what was assigned");
            else
              require(!m.b.grad().defined(), "b stays undefined");
            opt.step();
            equal_on_all(g, m.a, "a");
          }
          if (!assigned) require(m.b.item<double>() == 3, "b is bitwise untouched");
        }
        DistributedDataParallel net{Two{}, g, {.find_unused_parameters = true}};
        auto [ya, yb] = net(f64(1));
        (g.rank() == 0 ? ya + 4.0 * yb : ya).backward();
        near(net.module().b.grad().item<double>(), 2, "4 / W");
        near(net.module().a.grad().item<double>(), 1, "a");
      },
      kQuick));
}

TEST_CASE("a parameter used only in an earlier local micro-batch is reduced with the window") {
  CHECK_NOTHROW(run_local(
      2,
      [](Group g) {
        DistributedDataParallel net{Two{}, g, {.find_unused_parameters = true}};
        const Tensor x = f64(g.rank() + 1.0);
        {
          auto guard = net.no_sync();
          net(x).first.backward();
        }
        net(x).second.backward();
        near(net.module().a.grad().item<double>(), 1.5, "a");
        near(net.module().b.grad().item<double>(), 1.5, "b");
        require(net.stats().synchronised_backwards == 1, "one round");
      },
      kQuick));
}

TEST_CASE("zero_grad takes back what an earlier local micro-batch contributed") {
  for (const char* way : {"none", "zeros", "the optimizer's zeros", "assigned"}) {
    const auto all = texts(2, [&](Group g) {
      DistributedDataParallel net{Two{}, g};
      optim::SGD opt{net.parameters(), {.lr = 0.1}};
      const Tensor x = f64(g.rank() + 1.0);
      {
        auto guard = net.no_sync();
        net(x).first.backward();
      }
      if (contains(way, "none")) net.zero_grad();
      if (contains(way, "optimizer")) opt.zero_grad(false);
      if (contains(way, "zeros")) net.zero_grad(false);
      if (contains(way, "assigned")) net.module().a.set_grad(f64(0));
      net(x).second.backward();
    });
    for (const std::string& text : all)
      CHECK_MESSAGE(contains(text, "a received no gradient"), way, ": ", text);
  }
}

TEST_CASE("zeros in place and other changes of a gradient keep it in its bucket") {
  CHECK_NOTHROW(run_local(
      2,
      [](Group g) {
        DistributedDataParallel net{Two{}, g, {.find_unused_parameters = true}};
        Two& m = net.module();
        const double own = g.rank() + 1.0;
        auto both = [&] {
          auto [ya, yb] = net(f64(own));
          (ya + yb).backward();
        };
        both();
        net.zero_grad(false);
        require(m.a.grad().is_same(m.a.leaf()->slot), "the zeroed gradient is the slot");
        // Written by hand, which is no use of the parameter: each rank keeps its own.
        m.a.grad().add_(f64(10 * own));
        net(f64(own)).second.backward();
        near(m.a.grad().item<double>(), 10 * own, "a, which no rank used");
        // A local contribution, scaled in place and assigned again, is still one.
        net.zero_grad();
        {
          auto guard = net.no_sync();
          both();
        }
        m.a.set_grad(m.a.grad().mul_(2));
        net(f64(own)).second.backward();
        near(m.a.grad().item<double>(), 3, "a, twice the mean of 1 and 2");
      },
      kQuick));
}

TEST_CASE("a backward around the wrapper stays local and warns once") {
  Warnings warnings;
  CHECK_NOTHROW(run_local(
      2,
      [](Group g) {
        Scalar inner;
        DistributedDataParallel net{inner, g};
        optim::SGD opt{net.parameters(), {.lr = 0.0}};
        for (int i = 0; i < 2; ++i) {
          opt.zero_grad();
          inner(f64(g.rank() + 1.0)).backward();
          near(inner.w.grad().item<double>(), g.rank() + 1.0, "local");
          opt.step();
        }
        opt.zero_grad();
        net(f64(g.rank() + 1.0)).backward();
        near(inner.w.grad().item<double>(), 1.5, "through the wrapper");
      },
      kQuick));
  REQUIRE(warnings.all.size() == 2);
  CHECK(contains(warnings.all[0], "without a forward through DistributedDataParallel"));
}

TEST_CASE(
    "buffers follow rank 0 at the end of each synchronised backward; two forwards do not break "
    "it") {
  CHECK_NOTHROW(run_local(
      2,
      [](Group g) {
        manual_seed(4);
        nn::Sequential model{nn::Linear{3, 4}, nn::BatchNorm1d{4}};
        model.to(DType::f64);
        DistributedDataParallel net{model, g};
        manual_seed(10 + static_cast<uint64_t>(g.rank()));
        for (int step = 0; step < 3; ++step) {
          const Tensor real = randn({6, 3}, {.dtype = DType::f64}),
                       fake = randn({6, 3}, {.dtype = DType::f64});
          net.zero_grad();
          (net(real).square().mean() + net(fake).mean()).backward();
          for (const auto& [name, b] : net.named_buffers()) equal_on_all(g, b, name);
          for (const Tensor& p : net.parameters()) equal_on_all(g, p.grad(), "gradient");
        }
        // An evaluation on one rank alone communicates nothing.
        if (g.rank() == 0) {
          net.eval();
          net(zeros({2, 3}, {.dtype = DType::f64}));
        }
        g.barrier();
      },
      kQuick));
}

TEST_CASE("user hooks run before the reduction and may change the gradient") {
  CHECK_NOTHROW(run_local(
      2,
      [](Group g) {
        DistributedDataParallel net{Scalar{}, g};
        net.module().w.register_post_accumulate_grad_hook([](const Tensor& p) {
          NoGradGuard guard;
          p.grad().mul_(2);
        });
        net(f64(g.rank() + 1.0)).backward();
        near(net.module().w.grad().item<double>(), 3, "2 x 1.5");
      },
      kQuick));
}

TEST_CASE(
    "autograd::grad leaves no armed state, create_graph gives an averaged gradient without a "
    "graph") {
  CHECK_NOTHROW(run_local(
      2,
      [](Group g) {
        DistributedDataParallel net{Scalar{}, g};
        auto& w = net.module().w;
        const double x = g.rank() + 1.0;
        near(autograd::grad({net(f64(x)).square()}, {w})[0].item<double>(), 2 * 10 * x * x, "grad");
        require(!w.grad().defined(), "grad writes no gradient");
        net(f64(x)).square().backward({}, {.create_graph = true});
        near(w.grad().item<double>(), (20 + 80) / 2.0, "averaged");
        require(!w.grad().requires_grad(), "no graph");
      },
      kQuick));
}

TEST_CASE("a parameter frozen after wrapping keeps its gradient, and trains again once unfrozen") {
  CHECK_NOTHROW(run_local(
      2,
      [](Group g) {
        DistributedDataParallel net{Two{}, g, {.find_unused_parameters = true}};
        auto& m = net.module();
        auto step = [&] {
          net.zero_grad();
          auto [ya, yb] = net(f64(g.rank() + 1.0));
          (ya + yb).backward();
        };
        step();
        m.b.requires_grad_(false);
        step();
        near(m.a.grad().item<double>(), 1.5, "a while b is frozen");
        m.b.requires_grad_(true);
        step();
        near(m.b.grad().item<double>(), 1.5, "b once it trains again");
      },
      kQuick));
}

TEST_CASE("a parameter whose shape changed after wrapping is refused by name") {
  for (const std::string& text : texts(2, [](Group g) {
         DistributedDataParallel net{Scalar{}, g};
         TensorBody& body = net.module().w.body();
         const Tensor other = f64({1, 2});
         body.storage = other.body().storage;
         body.shape = other.shape();
         body.strides = other.strides();
         net(f64(1));
       }))
    CHECK_MESSAGE(contains(text, "w had shape [] when it was wrapped and has [2] now"), text);
}

TEST_CASE("an epoch whose last batch is short trains with batch norm on any number of ranks") {
  for (const int world : {1, 2, 3})
    for (const int64_t n : {64, 65, 66, 67, 70, 95, 96, 97}) {
      if (world == 1 && n % 32 == 1) continue;  // one process has a batch of one as well
      CAPTURE(world);
      CAPTURE(n);
      CHECK_NOTHROW(run_local(
          world,
          [&](Group g) {
            manual_seed(5);
            const data::TensorDataset set{randn({n, 4}), randint(0, 3, {n})};
            data::Loader loader{set, {.batch_size = 32 / g.size(), .shuffle = true, .shard = g}};
            nn::Sequential model{nn::Linear{4, 8}, nn::BatchNorm1d{8}, nn::Linear{8, 3}};
            DistributedDataParallel net{model, g};
            Tensor seen = f64(0);
            for (auto [x, y] : loader.epoch(0)) {
              cross_entropy(net(x), y).backward();
              seen.add_(static_cast<double>(x.size(0)));
            }
            g.all_reduce(seen);
            near(seen.item<double>(), static_cast<double>(n), "samples");
          },
          kQuick));
    }
}

TEST_CASE("strides of dimensions of size 1 may differ between ranks") {
  CHECK_NOTHROW(run_local(
      2,
      [](Group g) {
        nn::Linear l{1, 1, {.bias = false}};
        l.to(DType::f64);
        if (g.rank() == 1) l.weight.body().strides = zeros({4, 3}).narrow(1, 0, 1).t().strides();
        DistributedDataParallel net{l, g};
        net(full({1, 1}, g.rank() + 1, {.dtype = DType::f64})).sum().backward();
        near(l.weight.grad().reshape({}).item<double>(), 1.5, "gradient");
      },
      kQuick));
}

TEST_CASE("a module moved to another dtype after wrapping is refused by name") {
  for (const std::string& text : texts(2, [](Group g) {
         DistributedDataParallel net{Scalar{}, g};
         net.module().to(DType::f32);
         net(scalar(1)).backward();
       }))
    CHECK_MESSAGE((contains(text, "w was f64") && contains(text, "is f32")), text);
}

TEST_CASE("ranks draw different dropout masks, and initialise alike") {
  CHECK_NOTHROW(run_local(
      2,
      [](Group g) {
        manual_seed(7);
        nn::Sequential model{nn::Linear{4, 64}, nn::Dropout{0.5}};
        equal_on_all(g, model.parameters()[0].to(DType::f64), "initial weight");
        DistributedDataParallel net{model, g};
        const Tensor y = net(ones({1, 4}));
        const Tensor all = g.all_gather(ne(y.detach(), 0).to(DType::f64));
        require(all[0].to_vector<double>() != all[1].to_vector<double>(), "the masks are the same");
        require(default_generator().state().stream == 0, "the stream is restored");
      },
      kQuick));
}

TEST_CASE("a rank that never backs up is named at the deadline") {
  const auto all = texts(2, [](Group g) {
    DistributedDataParallel net{Scalar{}, g};
    if (g.rank() == 0)
      net(f64(1)).backward();
    else
      std::this_thread::sleep_for(std::chrono::seconds(6));
  });
  CHECK_MESSAGE(contains(all[0], "DDP bucket 0 (w)"), all[0]);
  CHECK_MESSAGE(contains(all[0], "rank 1"), all[0]);
}
