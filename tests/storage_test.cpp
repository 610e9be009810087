// Storage whose bytes go and come back, and read-only storage that every path in place refuses.
#include <doctest/doctest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <lockstep/autograd/gradcheck.h>
#include <lockstep/lockstep.h>

using namespace lockstep;
using doctest::Contains;

namespace {

using V = std::vector<double>;
V values(const Tensor& t) { return t.to_vector<double>(); }

/// Keeps a copy of a storage's bytes.
struct Keeper : BytesOwner {
  Tensor copy;
  std::atomic<int> restored{0};
  explicit Keeper(const Tensor& t) : copy(t.detach().clone()) {}
  Ref<Storage> restore(const Storage& released) override {
    CHECK(released.bytes() == copy.storage().bytes());
    ++restored;
    return copy.clone().ref()->storage;
  }
};
std::shared_ptr<Keeper> keep(const Tensor& t) {
  auto keeper = std::make_shared<Keeper>(t);
  t.storage().set_owner(keeper);
  return keeper;
}
void make_read_only(const Tensor& t) { t.storage().set_read_only("shared by all ranks"); }

}  // namespace

// ---- bytes that go and come back ----

TEST_CASE("released bytes are freed, come back when they are read, and the version stands") {
  const Tensor x = tensor(V{1, 2, 3});
  const Tensor view = x.narrow(0, 1, 2);
  const auto keeper = keep(x);
  const int64_t before = memory_stats().active_bytes;
  const uint32_t version = x.storage().version();
  x.storage().release_bytes();
  CHECK_FALSE(x.storage().has_bytes());
  CHECK(memory_stats().active_bytes == before - 24);
  x.storage().release_bytes();  // again
  CHECK(x.shape() == Shape{3});
  CHECK(keeper->restored == 0);
  CHECK(values(view) == V{2, 3});
  CHECK(values(x * 2.0) == V{2, 4, 6});
  CHECK(keeper->restored == 1);
  CHECK(x.storage().has_bytes());
  CHECK(x.storage().version() == version);
  CHECK(memory_stats().active_bytes == before);
}

TEST_CASE("backward reads saved tensors whose bytes went and came back") {
  const Tensor w = tensor(V{1, 2, 3, 4}, {2, 2}).requires_grad_(), x = tensor(V{5, 6}, {1, 2});
  const auto gradient = [&](bool release) {
    w.set_grad({});
    const Tensor v = x.detach().requires_grad_();
    const auto keeper = keep(w);
    const Tensor loss = matmul(v, w).square().sum();
    if (release) w.storage().release_bytes();
    loss.backward();
    CHECK(keeper->restored == (release ? 1 : 0));
    return std::pair(values(v.grad()), values(w.grad()));
  };
  CHECK(gradient(true) == gradient(false));
  w.storage().release_bytes();
  CHECK(values(w) == V{1, 2, 3, 4});
}

TEST_CASE("many threads that read at once bring the bytes back once") {
  for (int round = 0; round < 20; ++round) {
    const Tensor x = ones({1000}, {.dtype = DType::f64});
    const auto keeper = keep(x);
    x.storage().release_bytes();
    std::vector<std::thread> threads;
    std::atomic<int> right{0};
    for (int i = 0; i < 4; ++i) threads.emplace_back([&] { right += x.data<double>()[999] == 1; });
    for (std::thread& t : threads) t.join();
    CHECK(right == 4);
    CHECK(keeper->restored == 1);
  }
}

TEST_CASE(
    "without an owner bytes stay; what an owner returns must fit; its exception passes through") {
  const Tensor x = tensor(V{1, 2});
  CHECK_THROWS_WITH_AS(x.storage().release_bytes(),
                       Contains("no owner that could bring its 16 bytes"), Error);
  CHECK(values(x) == V{1, 2});
  struct Odd : BytesOwner {
    int mode = 0;
    Ref<Storage> restore(const Storage&) override {
      if (mode == 0) throw std::runtime_error("from the owner");
      if (mode == 1) return nullptr;
      return tensor(V(static_cast<size_t>(mode))).ref()->storage;
    }
  };
  const auto odd = std::make_shared<Odd>();
  x.storage().set_owner(odd);
  x.storage().release_bytes();
  CHECK_THROWS_WITH_AS(values(x), "from the owner", std::runtime_error);
  odd->mode = 1;
  CHECK_THROWS_WITH_AS(values(x), Contains("returned none"), Error);
  odd->mode = 3;
  CHECK_THROWS_WITH_AS(values(x), Contains("was to bring back 16 bytes on cpu and returned 24"),
                       Error);
  odd->mode = 2;
  CHECK(values(x) == V{0, 0});
}

TEST_CASE("external memory is released too, and an owner may lend memory that others use") {
  std::vector<double> outside{7, 8};
  int released = 0;
  struct Lender : BytesOwner {
    Tensor memory = tensor(V{7, 8});
    Ref<Storage> restore(const Storage&) override { return memory.ref()->storage; }
  };
  const auto lender = std::make_shared<Lender>();
  {
    const Tensor x = from_blob(outside.data(), {2}, {.dtype = DType::f64}, [&] { ++released; });
    x.storage().set_owner(lender);
    x.storage().release_bytes();
    CHECK(released == 1);
    CHECK(x.data_ptr() == lender->memory.data_ptr());
    x.storage().release_bytes();
    CHECK(values(lender->memory) == V{7, 8});
    CHECK(values(x) == V{7, 8});
    CHECK(lender->memory.storage().use_count() == 2);
    x.storage().set_owner(nullptr);
  }
  CHECK(released == 1);
  CHECK(lender->memory.storage().use_count() == 1);
  {
    const Tensor y = tensor(V{1});
    keep(y);
    y.storage().release_bytes();
  }  // destroyed without bytes
  const Tensor z = tensor(V{1, 2});
  keep(z);
  z.storage().release_bytes();
  z.storage().set_owner(nullptr);  // which brings them back
  CHECK(values(z) == V{1, 2});
}

TEST_CASE("swap_memory exchanges what is known of the memory") {
  const Tensor a = tensor(V{1, 2}), b = tensor(V{3, 4});
  keep(a);
  a.storage().release_bytes();
  b.storage().set_read_only("mapped");
  a.storage().swap_memory(b.storage());
  CHECK(a.storage().has_bytes());
  CHECK_FALSE(b.storage().has_bytes());
  CHECK(a.storage().is_read_only());
  CHECK(values(a) == V{3, 4});
  CHECK(values(b) == V{1, 2});
}

TEST_CASE("no op takes over memory that has an owner or is read-only") {
  for (bool owned : {true, false}) {
    Tensor x = tensor(V{-1, 2});
    if (owned)
      keep(x);
    else
      make_read_only(x);
    const double* at = x.data<double>();
    const Tensor y = relu(std::move(x));
    CHECK(y.data_ptr() != at);
  }
}

// ---- read-only ----

TEST_CASE("every op in place refuses a read-only tensor by name, and its views too") {
  const Tensor x = tensor(V{1, 2, 3, 4}, {2, 2});
  make_read_only(x);
  CHECK(x.storage().is_read_only());
  Tensor t = x, row = x[0];
  const std::vector<std::pair<std::string, std::function<void()>>> writes{
      {"relu_", [&] { relu_(t); }},
      {"relu_", [&] { relu_(row); }},
      {"clamp_", [&] { clamp_(t, 0, 1); }},
      {"add_", [&] { t.add_(1); }},
      {"add_", [&] { t += x; }},
      {"mul_", [&] { t.mul_(x); }},
      {"mul_", [&] { t *= x; }},
      {"copy_",
       [&] {
         t.copy_(ones({2, 2}));
       }},
      {"copy_", [&] { x[0] = ones({2}); }},
      {"fill_", [&] { x[1] = 3; }},
      {"fill_", [&] { t.zero_(); }},
      {"copy_", [&] { nn::init::normal_(x); }},
      {"fill_", [&] { nn::init::zeros_(x); }},
  };
  for (const auto& [name, write] : writes) {
    CHECK_THROWS_WITH_AS(write(), (name + ": the tensor is read-only: shared by all ranks").c_str(),
                         ValueError);
    NoGradGuard off;
    CHECK_THROWS_AS(write(), ValueError);
  }
  CHECK(values(x) == V{1, 2, 3, 4});
  CHECK(x.storage().version() == 0);
  CHECK(values(x * 2.0) == V{2, 4, 6, 8});
  x.storage().set_read_only("");
  CHECK_NOTHROW(t.add_(1));
}

TEST_CASE("optimizers and clipping refuse before they change anything") {
  const Tensor a = tensor(V{1, 2}).requires_grad_(), b = tensor(V{3, 4}).requires_grad_();
  (a * 2.0 + b * 3.0).sum().backward();
  make_read_only(b);
  optim::SGD sgd({a, b}, {.lr = 1});
  optim::Adam adam({a, b}, {.lr = 1});
  CHECK_THROWS_WITH_AS(sgd.step(), Contains("step: the tensor is read-only: shared by"),
                       ValueError);
  CHECK_THROWS_WITH_AS(adam.step(), Contains("step: the tensor is read-only: shared by"),
                       ValueError);
  CHECK(values(a) == V{1, 2});
  make_read_only(b.grad());
  CHECK_THROWS_WITH_AS(optim::clip_grad_norm_({a, b}, 0.1),
                       Contains("clip_grad_norm_: the tensor is"), ValueError);
  CHECK_THROWS_WITH_AS(optim::clip_grad_value_({a, b}, 0.1),
                       Contains("clip_grad_value_: the tensor is"), ValueError);
  CHECK(values(a.grad()) == V{2, 2});
  CHECK_THROWS_AS(sgd.zero_grad(false), ValueError);
  CHECK_NOTHROW(sgd.zero_grad());
}

TEST_CASE("batch norm's statistics, load_state_dict, gradcheck and collectives refuse as well") {
  nn::BatchNorm1d norm{2};
  make_read_only(norm.running_var);
  const V mean = values(norm.running_mean);
  CHECK_THROWS_WITH_AS(norm(randn({4, 2})), Contains("batch_norm: the tensor is read-only"),
                       ValueError);
  CHECK(values(norm.running_mean) == mean);
  CHECK(norm.num_batches_tracked.item<int64_t>() == 0);
  norm.eval();
  CHECK_NOTHROW(norm(randn({4, 2})));

  nn::Linear net{2, 2}, other{2, 2};
  make_read_only(net.bias);
  const V weight = values(net.weight);
  CHECK_THROWS_WITH_AS(net.load_state_dict(other.state_dict()),
                       Contains("load_state_dict: the tensor is read-only"), ValueError);
  CHECK(values(net.weight) == weight);

  const Tensor x = tensor(V{1, 2}).requires_grad_();
  make_read_only(x);
  CHECK_THROWS_WITH_AS(
      autograd::gradcheck([](const std::vector<Tensor>& in) { return in[0] * in[0]; }, {x}),
      Contains("gradcheck: the tensor is read-only"), ValueError);

  dist::run_local(2, [](dist::Group group) {
    const Tensor sum = ones({2});
    make_read_only(sum);
    const auto refused = [&](const std::function<void()>& f, const std::string& name) {
      try {
        f();
      } catch (const ValueError& e) {
        return std::string(e.what()).find(name + ": the tensor is read-only") != std::string::npos;
      }
      return false;
    };
    const bool reduced = refused([&] { group.all_reduce(sum); }, "all_reduce");
    CHECK(reduced);
    const Tensor all = ones({4});
    make_read_only(all);
    const bool gathered = refused([&] { group.all_gather(all, ones({2})); }, "all_gather");
    CHECK(gathered);
  });
}
