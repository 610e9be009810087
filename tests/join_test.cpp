// DistributedDataParallel::join: ranks with different numbers of inputs. Ranks are threads; expected numbers
// are worked by hand.
#include <doctest/doctest.h>

#include "ddp_helpers.h"

namespace {

/// SGD by hand with learning rate 1 over `batches` inputs x = 1, on w = 10.
double train(Group g, int batches, dist::JoinOptions options,
             dist::DistributedDataParallelOptions ddp = {}) {
  DistributedDataParallel net{Scalar{}, g, ddp};
  Tensor w = net.module().w;
  net.join(
      [&] {
        for (int i = 0; i < batches; ++i) {
          net.zero_grad();
          net(f64(1)).backward();
          NoGradGuard guard;
          w.sub_(w.grad());
        }
      },
      options);
  equal_on_all(g, w, "w");
  return w.item<double>();
}

struct Counter : nn::Module {  // w x, and a buffer that counts forwards
  nn::Parameter w{f64(10)};
  nn::Buffer seen{f64(0)};
  Tensor forward(Tensor x) {
    seen = seen + f64(1);
    return w * x;
  }
  LOCKSTEP_MODULE(Counter, w, seen)
};

}  // namespace

TEST_CASE("the rank with fewer batches shadows the other, divided by all ranks or by the active") {
  CHECK_NOTHROW(run_local(
      2,
      [](Group g) {
        near(train(g, 2 + g.rank(), {}), 7.5, "10 - 1 - 1 - 1/2");
        near(train(g, 2 + g.rank(), {.divide_by_initial_world_size = false}), 7, "10 - 1 - 1 - 1");
        near(train(g, 3 - g.rank(), {}), 7.5, "the other way round");
        near(train(g, 3 - g.rank(), {}, {.static_graph = true}), 7.5, "with a static graph");
        near(train(g, g.rank() == 0 ? 0 : 3, {}), 8.5, "a rank without any batch: 10 - 3/2");
        near(train(g, 2, {}), 8, "equally many");
        near(train(g, 0, {}), 10, "none at all");
      },
      kQuick));
  CHECK_NOTHROW(run_local(
      3,
      [](Group g) { near(train(g, g.rank() + 1, {}), 10 - 1 - 2 / 3.0 - 1 / 3.0, "three ranks"); },
      kQuick));
}

TEST_CASE("throw_on_early_termination stops all ranks at the same step") {
  std::vector<double> weights(2);
  const auto all = texts(2, [&](Group g) {
    DistributedDataParallel net{Scalar{}, g};
    Tensor w = net.module().w;
    try {
      net.join(
          [&] {
            for (int i = 0; i < 2 + g.rank(); ++i) {
              net.zero_grad();
              net(f64(1)).backward();
              NoGradGuard guard;
              w.sub_(w.grad());
            }
          },
          {.throw_on_early_termination = true});
    } catch (...) {
      weights[static_cast<size_t>(g.rank())] = w.item<double>();
      throw;
    }
  });
  for (const std::string& text : all)
    CHECK_MESSAGE(contains(text, "rank 0 has no more inputs"), text);
  CHECK(weights == std::vector<double>{8, 8});
}

TEST_CASE(
    "under join the buffers of the lowest active rank count, and the last model is everybody's") {
  CHECK_NOTHROW(run_local(
      2,
      [](Group g) {
        DistributedDataParallel net{Counter{}, g};
        net.join([&] {
          for (int i = 0; i < 1 + 3 * g.rank(); ++i) {
            net.zero_grad();
            net(f64(1)).backward();
          }
        });
        // One forward while rank 0 was active, three on rank 1 alone.
        near(net.module().seen.item<double>(), 4, "the buffer");
        net(f64(1)).backward();  // the wrapper works on
      },
      kQuick));
}

TEST_CASE("a rank that shadows keeps the gradient of a frozen parameter") {
  CHECK_NOTHROW(run_local(
      2,
      [](Group g) {
        DistributedDataParallel net{Two{}, g};
        Two& m = net.module();
        auto both = [&] {
          auto [ya, yb] = net(f64(1));
          (ya + yb).backward();
        };
        both();
        m.b.grad().mul_(g.rank() + 2.0);
        m.b.requires_grad_(false);
        net.join([&] {
          for (int i = 0; i < 1 + 2 * g.rank(); ++i) {
            m.a.set_grad({});
            both();
          }
        });
        near(m.b.grad().item<double>(), g.rank() + 2.0, "the frozen gradient");
      },
      kQuick));
}

TEST_CASE("inside join another collective on the group is an error, and ends the others") {
  const auto all = texts(2, [](Group g) {
    DistributedDataParallel net{Scalar{}, g};
    net.join([&] {
      for (int i = 0; i < 2; ++i) {
        net(f64(1)).backward();
        if (g.rank() == 1) g.barrier();
      }
    });
  });
  CHECK_MESSAGE(contains(all[1], "inside join"), all[1]);
  CHECK_MESSAGE(contains(all[0], "left join by an exception"), all[0]);
}

TEST_CASE("a synchronised batch norm inside join is an error on every rank") {
  for (const std::string& text : texts(2, [](Group g) {
         nn::Sequential model{nn::Linear{2, 3}, nn::BatchNorm1d{3}};
         dist::convert_sync_batchnorm(model, g);
         DistributedDataParallel net{model, g};
         net.join([] {});
       }))
    CHECK_MESSAGE(contains(text, "join: 1 is a BatchNorm"), text);
}

TEST_CASE("join with other options on one rank is an error on both") {
  for (const dist::JoinOptions other : {dist::JoinOptions{.divide_by_initial_world_size = false},
                                        dist::JoinOptions{.throw_on_early_termination = true}})
    for (const std::string& text : texts(2, [&](Group g) {
           DistributedDataParallel net{Scalar{}, g};
           net.join([&] { net(f64(1)).backward(); }, g.rank() == 1 ? other : dist::JoinOptions{});
         }))
      CHECK_MESSAGE(contains(text, "join: the options differ"), text);
}

TEST_CASE("a rank that did not enter join is an error on both") {
  for (const std::string& text : texts(2, [](Group g) {
         DistributedDataParallel net{Scalar{}, g};
         if (g.rank() == 0) {
           net(f64(1)).backward();
         } else {
           net.join([&] { net(f64(1)).backward(); });
         }
       }))
    CHECK_MESSAGE(contains(text, "rank 1 is inside join and rank 0 is not"), text);
}
