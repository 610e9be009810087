// DistributedDataParallel, when the ranks' loops drift apart in ways that leave the sequence of
// collectives as it was; and loops that differ between ranks and may.
#include <doctest/doctest.h>

#include <map>

#include <lockstep/data/loader.h>
#include <lockstep/data/tensor_dataset.h>

#include "ddp_helpers.h"

namespace {

struct Picky : Scalar {  // w x, for positive x
  Tensor forward(Tensor x) {
    const Tensor y = w * x;
    if (x.item<double>() < 0) throw ValueError("not below zero");
    return y;
  }
  LOCKSTEP_MODULE(Picky, w)
};

Tensor input(Group g, int step) { return f64(1.0 + g.rank() + 10 * step); }

/// What each of two ranks threw, where `loop` must fail on both with these words.
void fails_on_both(const std::function<void(Group)>& loop, const std::string& words) {
  for (const std::string& text : texts(2, loop)) {
    CHECK_MESSAGE(contains(text, "out of step"), text);
    CHECK_MESSAGE(contains(text, words), text);
  }
}

void works(const std::function<void(Group)>& loop) {
  for (const std::string& text : texts(2, loop)) CHECK_MESSAGE(text.empty(), text);
}

}  // namespace

TEST_CASE("DistributedDataParallel finds a rank that left out a backward") {
  // Rank 1 does not like its batch in step 2, rank 0 in step 4: as many collectives on both.
  const auto loop = [](Group g, bool clears_first, const dist::DistributedDataParallelOptions& o) {
    DistributedDataParallel net{Scalar{}, g, o};
    int steps = 0;
    try {
      for (int step = 0; step < 6; ++step) {
        if (clears_first) net.zero_grad();
        const Tensor loss = net(input(g, step)).square();
        if (step == (g.rank() == 1 ? 2 : 4)) continue;
        net.zero_grad();
        loss.backward();
        ++steps;
      }
    } catch (const DistError&) {
      require(steps == 2, "found in the next backward");
      require(!net.module().w.grad().defined(), "no gradient of different steps is left");
      throw;
    }
  };
  for (const bool clears_first : {true, false})
    for (const auto& options : {dist::DistributedDataParallelOptions{},
                                {.find_unused_parameters = true},
                                {.static_graph = true},
                                {.comm_hook = dist::hooks::all_reduce()}})
      fails_on_both([&](Group g) { loop(g, clears_first, options); },
                    "left out the backwards of its forwards: 0, rank 1 1");
}

TEST_CASE("DistributedDataParallel is usable after ranks were out of step") {
  works([](Group g) {
    DistributedDataParallel net{Scalar{}, g};
    net(input(g, 0)).backward();
    net.zero_grad();
    if (g.rank() == 1) net(input(g, 1));
    try {
      net(input(g, 2)).backward();
      require(false, "out of step");
    } catch (const DistError&) {
    }
    net(input(g, 3)).backward();
    near(net.module().w.grad().item<double>(), 31.5, "the next step");
  });
}

TEST_CASE("DistributedDataParallel finds a backward over another forward's loss") {
  fails_on_both(
      [](Group g) {
        DistributedDataParallel net{Scalar{}, g};
        const Tensor first = net(input(g, 0)), second = net(input(g, 1));
        (g.rank() == 0 ? first : second).backward();
      },
      "left out the backwards of its forwards: 0, rank 1 1");
}

TEST_CASE("DistributedDataParallel finds a forward that threw on one rank alone") {
  fails_on_both(
      [](Group g) {
        DistributedDataParallel net{Picky{}, g};
        try {
          net(f64(g.rank() == 1 ? -1 : 1)).backward();
        } catch (const ValueError&) {
          net(f64(2)).backward();  // the next batch
        }
      },
      "Likely rank 1 ran a forward in training mode and did not use its output, or gave up a step");
}

TEST_CASE("DistributedDataParallel names the likely reason and the remedy of ranks out of step") {
  for (const int odd : {0, 1}) {
    const std::string who = str_cat("Likely rank ", odd, " ");
    fails_on_both(
        [&](Group g) {  // a sample's loss, for the log
          DistributedDataParallel net{Scalar{}, g};
          for (int step = 0; step < 3; ++step) {
            if (step == 1 && g.rank() == odd) net(input(g, step));
            net(input(g, step)).backward();
          }
        },
        who +
            "ran a forward in training mode and did not use its output, or gave up a step: run a "
            "forward for its value alone under NoGradGuard");
    fails_on_both(
        [&](Group g) {  // a look at the data between epochs
          DistributedDataParallel net{Scalar{}, g};
          const data::TensorDataset set{arange(0, 12).to(DType::f64)};
          data::Loader loader{set, {.batch_size = 1, .shard = g}};
          for (int epoch = 0; epoch < 2; ++epoch) {
            if (epoch == 1 && g.rank() == odd)
              for (auto batch : loader.epoch(epoch)) break;
            for (auto [x] : loader.epoch(epoch)) net(x).sum().backward();
          }
        },
        who + "took a batch and did not train on it: look at data under NoGradGuard");
    fails_on_both(
        [&](Group g) {
          DistributedDataParallel net{Scalar{}, g};
          for (int step = 0; step < 3; ++step) {
            const Tensor loss = net(input(g, step));
            loss.backward({}, {.retain_graph = true});
            if (step == 1 && g.rank() == odd) loss.backward();
          }
        },
        who + "ran backward once more through the graph of a step that is over");
  }
}

TEST_CASE("DistributedDataParallel names the escapes for a frozen parameter of each rank's own") {
  const auto train = [](Group g, const dist::DistributedDataParallelOptions& options) {
    Two m;
    m.b.requires_grad_(false);
    DistributedDataParallel net{m, g, options};
    for (int step = 0; step < 3; ++step) {
      net.zero_grad();
      net(input(g, step)).first.backward();
      const NoGradGuard guard;
      if (g.rank() == 0) m.b.mul_(0.9);  // an average of the weights, kept by one rank
    }
  };
  for (const std::string& text : texts(2, [&](Group g) { train(g, {}); })) {
    CHECK_MESSAGE(contains(text, "b on rank 1 has other values than on rank 0"), text);
    CHECK_MESSAGE(contains(text, "the option `ignored`; init_sync = false"), text);
  }
  works([&](Group g) { train(g, {.ignored = {"b"}}); });
  works([&](Group g) { train(g, {.init_sync = false}); });
}

TEST_CASE("DistributedDataParallel finds a batch that one rank's loader gave in vain") {
  fails_on_both(
      [](Group g) {
        DistributedDataParallel net{Scalar{}, g};
        const data::TensorDataset set{arange(0, 12).to(DType::f64)};
        data::Loader loader{set, {.batch_size = 1, .shard = g}};
        if (g.is_main())  // looks at a batch before the training
          for (auto batch : loader.epoch(0)) break;
        int step = 0;
        for (auto [x] : loader.epoch(0)) {
          if (++step == (g.rank() == 1 ? 3 : 5)) continue;  // filtered out
          net.zero_grad();
          net(x).sum().backward();
        }
      },
      "took batches from its loaders: 1, rank 1 2");
}

TEST_CASE("DistributedDataParallel lets a rank run a forward more on a batch of its loader") {
  works([](Group g) {
    DistributedDataParallel net{Scalar{}, g};
    const data::TensorDataset set{arange(0, 12).to(DType::f64)};
    data::Loader loader{set, {.batch_size = 1, .shard = g}};
    int step = 0;
    for (auto [x] : loader.epoch(0)) {
      if (++step > 1 && g.is_main()) net(x);  // for a picture, say
      net(x).sum().backward();
    }
    require(step == 6, "all batches");
  });
}

TEST_CASE(
    "DistributedDataParallel finds a backward more, through the graph of a step that is over") {
  fails_on_both(
      [](Group g) {
        DistributedDataParallel net{Scalar{}, g};
        for (int step = 0; step < 3; ++step) {
          const Tensor loss = net(input(g, step));
          loss.backward({}, {.retain_graph = true});
          if (step == 1 && g.rank() == 1) loss.backward();
        }
      },
      "ran forwards: 1, rank 1 0");
}

TEST_CASE("DistributedDataParallel finds parameters that differ, and names rank and parameter") {
  using Change = std::function<void(Group, DistributedDataParallel<nn::Linear>&, optim::SGD&)>;
  const auto write = [](Group g, Tensor p, double value) {
    const NoGradGuard guard;
    if (g.rank() == 1) p.reshape({-1})[77].fill_(value);
  };
  const std::map<std::string, std::pair<std::string, Change>> changes{
      {"a step that rank 1 skips, as its loss is NaN",
       {"weight",
        [](Group g, auto&, optim::SGD& opt) {
          if (g.rank() == 0) opt.step();
        }}},
      {"a step after a backward in no_sync on one rank",
       {"weight",
        [](Group g, auto& net, optim::SGD& opt) {
          opt.step();
          if (g.rank() == 0) return;
          const auto guard = net.no_sync();
          opt.zero_grad();
          net(full({1, 20}, 3)).sum().backward();
          opt.step();
          opt.zero_grad();
        }}},
      {"another learning rate on one rank",
       {"weight",
        [](Group g, auto&, optim::SGD& opt) {
          if (g.rank() == 1) opt.set_lr(0.5);
          opt.step();
        }}},
      {"one element, written on one rank",
       {"weight", [&](Group g, auto& net, auto&) { write(g, net.module().weight, 5); }}},
      {"a state dict that one rank loads",
       {"bias",
        [](Group g, auto& net, auto&) {
          auto state = net.state_dict();
          if (g.rank() == 1) net.load_state_dict({state[0], {"bias", full({10}, 2)}});
        }}},
  };
  for (const auto& [name, change] : changes) {
    const auto& shown_name = name;  // clang 14 captures no structured binding
    CAPTURE(shown_name);
    for (const std::string& text : texts(2, [&, change = change.second](Group g) {
           manual_seed(1);
           DistributedDataParallel net{nn::Linear{20, 10}, g};
           optim::SGD opt{net.parameters(), {.lr = 0.25}};
           net(full({1, 20}, 2)).sum().backward();
           change(g, net, opt);
           net.zero_grad();
           net(full({1, 20}, 2)).sum().backward();
         })) {
      CHECK_MESSAGE(contains(text, change.first + " on rank 1 has other values than on rank 0"),
                    text);
      CHECK_MESSAGE(contains(text, "times on rank 0"), text);
    }
  }
}

TEST_CASE("DistributedDataParallel leaves alone what no rank uses, until one does") {
  for (const std::string& text : texts(2, [](Group g) {
         DistributedDataParallel net{Two{}, g, {.find_unused_parameters = true}};
         const auto write = [&] {
           const NoGradGuard guard;
           net.module().b.fill_(g.rank());
         };
         const auto use = [&](bool both) {
           net.zero_grad();
           auto [ya, yb] = net(f64(1));
           (both ? ya + yb : ya).backward();
         };
         use(false);
         write();
         use(false);
         use(false);
         write();
         use(true);
         require(net.module().b.grad().defined(), "used");
         use(true);
       })) {
    CHECK_MESSAGE(contains(text, "b on rank 1 has other values"), text);
  }
}

TEST_CASE("DistributedDataParallel accepts writes on one rank that leave the parameters equal") {
  Warnings warnings;
  works([](Group g) {
    DistributedDataParallel net{Two{}, g};
    optim::SGD opt{net.parameters(), {.lr = 0.25}};
    const auto train = [&] {
      opt.zero_grad();
      auto [ya, yb] = net(f64(g.rank() + 1.0));
      (ya + yb).backward();
      near(net.module().a.grad().item<double>(), 1.5, "the mean");
      opt.step();
    };
    train();
    if (g.is_main()) {  // evaluates an average of the weights, and puts them back
      const NoGradGuard guard;
      Tensor a = net.module().a;
      const Tensor before = a.clone();
      a.fill_(7);
      a.copy_(before);
    }
    train();
    // Steps of its own on each rank, then the mean of all ranks.
    for (int step = 0; step < 2 + g.rank(); ++step) {
      const auto local = net.no_sync();
      opt.zero_grad();
      auto [ya, yb] = net(f64(g.rank() + 1.0));
      (ya + yb).backward();
      opt.step();
    }
    opt.zero_grad();
    {
      const NoGradGuard guard;
      for (Tensor p : net.parameters()) g.all_reduce(p, dist::ReduceOp::avg);
    }
    auto [ya, yb] = net(f64(g.rank() + 1.0));
    (ya + yb).backward();
    near(net.module().a.grad().item<double>(), 1.5, "the mean");
  });
  for (const std::string& text : warnings.all)
    CHECK_MESSAGE(contains(text, "local backwards"), text);
}

TEST_CASE("DistributedDataParallel lets ranks close windows of different lengths, or none") {
  works([](Group g) {
    DistributedDataParallel net{Scalar{}, g, {.find_unused_parameters = true}};
    for (int i = 0; i < 2 * (1 - g.rank()); ++i) {
      const auto local = net.no_sync();
      net(input(g, 0)).backward();
    }
    net.reduce_now();
    near(net.module().w.grad().item<double>(), 1, "two backwards on rank 0, none on rank 1");
  });
}

TEST_CASE("DistributedDataParallel warns on rank 0 of uneven numbers of local backwards") {
  Warnings warnings;
  works([](Group g) {
    DistributedDataParallel net{Scalar{}, g};
    for (int step = 0; step < 2; ++step) {
      if (g.rank() == 1) {  // alone in no_sync
        auto guard = net.no_sync();
        net(input(g, step)).backward();
      }
      net(input(g, step)).backward();
    }
  });
  REQUIRE(warnings.all.size() == 1);
  CHECK(contains(warnings.all[0],
                 "rank 0 accumulated 0 local backwards before this reduction, rank 1 1"));
}

TEST_CASE("DistributedDataParallel accepts loops that differ between ranks without harm") {
  Warnings warnings;
  works([](Group g) {
    DistributedDataParallel net{Scalar{}, g};
    const auto train = [&](int step) {
      net.zero_grad();
      net(input(g, step)).backward();
      near(net.module().w.grad().item<double>(), 1.5 + 10 * step, "the mean");
    };
    train(0);
    if (g.is_main()) {  // evaluation on one rank, in either way
      {
        NoGradGuard guard;
        net(input(g, 7));
      }
      net.eval();
      net(input(g, 7));
      net.train();
      autograd::grad({net(input(g, 7))}, {net.module().w});
      const Tensor x = input(g, 7).requires_grad_();
      autograd::grad({net(x)}, {x});  // what the output owes to the input
    }
    train(1);
    // A recurrent cell: as many forwards as the rank's sequence is long, one backward.
    net.zero_grad();
    Tensor sum = f64(0);
    for (int i = 0; i < (g.rank() == 0 ? 2 : 5); ++i) sum = sum + net(f64(1));
    sum.backward();
    near(net.module().w.grad().item<double>(), 3.5, "(2 + 5) / 2");
    train(2);
    // A last forward whose value alone is used, where the sequence was cut.
    net.zero_grad();
    Tensor loss = net(f64(1));
    if (g.rank() == 1) loss = loss + net(f64(1)).detach();
    loss.backward();
    train(3);
    // Backward twice through one forward, and a forward ahead of its backward, on all ranks.
    net.zero_grad();
    const Tensor ahead = net(f64(1)), twice = net(f64(2));
    twice.backward({}, {.retain_graph = true});
    twice.backward();
    near(net.module().w.grad().item<double>(), 4, "twice");
    train(4);
    // A warm-up forward on all ranks.
    net(f64(1));
    train(5);
    // Forwards on another thread.
    Tensor there;
    std::thread([&] { there = net(f64(3)); }).join();
    net.zero_grad();
    there.backward();
    near(net.module().w.grad().item<double>(), 3, "of another thread");
    // Uneven inputs inside join.
    net.zero_grad();
    net.join([&] {
      for (int i = 0; i < 2 + g.rank(); ++i) {
        net(f64(1));  // in vain
        net(f64(1)).backward();
      }
    });
    train(6);
  });
  CHECK(warnings.all.empty());
}

TEST_CASE("DistributedDataParallel does not count a loader's batches under NoGradGuard or join") {
  works([](Group g) {
    DistributedDataParallel net{Scalar{}, g};
    const data::TensorDataset set{arange(0, 8).to(DType::f64)};
    data::Loader loader{set, {.batch_size = 1, .shard = g}};
    for (auto [x] : loader.epoch(0)) {
      net(x).sum().backward();
      if (!g.is_main()) continue;
      NoGradGuard guard;
      for (auto batch : loader.epoch(1)) break;
    }
    net.join([&] {
      int taken = 0;
      for (auto [x] : loader.epoch(2))
        if (++taken > g.rank()) net(x).sum().backward();
    });
  });
}
