// Construction: models that differ between ranks in any way are refused on every rank with both
// descriptions, equal ones start from rank 0's values, and odd ones (no buffer, no dimension, no element)
// work. Nothing hangs, whichever rank is the odd one.
#include "cases.h"

#include <unistd.h>

namespace {

using namespace cases;

template <class M>
M plain() {
  return M{};
}

/// Every rank makes a wrapper, the odd one around what `make_odd` gives: all are refused. Also with buckets
/// of one parameter, which would pair other tensors.
template <class A, class B>
void refused(const Group& g, const std::function<A()>& make, const std::function<B()>& make_odd,
             const std::function<std::vector<std::string>(int)>& parts,
             const DistributedDataParallelOptions& options = {},
             const DistributedDataParallelOptions& odd_options = {}) {
  for (int odd = 0; odd < g.size(); ++odd)
    refuses(g, parts(odd), [&] {
      if (g.rank() == odd) {
        DistributedDataParallel net{make_odd(), g, odd_options};
      } else {
        DistributedDataParallel net{make(), g, options};
      }
    });
}
/// Parts that do not depend on which rank is odd.
std::function<std::vector<std::string>(int)> always(std::vector<std::string> parts) {
  return [parts](int) { return parts; };
}

// ---- another number of parameters ----

struct Short : nn::Module {
  nn::Linear one{3, 4};
  Tensor forward(Tensor x) { return one(x); }
  LOCKSTEP_MODULE(Short, one)
};
struct Long : nn::Module {
  nn::Linear one{3, 4}, two{4, 4};
  Tensor forward(Tensor x) { return two(one(x)); }
  LOCKSTEP_MODULE(Long, one, two)
};
struct NoParameters : nn::Module {
  nn::Dropout drop{0.5};
  Tensor forward(Tensor x) { return drop(x); }
  LOCKSTEP_MODULE(NoParameters, drop)
};

/// "rank 0 has 2 parameters ... rank 1 has 4": rank 0's number and that of the first that differs from it.
std::function<std::vector<std::string>(int)> counts(int usual, int odd_count, std::string name) {
  return [=](int odd) {
    const int first_other = odd == 0 ? 1 : odd;
    return std::vector<std::string>{
        str_cat("rank 0 has ", odd == 0 ? odd_count : usual, " parameters"),
        str_cat("rank ", first_other, " has ", odd == 0 ? usual : odd_count), name};
  };
}

void other_number_of_parameters(Group g) {
  const std::function<Short()> two = plain<Short>;
  const std::function<Long()> four = plain<Long>;
  refused(g, two, four, counts(2, 4, "two.weight"));
  refused(g, four, two, counts(4, 2, "two.weight"));
  refused(g, two, four, always({"nothing more", "\"two.weight: trainable parameter"}));
  const std::function<NoParameters()> none = plain<NoParameters>;
  refused(g, two, none, counts(2, 0, "one.weight"));
  const std::function<Short()> frozen = [] {
    Short s;
    s.requires_grad_(false);
    return s;
  };
  refused(g, two, frozen, always({"one.weight", "trainable", "frozen"}));
  refused(g, frozen, two, always({"one.weight", "trainable", "frozen"}));
}

/// The last rank comes when the others' time is over, or the first does.
void missing_rank(const Group& g, int missing) {
  const double begin = ranks::now();
  if (g.rank() == missing) std::this_thread::sleep_for(kDeadline + kDeadline / 4);
  try {
    DistributedDataParallel net{Short{}, g};
  } catch (const Error&) {
    require(ranks::now() - begin < 5.0 * ranks::kPatience, "the error came late");
    throw;
  }
}

void told_in_time(const std::function<void()>& construct) {
  const double begin = ranks::now();
  try {
    construct();
  } catch (const Error&) {
    ranks::below(begin, 2, "the news that a rank is gone");
    throw;
  }
}

void rank_gives_up(Group g) {
  if (g.rank() == 1) throw ValueError("rank 1 has no data");
  told_in_time([&] { DistributedDataParallel net{Short{}, g}; });
}

void rank_dies(Group g) {
  if (g.rank() == 1) _exit(3);
  told_in_time([&] { DistributedDataParallel net{Short{}, g}; });
}

/// Its last handle goes while the exception passes.
void rank_unwinds(Group g) {
  auto own = std::make_unique<Group>(g.process_group().child());
  if (g.rank() == 1) {
    const auto last = std::move(own);
    throw ValueError("rank 1 has no data");
  }
  told_in_time([&] { DistributedDataParallel net{Short{}, *own}; });
}

// ---- the same number, and yet another model ----

struct Matrix : nn::Module {
  nn::Parameter matrix, bias{f64({1, 2})};
  nn::Buffer scale{f64({1, 2, 3})};
  explicit Matrix(Tensor m = zeros({3, 4}, {.dtype = DType::f64})) : matrix(m) {}
  Tensor forward(Tensor x) { return matrix.sum() * x + bias.sum(); }
  LOCKSTEP_MODULE(Matrix, matrix, bias, scale)
};
struct LeftRight : nn::Module {
  nn::Parameter left{zeros({8, 8})}, right{ones({8, 8})};
  Tensor forward(Tensor x) { return matmul(left, matmul(right, x)); }
  LOCKSTEP_MODULE(LeftRight, left, right)
};
struct RightLeft : nn::Module {
  nn::Parameter left{zeros({8, 8})}, right{ones({8, 8})};
  Tensor forward(Tensor x) { return matmul(left, matmul(right, x)); }
  LOCKSTEP_MODULE(RightLeft, right, left)
};
struct LeftMiddle : nn::Module {
  nn::Parameter left{zeros({8, 8})}, middle{ones({8, 8})};
  Tensor forward(Tensor x) { return matmul(left, matmul(middle, x)); }
  LOCKSTEP_MODULE(LeftMiddle, left, middle)
};

void other_description(Group g) {
  const std::function<Matrix()> usual = [] { return Matrix{}; };
  auto odd = [&](std::function<void(Matrix&)> change, std::vector<std::string> parts) {
    const std::function<Matrix()> make = [&] {
      Matrix m;
      change(m);
      return m;
    };
    refused(g, usual, make, always(parts));
  };
  odd(
      [](Matrix& m) {
        m.matrix = zeros({4, 3}, {.dtype = DType::f64});
      },
      {"matrix", "[3, 4]", "[4, 3]"});
  odd([](Matrix& m) { m.matrix = zeros({12}, {.dtype = DType::f64}); },
      {"matrix", "[3, 4]", "[12]"});
  odd([](Matrix& m) { m.matrix = zeros({3, 4}); }, {"matrix", "f32", "f64"});
  odd([](Matrix& m) { m.bias = zeros({2}); }, {"bias", "f32", "f64"});
  odd([](Matrix& m) { m.matrix = zeros({4, 3}, {.dtype = DType::f64}).t(); }, {"matrix"});
  odd([](Matrix& m) { m.bias.requires_grad_(false); }, {"bias", "trainable", "frozen"});
  const std::function<LeftRight()> left = plain<LeftRight>;
  const std::function<RightLeft()> right = plain<RightLeft>;
  const std::function<LeftMiddle()> middle = plain<LeftMiddle>;
  refused(g, left, right, always({"left", "right"}));
  refused(g, left, middle, always({"right", "middle"}));
}

// ---- buffers and ignore lists ----

struct TwoBuffers : nn::Module {
  nn::Parameter w{f64(1)};
  nn::Buffer mean{f64({1, 2})}, scale{f64({3, 4})};
  Tensor forward(Tensor x) { return w * x; }
  LOCKSTEP_MODULE(TwoBuffers, w, mean, scale)
};
struct SwappedBuffers : nn::Module {
  nn::Parameter w{f64(1)};
  nn::Buffer mean{f64({1, 2})}, scale{f64({3, 4})};
  Tensor forward(Tensor x) { return w * x; }
  LOCKSTEP_MODULE(SwappedBuffers, w, scale, mean)
};

void other_buffers(Group g) {
  const std::function<TwoBuffers()> usual = plain<TwoBuffers>;
  for (const bool broadcast : {true, false}) {
    const DistributedDataParallelOptions options{.broadcast_buffers = broadcast};
    auto odd = [&](std::function<void(TwoBuffers&)> change, std::vector<std::string> parts) {
      const std::function<TwoBuffers()> make = [&] {
        TwoBuffers m;
        change(m);
        return m;
      };
      refused(g, usual, make, always(parts), options, options);
    };
    odd([](TwoBuffers& m) { m.scale = f64({3, 4, 5}); }, {"scale", "[2]", "[3]"});
    odd([](TwoBuffers& m) { m.mean = zeros({2}); }, {"mean", "f32", "f64"});
    odd([](TwoBuffers& m) { m.scale = Tensor(); }, {"scale"});
    const std::function<SwappedBuffers()> swapped = plain<SwappedBuffers>;
    refused(g, usual, swapped, always({"mean", "scale"}), options, options);
    const std::function<Scalar()> none = plain<Scalar>;
    refused(g, usual, none, always({"mean"}), options, options);
  }
}

void other_ignored(Group g) {
  const std::function<TwoBuffers()> make = plain<TwoBuffers>;
  const std::function<LeftRight()> two = plain<LeftRight>;
  refused(g, make, make, always({"mean", "ignored"}), {}, {.ignored = {"mean"}});
  refused(g, make, make, always({"mean", "ignored"}), {.ignored = {"scale", "mean"}},
          {.ignored = {"scale"}});
  refused(g, two, two, always({"left", "ignored"}), {}, {.ignored = {"left"}});
  refused(g, two, two, always({"left", "ignored"}), {.ignored = {"left"}}, {.ignored = {"right"}});
}

/// Options decide which buckets a rank sends, and what it expects of the others.
void other_options(Group g) {
  const std::function<TwoBuffers()> make = plain<TwoBuffers>;
  refused(g, make, make, always({"bucket_cap_mb"}), {}, {.bucket_cap_mb = 1e-6});
  refused(g, make, make, always({"first_bucket_mb"}), {}, {.first_bucket_mb = 1e-6});
  refused(g, make, make, always({"find_unused_parameters true", "find_unused_parameters false"}),
          {}, {.find_unused_parameters = true});
  refused(g, make, make, always({"broadcast_buffers true", "broadcast_buffers false"}), {},
          {.broadcast_buffers = false});
  refused(g, make, make, always({"static_graph true", "static_graph false"}), {},
          {.static_graph = true});
  refused(g, make, make, always({"no comm_hook", "a comm_hook"}), {},
          {.comm_hook = [](dist::GradBucket& b) { return b.group->all_reduce(b.buffer); }});
  refused(g, make, make, always({"ignored nothing_of_this_name"}), {},
          {.ignored = {"nothing_of_this_name"}});
}

// ---- rank 0's values ----

struct Noise : nn::Module {
  nn::Parameter w{f64({1, 2})};
  nn::Buffer noise{f64({0, 0, 0})}, steps{scalar(0, {.dtype = DType::i64})};
  Tensor forward(Tensor x) { return (w * x).sum() + noise.sum() * 0.0; }
  LOCKSTEP_MODULE(Noise, w, noise, steps)
};

void buffers_at_init(Group g) {
  for (const bool broadcast : {false, true})
    for (const bool init : {true, false}) {
      Noise m;
      const double r = g.rank();
      m.noise = f64({r, r + 0.5, -r});
      if (g.rank() == 0)  // as if from a checkpoint
        m.load_state_dict({{"w", f64({7, 8})},
                           {"noise", f64({1, 2, 3})},
                           {"steps", scalar(5, {.dtype = DType::i64})}});
      const auto own = m.noise.to_vector<double>();
      DistributedDataParallel net{m, g, {.broadcast_buffers = broadcast, .init_sync = init}};
      require(m.noise.to_vector<double>() == (init ? std::vector<double>{1, 2, 3} : own),
              "noise after construction");
      require(m.steps.item<int64_t>() == (init || g.rank() == 0 ? 5 : 0), "steps");
      require(m.w.to_vector<double>() ==
                  (init || g.rank() == 0 ? std::vector<double>{7, 8} : std::vector<double>{1, 2}),
              "w after construction");
      for (int step = 0; step < 2; ++step) {
        net.zero_grad();
        m.noise = m.noise + f64(10 * (r + 1));  // by rank
        m.steps = m.steps + 1;
        const auto mine = m.noise.to_vector<double>();
        net(f64(1)).backward();
        if (!broadcast)
          require(m.noise.to_vector<double>() == mine, "a rank's own buffer was changed");
        else
          same_bits(g, m.noise, "noise");
      }
      if (!broadcast && init) near(m.noise[0].item<double>(), 1 + 20 * (r + 1), "noise");
    }
}

// ---- odd models ----

struct Bare : nn::Module {  // one parameter without dimension, no buffers
  nn::Parameter s{f64(2)};
  Tensor forward(Tensor x) { return s * x; }
  LOCKSTEP_MODULE(Bare, s)
};
struct Empties : nn::Module {  // elements are missing in the first, a middle and the last place
  nn::Parameter none{zeros({0, 3}, {.dtype = DType::f64})}, v{f64({1, 2})},
      nothing{zeros({0}, {.dtype = DType::f64})}, s{f64(3)}, f{ones({5})}, last{zeros({2, 0})};
  nn::Buffer no{zeros({0})}, flag{scalar(1, {.dtype = DType::boolean})};
  Tensor forward(Tensor x) {
    return (v * x).sum() * s + none.sum() + nothing.sum() + ((f * x).sum() + last.sum());
  }
  LOCKSTEP_MODULE(Empties, none, v, nothing, s, f, last, no, flag)
};
struct OnlyEmpty : nn::Module {
  nn::Parameter none{zeros({0, 3}, {.dtype = DType::f64})};
  Tensor forward(Tensor x) { return none.sum() + x; }
  LOCKSTEP_MODULE(OnlyEmpty, none)
};

void odd_models(Group g) {
  const double mean = (g.size() + 1) / 2.0;
  for (const bool find : {false, true})
    for (const auto& options : layouts({.find_unused_parameters = find})) {
      DistributedDataParallel bare{Bare{}, g, options};
      DistributedDataParallel empties{Empties{}, g, options};
      DistributedDataParallel only{OnlyEmpty{}, g, options};
      optim::SGD opt{empties.parameters(), {.lr = 0.1, .momentum = 0.9}};
      for (int step = 0; step < 2; ++step) {
        bare.zero_grad(), empties.zero_grad(), only.zero_grad();
        bare(f64(g.rank() + 1.0)).backward();
        near(bare.module().s.grad().item<double>(), mean, "s.grad");
        Empties& m = empties.module();
        const double s = m.s.item<double>(), v = m.v.to_vector<double>()[0];
        empties(f64(g.rank() + 1.0)).backward();
        near(m.v.grad()[0].item<double>(), s * mean, "v.grad");
        require(m.none.grad().shape() == Shape({0, 3}) && m.last.grad().shape() == Shape({2, 0}),
                "empty gradients");
        require(std::abs(m.f.grad()[4].item<double>() - mean) < 1e-6, "f.grad, f32");
        if (step == 0) near(m.s.grad().item<double>(), 3 * v * mean, "s.grad");
        opt.step();
        in_step(g, empties);
        only(f64(g.rank() + 1.0)).backward();
        require(only.module().none.grad().numel() == 0, "an only gradient without elements");
      }
    }
  for (const auto& options : layouts()) {
    refuses(g, {"no parameter that requires grad"}, [&] {
      Long frozen;
      frozen.requires_grad_(false);
      DistributedDataParallel net{frozen, g, options};
    });
    refuses(g, {"no parameter that requires grad"}, [&] {
      DistributedDataParallel net{NoParameters{}, g, options};
    });
    refuses(g, {"no parameter that requires grad"}, [&] {
      DistributedDataParallel net{Bare{}, g, {.ignored = {"s"}}};
    });
  }
}

}  // namespace

const std::vector<cases::Case>& cases::all() {
  static const std::vector<Case> list{
      {"another number of parameters", 2, other_number_of_parameters},
      {"another number of parameters on one of three ranks", 3, other_number_of_parameters},
      {.name = "a rank that does not construct",
       .body = [](Group g) { missing_rank(g, 1); },
       .throws = {"rank 1"},
       .timeout = kDeadline},
      {.name = "rank 0 of three does not construct",
       .size = 3,
       .body = [](Group g) { missing_rank(g, 0); },
       .throws = {"rank 0"},
       .timeout = kDeadline},
      {.name = "a rank that gives up before it constructs",
       .size = 3,
       .body = rank_gives_up,
       .throws = {"rank 1"}},
      {.name = "a rank that an exception takes out of the group before it constructs",
       .size = 3,
       .body = rank_unwinds,
       .throws = {"rank 1"}},
      {.name = "a rank that dies before it constructs",
       .body = rank_dies,
       .throws = {"rank 1"},
       .threads = false,
       .codes = {{1, 3}}},
      {"another shape, dtype, order, layout or name", 2, other_description},
      {"the same on one of three ranks", 3, other_description},
      {"other buffers", 2, other_buffers},
      {"other buffers on one of three ranks", 3, other_buffers},
      {"other ignored tensors", 3, other_ignored},
      {"other options", 2, other_options},
      {"other options on one of three ranks", 3, other_options},
      {"buffers start from rank 0's, and are each rank's own where they are not broadcast", 3,
       buffers_at_init},
      {"no buffers, no dimension, no element, nothing to train", 2, odd_models},
      {"odd models on three ranks", 3, odd_models},
  };
  return list;
}
