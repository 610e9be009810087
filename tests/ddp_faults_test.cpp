// DistributedDataParallel at its limits: exceptions of any type, backwards inside backwards, and very
// many parameters.
#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "ddp_helpers.h"

namespace {

struct Many : nn::Module {
  std::vector<nn::Parameter> w;
  Many() {
    for (int i = 0; i < 100000; ++i) w.emplace_back(full({}, i % 7));
  }
  Tensor forward(Tensor x) {
    std::vector<Tensor> all;
    for (size_t i = 0; i < w.size(); ++i)
      if (i != 70000) all.push_back(w[i].reshape({1}));
    return cat(all) * x;  // [99999]
  }
  LOCKSTEP_MODULE(Many, w)
};

struct Thrower : Scalar {
  bool throws = false;
  Tensor forward(Tensor x) {
    if (throws) throw 1;
    return w * x;
  }
  LOCKSTEP_MODULE(Thrower, w)
};

}  // namespace

TEST_CASE("an exception that is no std::exception ends the backward on every rank") {
  const auto ends = [](const std::function<void(Group)>& f) {
    std::vector<std::string> all(2);
    CHECK_THROWS(run_local(2,
                           [&](Group g) {
                             try {
                               f(g);
                             } catch (const DistError& e) {
                               all[static_cast<size_t>(g.rank())] = e.what();
                               throw;
                             } catch (int) {
                               all[static_cast<size_t>(g.rank())] = "its own";
                               // The handle unwinds only afterwards: the peer must hear of it from DDP.
                               std::this_thread::sleep_for(std::chrono::milliseconds(1500));
                               throw;
                             }
                           },
                           {.timeout = std::chrono::seconds(20)}));
    CHECK_MESSAGE(contains(all[0], "no std::exception"), all[0]);
    CHECK(all[1] == "its own");
  };
  const double begin = ranks::now();
  ends([](Group g) {  // in a hook, after the first bucket was launched
    DistributedDataParallel net{Two{}, g, {.bucket_cap_mb = 1e-6, .first_bucket_mb = 1e-6}};
    auto [ya, yb] = net(f64(1));
    ya.register_hook([&](const Tensor&) -> Tensor {
      if (g.rank() == 1) throw 1;
      return {};
    });
    (ya + yb).backward();
  });
  ends([](Group g) {  // in a comm hook that is called at the end of backward
    DistributedDataParallel net{
        Two{}, g, {.find_unused_parameters = true, .comm_hook = [&](dist::GradBucket& b) {
                     if (g.rank() == 1) throw 1;
                     return b.group->all_reduce(b.buffer);
                   }}};
    net(f64(1)).first.backward();
  });
  ends([](Group g) {  // in what rank 1 does when its reduction is complete
    DistributedDataParallel net{Scalar{}, g, {.comm_hook = [&](dist::GradBucket& b) {
                                  auto work = b.group->all_reduce(b.buffer);
                                  if (g.rank() == 1) work->then([] { throw 1; });
                                  return work;
                                }}};
    net(f64(1)).backward();
  });
  CHECK(ranks::now() - begin < 8 * ranks::kPatience);
}

TEST_CASE("an exception that is no std::exception in forward ends the peers' backward") {
  std::string text;
  CHECK_THROWS_AS(run_local(
                      2,
                      [&](Group g) {
                        DistributedDataParallel net{Thrower{}, g};
                        net.module().throws = g.rank() == 1;
                        try {
                          net(f64(1)).backward();
                        } catch (const DistError& e) {
                          text = e.what();
                        }
                      },
                      kQuick),
                  int);
  CHECK_MESSAGE(contains(text, "rank 1"), text);
  CHECK_MESSAGE(!contains(text, "within"), text);  // not by the deadline
}

TEST_CASE(
    "after a backward that failed in its midst the wrapper says so, and the group serves on") {
  const auto all = texts(2, [](Group g) {
    DistributedDataParallel net{Two{}, g, {.bucket_cap_mb = 1e-6, .first_bucket_mb = 1e-6}};
    const auto step = [&](bool fails) {
      auto [ya, yb] = net(f64(1));
      ya.register_hook([fails](const Tensor&) -> Tensor {
        if (fails) throw ValueError("the hook gave up");
        return {};
      });
      (ya + yb).backward();
    };
    try {
      step(g.rank() == 1);
      require(false, "an error on every rank");
    } catch (const Error&) {
    }
    require(!net.module().a.grad().defined() && !net.module().b.grad().defined(),
            "no gradient is left");
    const Tensor t = f64(1);
    g.all_reduce(t);
    near(t.item<double>(), 2, "the group");
    step(false);
  });
  for (const std::string& text : all) CHECK_MESSAGE(contains(text, "the hook gave up"), text);
}

TEST_CASE("an exception of any type in join ends it on every rank within a second") {
  std::vector<std::string> all(2);
  double thrown = 0, heard = 0;
  CHECK_THROWS_AS(run_local(2,
                            [&](Group g) {
                              DistributedDataParallel net{Scalar{}, g};
                              try {
                                net.join([&] {
                                  for (int i = 0; i < 3; ++i) {
                                    if (i == 2 && g.rank() == 1) {
                                      thrown = ranks::now();
                                      throw 1;
                                    }
                                    net(f64(1)).backward();
                                  }
                                });
                              } catch (const DistError& e) {
                                heard = ranks::now();
                                all[static_cast<size_t>(g.rank())] = e.what();
                              } catch (int) {
                                std::this_thread::sleep_for(std::chrono::milliseconds(1500));
                                throw;
                              }
                            },
                            {.timeout = std::chrono::seconds(20)}),
                  int);
  CHECK_MESSAGE(contains(all[0], "left join by an exception"), all[0]);
  CHECK(heard - thrown < 1 * ranks::kPatience);
}

TEST_CASE("run_on_main reports an exception that is no std::exception on every rank") {
  std::vector<int> own(2);
  for (const std::string& text : texts(2, [&](Group g) {
         try {
           dist::run_on_main(g, [] { throw 1; });
         } catch (int) {
           own[static_cast<size_t>(g.rank())] = 1;
           throw ValueError("rank 0 failed");
         }
       }))
    CHECK_MESSAGE(contains(text, "rank 0 failed"), text);
  CHECK(own == std::vector<int>{1, 0});
}

TEST_CASE("a backward inside a backward names a parameter that it reaches") {
  const auto all = texts(2, [](Group g) {
    DistributedDataParallel net{Scalar{}, g};
    const Tensor y = net(f64(1));
    y.register_hook([&](const Tensor&) -> Tensor {
      EnableGradGuard guard;
      net(f64(1)).backward();
      return {};
    });
    y.backward();
  });
  for (const std::string& text : all)
    CHECK_MESSAGE(contains(text, "a backward that reaches w started inside a backward"), text);
}

TEST_CASE("100,000 parameters are reduced") {
  for (const bool find : {true, false}) {
    const auto all = texts(2, [&](Group g) {
      DistributedDataParallel net{Many{}, g, {.find_unused_parameters = find}};
      for (int step = 0; step < 2; ++step) {
        net.zero_grad();
        net(full({1}, g.rank() + 1)).sum().backward();
      }
      const auto& w = net.module().w;
      for (const size_t i : {0, 16327, 16328, 65535, 99999})
        near(w[i].grad().item<double>(), 1.5, "gradient");
      require(!w[70000].grad().defined(), "unused");
    });
    for (const std::string& text : all)
      CHECK_MESSAGE((find ? text.empty() : contains(text, "w.70000 received no gradient")), text);
  }
}

TEST_CASE("an exception inside backward reaches every rank with its text") {
  const auto all = texts(2, [](Group g) {
    DistributedDataParallel net{Two{}, g, {.bucket_cap_mb = 1e-6, .first_bucket_mb = 1e-6}};
    auto [ya, yb] = net(f64(1));
    // b's gradient comes first; rank 1 fails before a's.
    ya.register_hook([&](const Tensor&) -> Tensor {
      if (g.rank() == 1) throw ValueError("the hook of a gave up");
      return {};
    });
    (ya + yb).backward();
  });
  CHECK(contains(all[0], "rank 1"));
  CHECK(contains(all[0], "the hook of a gave up"));
  CHECK(contains(all[1], "the hook of a gave up"));
}

TEST_CASE("an exception before anything was sent stays on its rank") {
  CHECK_NOTHROW(run_local(
      2,
      [](Group g) {
        DistributedDataParallel net{Scalar{}, g};
        bool thrown = false;
        if (g.rank() == 1) {
          Tensor y = net(f64(1));
          y.register_hook([](const Tensor&) -> Tensor { throw ValueError("not yet"); });
          try {
            y.backward();
          } catch (const ValueError&) {
            thrown = true;
          }
          require(thrown, "the hook's exception");
        }
        net(f64(g.rank() + 1.0)).backward();
        near(net.module().w.grad().item<double>(), 1.5, "the next backward takes its place");
      },
      kQuick));
}
