// DistributedDataParallel's options and what may change after wrapping: static graphs, ignored tensors, comm
// hooks, freezing, reduce_now. Ranks are threads; expected numbers are worked by hand.
#include <doctest/doctest.h>

#include "ddp_helpers.h"

namespace {

/// One step's backward through a and, where `with_b`, b, with x = rank + 1.
void step_two(DistributedDataParallel<Two>& net, Group g, bool with_b) {
  net.zero_grad();
  auto [ya, yb] = net(f64(g.rank() + 1.0));
  (with_b ? ya + yb : ya).backward();
}

}  // namespace

TEST_CASE("static_graph: the first step's unused parameters are legal and stay untouched") {
  CHECK_NOTHROW(run_local(
      2,
      [](Group g) {
        DistributedDataParallel net{Two{}, g, {.static_graph = true}};
        for (int step = 0; step < 4; ++step) {
          step_two(net, g, g.rank() == 0);  // b on rank 0 alone
          near(net.module().a.grad().item<double>(), 1.5, "a");
          near(net.module().b.grad().item<double>(), 0.5, "b: rank 0's 1, over two ranks");
        }
        require(net.stats().static_graph_is_safe, "every step was alike");
        require(net.stats().unused[1] == std::vector<std::string>{"b"}, "b is unused on rank 1");
      },
      kQuick));
}

TEST_CASE("static_graph: a step that differs is an error on every rank, with the name") {
  for (const std::string& text : texts(2, [](Group g) {
         DistributedDataParallel net{Two{}, g, {.static_graph = true}};
         step_two(net, g, true);
         step_two(net, g, g.rank() == 0);
       })) {
    CHECK_MESSAGE(contains(text, "static_graph: b was used on rank 1"), text);
    CHECK_MESSAGE(contains(text, "is unused now"), text);
  }
}

TEST_CASE(
    "static_graph: forwards without backward, several forwards, and accumulation are no change") {
  CHECK_NOTHROW(run_local(
      2,
      [](Group g) {
        DistributedDataParallel net{Scalar{}, g, {.static_graph = true}};
        const double x = g.rank() + 1.0;
        net(f64(5));  // a forward to warm up
        Tensor first = net(f64(x)), second = net(f64(x));
        second.backward();
        near(net.module().w.grad().item<double>(), 1.5, "the second of two forwards");
        for (int window = 0; window < 3; ++window) {
          net.zero_grad();
          {
            const auto local = net.no_sync();
            net(f64(10 * x)).backward();
          }
          net(f64(x)).backward();
          near(net.module().w.grad().item<double>(), 1.5 * 11, "the window");
        }
      },
      kQuick));
}

TEST_CASE("ignored parameters and buffers keep each rank's values and gradients") {
  CHECK_NOTHROW(run_local(
      2,
      [](Group g) {
        Two module;
        module.b = f64(g.rank() + 5.0);
        DistributedDataParallel net{module, g, {.ignored = {"b"}}};
        near(module.b.item<double>(), g.rank() + 5.0, "b is not broadcast");
        step_two(net, g, true);
        near(module.a.grad().item<double>(), 1.5, "a is averaged");
        near(module.b.grad().item<double>(), g.rank() + 1.0, "b is not");
      },
      kQuick));
  for (const std::string& text : texts(2, [](Group g) {
         DistributedDataParallel net{
             Two{},
             g,
             {.ignored = g.rank() ? std::vector<std::string>{"b"} : std::vector<std::string>{}}};
       }))
    CHECK_MESSAGE((contains(text, ", ignored\" on rank 0") && contains(text, ", ignored b\" on rank 1")),
                  text);
  for (const std::string& text : texts(2, [](Group g) {
         DistributedDataParallel net{Two{}, g, {.ignored = {"c"}}};
       }))
    CHECK_MESSAGE(contains(text, "\"c\""), text);
}

TEST_CASE(
    "a comm hook sees whole unscaled buckets, in one order, and decides what becomes of them") {
  CHECK_NOTHROW(run_local(
      2,
      [](Group g) {
        std::vector<int> order;
        DistributedDataParallel net{
            Two{},
            g,
            {.bucket_cap_mb = 1e-6, .first_bucket_mb = 1e-6, .comm_hook = [&](dist::GradBucket& b) {
               order.push_back(b.index);
               require(b.gradients.size() == 1 && b.parameters.size() == 1, "a bucket each");
               near(b.gradients[0].item<double>(), g.rank() + 1.0, "not averaged");
               require(b.is_last == (b.index == 1), "the last says so");
               b.buffer.mul_(3);
               return b.group->all_reduce(b.buffer, dist::ReduceOp::sum);
             }}};
        for (int step = 0; step < 2; ++step) {
          order.clear();
          step_two(net, g, true);
          near(net.module().a.grad().item<double>(), 9, "3 x 1 + 3 x 2");
          near(net.module().b.grad().item<double>(), 9, "3 x 1 + 3 x 2");
          require(order == std::vector<int>{0, 1}, "launched in order");
        }
      },
      kQuick));
}

TEST_CASE("a comm hook runs at world size 1 too") {
  int calls = 0;
  DistributedDataParallel net{Scalar{}, Group(), {.comm_hook = [&](dist::GradBucket& b) {
                                ++calls;
                                return b.group->all_reduce(b.buffer, dist::ReduceOp::avg);
                              }}};
  net(f64(3)).backward();
  CHECK(net.module().w.grad().item<double>() == 3);
  CHECK(calls == 1);
}

TEST_CASE("an exception of a comm hook ends the backward on every rank") {
  const auto all = texts(2, [](Group g) {
    DistributedDataParallel net{Scalar{}, g, {.comm_hook = [&](dist::GradBucket& b) {
                                  if (g.rank() == 1) throw ValueError("the hook gave up");
                                  return b.group->all_reduce(b.buffer);
                                }}};
    net(f64(1)).backward();
  });
  for (const std::string& text : all) CHECK_MESSAGE(contains(text, "the hook gave up"), text);
}

TEST_CASE("frozen on all ranks is no error whatever the options; frozen on one is, on every rank") {
  CHECK_NOTHROW(run_local(
      2,
      [](Group g) {
        DistributedDataParallel net{Two{}, g};
        step_two(net, g, true);
        net.module().b.requires_grad_(false);
        for (int step = 0; step < 2; ++step) {
          step_two(net, g, true);
          near(net.module().a.grad().item<double>(), 1.5, "a while b is frozen");
        }
        net.module().b.requires_grad_(true);
        step_two(net, g, true);
        near(net.module().b.grad().item<double>(), 1.5, "b trains again");
      },
      kQuick));
  for (const std::string& text : texts(2, [](Group g) {
         DistributedDataParallel net{Two{}, g, {.find_unused_parameters = true}};
         step_two(net, g, true);
         if (g.rank() == 0) net.module().b.requires_grad_(false);
         step_two(net, g, true);
       }))
    CHECK_MESSAGE(
        contains(text, "b: requires_grad changed after wrapping (rank 0 false, rank 1 true)"),
        text);
}

TEST_CASE("a parameter frozen at construction that trains later is an error on every rank") {
  for (const bool everywhere : {true, false})
    for (const std::string& text : texts(2, [&](Group g) {
           Two module;
           module.b.requires_grad_(false);
           DistributedDataParallel net{module, g};
           step_two(net, g, true);
           if (everywhere || g.rank() == 1) module.b.requires_grad_(true);
           step_two(net, g, true);
         }))
      CHECK_MESSAGE(
          contains(text,
                   everywhere
                       ? "b: requires_grad changed after wrapping (rank 0 true, rank 1 true)"
                       : "b: requires_grad changed after wrapping (rank 0 false, rank 1 true)"),
          text);
}

TEST_CASE("reduce_now averages what local backwards left") {
  CHECK_NOTHROW(run_local(
      2,
      [](Group g) {
        DistributedDataParallel net{Scalar{}, g};
        for (int window = 0; window < 2; ++window) {
          net.zero_grad();
          {
            const auto local = net.no_sync();
            net(f64(g.rank() + 1.0)).backward();
            net(f64(10.0)).backward();
          }
          near(net.module().w.grad().item<double>(), g.rank() + 11.0, "local so far");
          net.reduce_now();
          near(net.module().w.grad().item<double>(), 11.5, "averaged");
        }
      },
      kQuick));
}

TEST_CASE("find_unused_parameters that finds nothing in the first step warns once") {
  Warnings warnings;
  run_local(
      2,
      [](Group g) {
        DistributedDataParallel net{Two{}, g, {.find_unused_parameters = true}};
        for (int i = 0; i < 3; ++i) step_two(net, g, true);
      },
      kQuick);
  CHECK(warnings.all.size() == 1);
  CHECK(contains(warnings.all[0], "find_unused_parameters"));
}

TEST_CASE("statistics tell the order, the unused and the time") {
  CHECK_NOTHROW(run_local(
      2,
      [](Group g) {
        DistributedDataParallel net{Two{}, g, {.find_unused_parameters = true}};
        step_two(net, g, g.rank() == 0);
        const dist::DdpStats s = net.stats();
        require(s.forwards == 1 && s.synchronised_backwards == 1 && s.local_backwards == 0,
                "counts");
        require(s.arrival_order.size() == (g.rank() == 0 ? 2u : 1u), "arrivals");
        require(s.unused[1] == std::vector<std::string>{"b"} && s.unused[0].empty(), "unused");
        require(s.backward > 0 && s.forward > 0, "times");
        require(contains(s.text(), "unused on rank 1: b"), s.text());
        step_two(net, g, true);
        require(!net.stats().static_graph_is_safe, "b's use has changed");
      },
      kQuick));
}
