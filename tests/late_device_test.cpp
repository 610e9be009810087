// A second device: what is promised of devices, tried on one whose kernels run late and whose memory the host
// cannot touch.
#include <doctest/doctest.h>

#include <unistd.h>

#include <cerrno>
#include <set>
#include <sstream>

#include <lockstep/lockstep.h>
#include <lockstep/tensor/ops/copy.h>

#include "late_device/late_device.h"
#include "step_models.h"

using namespace lockstep;
using doctest::Contains;
using step_models::Cnn, step_models::Mixed, step_models::Mlp;

namespace {

Tensor on_late(const Tensor& t, int index = 0) { return t.to(late::device(index)); }

/// Whether the host can read a byte at p.
bool host_reads(const void* p) {
  int pipe[2];
  REQUIRE(::pipe(pipe) == 0);
  const bool read = ::write(pipe[1], p, 1) == 1;
  if (!read) CHECK(errno == EFAULT);
  ::close(pipe[0]);
  ::close(pipe[1]);
  return read;
}

}  // namespace

TEST_CASE("devices: text forms both ways, and what is no device") {
  const Device d = late::device(1);
  CHECK(str_cat(d) == "late:1");
  CHECK(Device("late:1") == d);
  CHECK(Device("late") == late::device(0));
  CHECK(Device("cpu") == Device());
  CHECK(Device("cuda:3") == Device(DeviceType::cuda, 3));
  std::ostringstream out;
  out << d;
  CHECK(out.str() == "late:1");
  for (const char* text : {"", "gpu", "late:", "late:x", "late:1x", "late:-1", "cpu:1", "late:99999999999"})
    CHECK_THROWS_AS(Device{text}, ValueError);
  CHECK_THROWS_WITH_AS(empty({1}, {.device = late::device(2)}),
                       Contains("there is no late:2; this process can use 2 of type late"),
                       DeviceError);
  CHECK_THROWS_WITH_AS(empty({1}, {.device = "cuda"}), Contains("no kernels are loaded for cuda:0"),
                       DeviceError);
  CHECK_THROWS_AS(register_device("late", nullptr), ValueError);
  CHECK_THROWS_AS(register_device("a:b", nullptr), ValueError);
}

TEST_CASE("devices: best is this process's own one") {
  late::type();
  CHECK(Device::best(0) == late::device(0));
  CHECK(Device::best(1) == late::device(1));
}

TEST_CASE("devices: every kernel of the CPU is on the second device, for the same dtypes") {
  const DeviceType type = late::type();
  size_t count = 0;
  for (const KernelEntry* kernel : all_kernels()) {
    if (kernel->name() == "generator_draw") continue;  // host memory alone
    INFO(kernel->name());
    CHECK(kernel->dtypes(type) == kernel->dtypes(DeviceType::cpu));
    ++count;
  }
  CHECK(count > 60);
  const std::string table = kernel_table();
  CHECK(table.find("relu  cpu: f32 f64 f16 bf16 i64 i32 i16 i8 u8  late: f32 f64 f16 bf16 i64 i32 i16 i8 u8\n") !=
        std::string::npos);
  CHECK(table.find("softmax_backward  cpu: f32 f64 f16 bf16  late: f32 f64 f16 bf16\n") != std::string::npos);
}

TEST_CASE("devices: the host cannot touch a device's memory, and reads elements by copies") {
  const Tensor x = tensor<float>({1, 2, 3}), y = on_late(x);
  CHECK(host_reads(x.data_ptr()));
  CHECK(!host_reads(y.data_ptr()));
  CHECK(y.device() == late::device());
  CHECK(y.to_vector<float>() == std::vector<float>{1, 2, 3});
  CHECK(y[1].item<int>() == 2);
  CHECK(y.to_string() == "tensor([1, 2, 3], shape [3], f32, late:0)");
  CHECK(y.to(Device()).data<float>()[2] == 3);
  CHECK(y.to(late::device()).is_same(y));
}

TEST_CASE("devices: copies keep values, dtypes and memory order; the source may change at once") {
  for (const auto& row : lockstep::detail::dtype_rows) {
    const DType t = row.dtype;
    const Tensor x = arange(0, 24, 1, {.dtype = t}).view({1, 2, 3, 4});
    const Tensor cl = relu(conv2d(ones({1, 1, 4, 4}), ones({2, 1, 2, 2}))).to(t);  // channels-last
    for (const Tensor& source : {x, x.transpose(1, 3), x[0].slice(2, {.step = 2}), cl}) {
      const auto values = source.to_vector<double>();
      for (int other : {0, 1}) {
        const Tensor there = on_late(on_late(source), other);
        CHECK(there.dtype() == t);
        CHECK(there.to(Device()).to_vector<double>() == values);
        CHECK(there.is_channels_last() == source.is_channels_last());
      }
    }
  }
  Tensor x = ones({5});
  const Tensor y = on_late(x);
  x.fill_(7);
  CHECK(y.sum().item<float>() == 5);
  Tensor z = zeros({2, 5}, {.device = late::device()});
  z[1].copy_(x);  // from another device
  CHECK(z.sum().item<float>() == 35);
  CHECK(on_late(zeros({0, 3})).to(Device()).shape() == Shape{0, 3});
}

TEST_CASE("devices: the gradient of a copy comes back to where its tensor is") {
  Tensor x = tensor<double>({1, 2, 3}).requires_grad_();
  (on_late(x) * on_late(x)).sum().backward();
  CHECK(x.grad().device() == Device());
  CHECK(x.grad().to_vector<double>() == std::vector<double>{2, 4, 6});
  Tensor p = on_late(x.detach()).requires_grad_();
  autograd::gradcheck([](const std::vector<Tensor>& in) { return tanh(in[0]) * in[0]; }, {p});
  autograd::gradgradcheck([](const std::vector<Tensor>& in) { return tanh(in[0].to(Device())); }, {p});
}

TEST_CASE("devices: operands on two of them are an error that names both") {
  const Tensor a = ones({2, 2}), b = on_late(a), c = on_late(a, 1);
  const auto refuses = [](const char* op, auto f) {
    CHECK_THROWS_WITH_AS(f(), Contains(str_cat(op, ": tensors are on ").c_str()), DeviceError);
  };
  refuses("add", [&] { a + b; });
  refuses("mul", [&] { b * c; });
  refuses("where", [&] { where(gt(a, 0), b, b); });
  refuses("matmul", [&] { matmul(b, a); });
  refuses("linear", [&] { linear(b, c); });
  refuses("linear", [&] { linear(b, b, a[0]); });
  refuses("layer_norm", [&] { layer_norm(b, {2}, a[0]); });
  refuses("batch_norm", [&] { batch_norm(b, {}, {}, a[0]); });
  refuses("cross_entropy", [&] { cross_entropy(b, zeros({2}, {.dtype = DType::i64})); });
  refuses("take_along", [&] { take_along(b, zeros({2, 1}, {.dtype = DType::i64}), 1); });
  refuses("conv2d", [&] { conv2d(b.view({1, 1, 2, 2}), a.view({1, 1, 2, 2})); });
  refuses("copy_", [&] { cat({b, c}); });
  refuses("copy_", [&] { stack({a, b}); });
  Tensor x = b.clone();
  refuses("add", [&] { x += a; });
  Tensor p = ones({2}).requires_grad_(), q = on_late(ones({2})).requires_grad_();
  (p.sum() + (q * 2.0).sum().to(Device())).backward();
  refuses("clip_grad_norm_", [&] { optim::clip_grad_norm_({p, q}, 1); });
  optim::SGD opt{{p, q}, {.lr = 1}};  // a group may have parameters on both
  opt.step();
  CHECK(p.to_vector<float>() == std::vector<float>{0, 0});
  CHECK(q.to_vector<float>() == std::vector<float>{-1, -1});
  CHECK_THROWS_AS(p.set_grad(q.detach()), DeviceError);
}

TEST_CASE("devices: what a kernel throws comes out of the next wait, and the device goes on") {
  const Tensor logits = on_late(randn({3, 4})), target = on_late(tensor<int64_t>({0, 9, 1}));
  const Tensor loss = cross_entropy(logits, target);
  CHECK_THROWS_WITH_AS(loss.item<float>(), Contains("sample 1 has label 9 with C = 4"), IndexError);
  CHECK(on_late(ones({2})).sum().item<float>() == 2);
}

TEST_CASE("devices: streams keep their order, events order several") {
  DeviceBackend& backend = backend_of(late::device());
  const Stream first = backend.current_stream(0);
  for (uint64_t seed = 0; seed < 50; ++seed) {
    late::set_order(seed);
    const Stream second = backend.new_stream(0);
    Tensor x = zeros({4}, {.device = late::device()});
    for (int i = 0; i < 4; ++i) x.mul_(2).add_(1);  // 15
    backend.wait(second, backend.record(first));
    backend.set_current_stream(second);
    x.mul_(3);
    const Ref<RefCounted> done = backend.record(second);
    backend.set_current_stream(first);
    backend.wait(first, done);
    x.add_(0.5);
    CHECK(x.to_vector<float>() == std::vector<float>(4, 45.5f));
  }
  // Without events the order of two streams is by chance.
  std::set<float> results;
  for (uint64_t seed = 0; seed < 50; ++seed) {
    late::set_order(seed);
    Tensor x = ones({1}, {.device = late::device()});
    synchronize(late::device());
    backend.set_current_stream(backend.new_stream(0));
    x.mul_(2);
    backend.set_current_stream(first);
    x.add_(1);
    results.insert(x.item<float>());
  }
  CHECK(results == std::set<float>{3, 4});
}

TEST_CASE("devices: each has statistics of its memory") {
  const Device d = late::device(1);
  synchronize(d);
  const int64_t before = memory_stats(d).active_bytes, cpu = memory_stats().active_bytes;
  reset_peak_memory(d);
  {
    const Tensor t = empty({1000}, {.device = d});
    CHECK(memory_stats(d).active_bytes == before + 4000);
  }
  CHECK(memory_stats(d).active_bytes == before);
  CHECK(memory_stats(d).peak_bytes == before + 4000);
  CHECK(memory_stats().active_bytes == cpu);
}

// ---- training ----

namespace {

/// The values of the model after some steps on a device.
template <class Net, class Opt, class Options>
std::vector<std::vector<float>> train(Device device, Options options, double clip) {
  manual_seed(5);
  Net net;
  net.to(device);
  Opt opt{net.parameters(), options};
  optim::CosineAnnealingLR schedule{opt, {.T_max = 10}};
  Tensor total = zeros({}, {.device = device});
  synchronize(device);
  const int64_t waits = late::synchronizations();
  for (int i = 0; i < 4; ++i) {
    const Tensor x = randn({6, 1, 28, 28}), y = randint(0, 10, {6});
    opt.zero_grad();
    Tensor loss = cross_entropy(net(x.to(device)), y.to(device), {.label_smoothing = 0.1});
    loss.backward();
    if (clip > 0) optim::clip_grad_norm_(net.parameters(), clip);
    opt.step();
    schedule.step();
    total += loss.detach();
  }
  CHECK(late::synchronizations() == waits);
  std::vector<std::vector<float>> all{total.to_vector<float>()};
  for (const auto& [name, t] : net.state_dict()) all.push_back(t.template to_vector<float>());
  for (const auto& [name, t] : opt.state_dict()) all.push_back(t.template to_vector<float>());
  return all;
}
template <class Net, class Opt, class Options>
void trains_alike(Options options, double clip = 0) {
  const auto expected = train<Net, Opt>(Device(), options, clip);
  for (uint64_t seed = 0; seed < 3; ++seed) {
    late::set_order(seed);
    CHECK(train<Net, Opt>(late::device(), options, clip) == expected);
  }
}

}  // namespace

TEST_CASE("devices: the MLP demo's model trains to the CPU's bits without a synchronization") {
  trains_alike<Mlp, optim::SGD>(optim::SGDOptions{.lr = 0.05, .momentum = 0.9});
}
TEST_CASE("devices: the CNN demo's model trains to the CPU's bits without a synchronization") {
  trains_alike<Cnn, optim::SGD>(optim::SGDOptions{.lr = 0.05, .momentum = 0.9, .nesterov = true});
}
TEST_CASE("devices: norms, dropout, clipping and Adam too") {
  trains_alike<Mixed, optim::AdamW>(optim::AdamWOptions{.lr = 0.01, .amsgrad = true}, 0.5);
  trains_alike<Mixed, optim::Adam>(optim::AdamOptions{.lr = 0.01, .weight_decay = 0.1}, 0.5);
}

TEST_CASE("devices: a model and its optimizer move between devices by their state") {
  manual_seed(1);
  Mixed a, b;
  a.to(late::device());
  optim::AdamW of_a{a.parameters(), {}}, of_b{b.parameters(), {}};
  const auto step = [](Mixed& net, optim::AdamW& opt, Device d) {
    manual_seed(8);
    opt.zero_grad();
    net(randn({4, 1, 28, 28}).to(d)).square().mean().backward();
    opt.step();
  };
  step(a, of_a, late::device());
  step(b, of_b, Device());  // other weights
  b.load_state_dict(a.state_dict());
  of_b.load_state_dict(of_a.state_dict());
  step(a, of_a, late::device());
  step(b, of_b, Device());
  for (size_t i = 0; i < a.parameters().size(); ++i) {
    CHECK(a.parameters()[i].device() == late::device());
    CHECK(b.parameters()[i].device() == Device());
    CHECK(a.parameters()[i].to_vector<float>() == b.parameters()[i].to_vector<float>());
  }
  CHECK(late::pending() == 0);
}
