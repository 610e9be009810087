// Tensors as values: how they are made, read, printed, shared and changed in place, and what they
// say when they are misused. Views have a file of their own.
#include <doctest/doctest.h>

#include <cstdint>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

#include <lockstep/tensor/node.h>
#include <lockstep/tensor/ops/elementwise.h>
#include <lockstep/tensor/tensor.h>

using namespace lockstep;
using doctest::Contains;

namespace {

using V = std::vector<double>;
V values(const Tensor& t) { return t.to_vector<double>(); }

/// [N, C, H, W] stored as [N, H, W, C], with values 0, 1, 2, ... in memory.
Tensor channels_last(int64_t n, int64_t c, int64_t h, int64_t w, DType dtype = DType::f32) {
  return arange(0, n * h * w * c, 1, {.dtype = dtype}).view({n, h, w, c}).permute({0, 3, 1, 2});
}

}  // namespace

// ---- creation ----

TEST_CASE("the makers fill their shape with what their name says") {
  CHECK(values(zeros({2, 2})) == V{0, 0, 0, 0});
  CHECK(values(ones({3})) == V{1, 1, 1});
  CHECK(values(full({2}, -2.5)) == V{-2.5, -2.5});
  CHECK(values(full({2}, 7, {.dtype = DType::i64})) == V{7, 7});
  CHECK(full({2}, 3, {.dtype = DType::boolean}).to_vector<bool>() == std::vector<bool>{true, true});
  CHECK(empty({2, 3}).shape() == Shape{2, 3});
  const Tensor s = scalar(1.5);
  CHECK(s.dim() == 0);
  CHECK(s.numel() == 1);
  CHECK(s.item<double>() == 1.5);
  CHECK(s.dtype() == DType::f32);
  CHECK(scalar(1.5, {.dtype = DType::f64}).dtype() == DType::f64);
}

TEST_CASE("arange counts up and down, stops before its end, and is i64 unless told otherwise") {
  CHECK(arange(0, 4).to_vector<int64_t>() == std::vector<int64_t>{0, 1, 2, 3});
  CHECK(arange(1, 8, 3).to_vector<int64_t>() == std::vector<int64_t>{1, 4, 7});
  CHECK(arange(1, 7, 3).to_vector<int64_t>() == std::vector<int64_t>{1, 4});
  CHECK(arange(5, 0, -2).to_vector<int64_t>() == std::vector<int64_t>{5, 3, 1});
  CHECK(arange(3, 3).numel() == 0);
  CHECK(arange(3, 0).numel() == 0);
  CHECK(arange(0, 2).dtype() == DType::i64);
  CHECK(arange(0, 2, 1, {.dtype = DType::f64}).dtype() == DType::f64);
  CHECK_THROWS_AS(arange(0, 3, 0), ValueError);
}

TEST_CASE(
    "tensor() copies values in row-major order and takes its dtype from them or the options") {
  const Tensor a = tensor(std::vector<float>{1, 2, 3, 4, 5, 6}, {2, 3});
  CHECK(a.dtype() == DType::f32);
  CHECK(a.data<float>()[4] == 5);
  CHECK(a[1][0].item<float>() == 4);
  CHECK(tensor(std::vector<double>{1}).dtype() == DType::f64);
  CHECK(tensor(std::vector<int64_t>{1}).dtype() == DType::i64);
  CHECK(tensor(std::vector<int32_t>{1}).dtype() == DType::i32);
  CHECK(tensor(std::vector<uint8_t>{1}).dtype() == DType::u8);
  CHECK(tensor(std::vector<int16_t>{1}).dtype() == DType::i16);
  CHECK(tensor(std::vector<int8_t>{1}).dtype() == DType::i8);
  CHECK(tensor(std::vector<bool>{true, false}).to_vector<int>() == std::vector<int>{1, 0});
  CHECK(tensor(std::vector<double>{1.75}, {1}, {.dtype = DType::i32}).item<int>() == 1);
  CHECK(tensor(std::vector<float>{1}, {1}, {.requires_grad = true}).requires_grad());
  CHECK_THROWS_WITH_AS(tensor(std::vector<float>{1, 2, 3}, {2, 2}),
                       Contains("3 values do not fill shape [2, 2]"), ShapeError);
}

TEST_CASE("the _like makers take shape, memory order and dtype, but not the place in the graph") {
  const Tensor plain = zeros({2, 3}, {.dtype = DType::f64}).requires_grad_();
  const Tensor z = ones_like(plain);
  CHECK(z.shape() == Shape{2, 3});
  CHECK(z.dtype() == DType::f64);
  CHECK(values(z) == V{1, 1, 1, 1, 1, 1});
  CHECK_FALSE(z.requires_grad());
  const Tensor last = channels_last(2, 3, 4, 5);
  CHECK(zeros_like(last).is_channels_last());
  CHECK_FALSE(zeros_like(last).is_contiguous());
  CHECK(empty_like(last.contiguous()).is_contiguous());
  CHECK(zeros_like(ones({1}).expand({4})).is_contiguous());  // repeated elements become elements
  CHECK(zeros_like(ones({4, 6}).slice(1, {.step = 2})).is_contiguous());
}

TEST_CASE("empty sizes are allowed, negative and absurd ones are not") {
  const Tensor none = zeros({2, 0, 3});
  CHECK(none.numel() == 0);
  CHECK(none.to_vector<float>().empty());
  CHECK_THROWS_WITH_AS(empty({2, -1}), Contains("[2, -1]"), ShapeError);
  const int64_t huge = int64_t{1} << 40;
  CHECK_THROWS_AS(empty({huge, huge}), Error);       // more elements than 64 bits can count
  CHECK_THROWS_AS(empty({huge, huge / 16}), Error);  // more bytes than that
  Shape most = Shape::filled(8, 1);
  CHECK(zeros(most).numel() == 1);
  CHECK_THROWS_AS(most.push_back(1), ShapeError);
}

TEST_CASE("a blob is seen, not copied, and let go when the last tensor over it is gone") {
  float memory[] = {1, 2, 3, 4};
  int released = 0;
  Tensor view;
  {
    Tensor t = from_blob(memory, {2, 2}, {}, [&] { ++released; });
    CHECK(t.data<float>() == memory);
    CHECK_FALSE(t.storage().owns_bytes());
    t.mul_(2);
    CHECK(memory[3] == 8);
    memory[0] = 5;
    CHECK(values(t) == V{5, 4, 6, 8});
    view = t[1];
  }
  CHECK(released == 0);
  CHECK(values(view) == V{6, 8});
  view = Tensor();
  CHECK(released == 1);
  CHECK_THROWS_AS(from_blob(nullptr, {2}), ValueError);
  CHECK(from_blob(nullptr, {0}).numel() == 0);
}

// ---- reading ----

TEST_CASE("item converts the only element and refuses more or fewer") {
  CHECK(scalar(2.75).item<double>() == 2.75);
  CHECK(scalar(2.75).item<int>() == 2);
  CHECK(ones({1, 1}).item<float>() == 1);
  const int64_t large = (int64_t{1} << 60) + 1;  // no double holds it
  CHECK(tensor(std::vector<int64_t>{large}).item<int64_t>() == large);
  CHECK(tensor(std::vector<bool>{true}).item<bool>());
  CHECK(tensor(std::vector<float>{1, 2, 3})[2].item<float>() == 3);
  CHECK_THROWS_WITH_AS(ones({2}).item<float>(), Contains("[2]"), ShapeError);
  CHECK_THROWS_AS(ones({0}).item<float>(), ShapeError);
}

TEST_CASE("to_vector reads any memory order in row-major order") {
  const Tensor t = arange(0, 6).view({2, 3});
  CHECK(t.t().to_vector<int64_t>() == std::vector<int64_t>{0, 3, 1, 4, 2, 5});
  CHECK(t.slice(1, {.step = 2}).to_vector<int>() == std::vector<int>{0, 2, 3, 5});
  CHECK(scalar(4).expand({3}).to_vector<float>() == std::vector<float>{4, 4, 4});
}

TEST_CASE("data<T> insists on the dtype") {
  CHECK_THROWS_WITH_AS(ones({2}).data<double>(), Contains("f32"), DTypeError);
  const Tensor half = empty({2}, {.dtype = DType::f16});
  CHECK(half.storage().bytes() == 4);
  CHECK_THROWS_WITH_AS(half.data<float>(), Contains("f16"), DTypeError);
}

TEST_CASE("size counts from either end") {
  const Tensor t = zeros({2, 3, 4});
  CHECK(t.size(0) == 2);
  CHECK(t.size(-1) == 4);
  CHECK(t.dim() == 3);
  CHECK(t.numel() == 24);
  CHECK_THROWS_WITH_AS(t.size(3),
                       Contains("size: dimension 3 is out of range for a tensor of 3 dimensions"),
                       IndexError);
  CHECK_THROWS_AS(t.size(-4), IndexError);
}

TEST_CASE("an undefined tensor says so") {
  const Tensor t;
  CHECK_FALSE(t.defined());
  CHECK_THROWS_WITH_AS(t.shape(), Contains("undefined"), Error);
  CHECK_THROWS_AS(t.backward(), Error);
  CHECK_THROWS_AS(t + 1.0, Error);
  CHECK(t.to_string() == "tensor(undefined)");
}

// ---- printing ----

TEST_CASE("printing shows values, shape and dtype") {
  CHECK(tensor(std::vector<float>{1, 2, 3, 4}, {2, 2}).to_string() ==
        "tensor([[1, 2], [3, 4]], shape [2, 2], f32)");
  CHECK(scalar(0.5).to_string() == "tensor(0.5, shape [], f32)");
  CHECK(tensor(std::vector<bool>{true, false}).to_string() ==
        "tensor([true, false], shape [2], bool)");
  CHECK(tensor(std::vector<uint8_t>{65}).to_string() == "tensor([65], shape [1], u8)");
  CHECK(zeros({0}).to_string() == "tensor([], shape [0], f32)");
  std::ostringstream out;
  out << arange(0, 2);
  CHECK(out.str() == "tensor([0, 1], shape [2], i64)");
  CHECK(str_cat("got ", arange(0, 1)) == "got tensor([0], shape [1], i64)");
  std::ostringstream parts;
  parts << Shape{2, 3} << ' ' << DType::bf16 << ' ' << Device{} << ' '
        << Device{DeviceType::cuda, 1};
  CHECK(parts.str() == "[2, 3] bf16 cpu cuda:1");
}

TEST_CASE("printing says what is not a number, and what is behind a tensor") {
  const float inf = std::numeric_limits<float>::infinity(),
              nan = std::numeric_limits<float>::quiet_NaN();
  const std::string text = tensor(std::vector<float>{nan, -nan, inf, -inf}).to_string();
  CHECK(text.find("[nan, nan, inf, -inf]") != std::string::npos);
  const Tensor w = ones({1}).requires_grad_();
  CHECK(w.to_string().find("requires_grad") != std::string::npos);
  CHECK((w * w).to_string().find("mul") != std::string::npos);
}

TEST_CASE("printing shortens long dimensions") {
  const std::string text = arange(0, 1000).to_string();
  CHECK(text == "tensor([0, 1, 2, ..., 997, 998, 999], shape [1000], i64)");
  CHECK(arange(0, 100000).view({100, 1000}).to_string().size() < 400);
}

// ---- handles ----

TEST_CASE("a copied handle shares, a moved one is gone, and identity is the body") {
  Tensor a = ones({2});
  Tensor b = a;
  CHECK(a.is_same(b));
  b.add_(1);
  CHECK(values(a) == V{2, 2});
  const Tensor c = std::move(b);
  CHECK_FALSE(b.defined());  // NOLINT: what a move leaves is part of the contract
  CHECK(c.is_same(a));
  CHECK_FALSE(a.is_same(a.detach()));
  CHECK_FALSE(a.is_same(a.clone()));
  CHECK(a.ref()->use_count() == 2);
}

TEST_CASE("promote follows PyTorch's table") {
  CHECK(promote(DType::f32, DType::f32) == DType::f32);
  CHECK(promote(DType::f32, DType::f64) == DType::f64);
  CHECK(promote(DType::i64, DType::f32) == DType::f32);
  CHECK(promote(DType::i64, DType::f16) == DType::f16);
  CHECK(promote(DType::f16, DType::bf16) == DType::f32);
  CHECK(promote(DType::f16, DType::f32) == DType::f32);
  CHECK(promote(DType::boolean, DType::u8) == DType::u8);
  CHECK(promote(DType::u8, DType::i32) == DType::i32);
  CHECK(promote(DType::i32, DType::i64) == DType::i64);
  CHECK(promote(DType::i8, DType::i16) == DType::i16);
  CHECK(promote(DType::u8, DType::i8) == DType::i16);  // neither holds the other's range
  CHECK(promote(DType::u8, DType::i16) == DType::i16);
  CHECK(promote(DType::boolean, DType::i8) == DType::i8);
  CHECK(promote(DType::i8, DType::bf16) == DType::bf16);
  const DType all[] = {DType::f32, DType::f64, DType::f16, DType::bf16,
                       DType::i64, DType::i32, DType::i16, DType::i8, DType::u8, DType::boolean};
  for (DType a : all)
    for (DType b : all) CHECK(promote(a, b) == promote(b, a));
}

// ---- copies ----

TEST_CASE("clone copies bytes and keeps memory order; to converts or hands back the same tensor") {
  const Tensor a = tensor(std::vector<float>{1.5f, -2.5f});
  Tensor b = a.clone();
  b.fill_(0);
  CHECK(values(a) == V{1.5, -2.5});
  CHECK(a.to(DType::f32).is_same(a));
  CHECK(a.to(Device{}).is_same(a));
  CHECK(a.to(DType::f64).dtype() == DType::f64);
  CHECK(a.to(DType::i64).to_vector<int>() == std::vector<int>{1, -2});
  CHECK(a.to(DType::boolean).to_vector<bool>() == std::vector<bool>{true, true});
  CHECK_THROWS_WITH_AS(a.to(Device{DeviceType::cuda, 1}), Contains("cuda:1"), DeviceError);
  const Tensor last = channels_last(2, 3, 2, 2);
  CHECK(last.clone().is_channels_last());
  CHECK(last.to(DType::f64).is_channels_last());
  CHECK(values(last.clone()) == values(last));
  CHECK(values(last.to(DType::f64)) == values(last));
}

TEST_CASE("gradients pass through clone and to, in the dtype of the input") {
  Tensor x = tensor(std::vector<float>{1, 2}).requires_grad_();
  (x.clone().to(DType::f64) * 3.0).sum().backward();
  CHECK(x.grad().dtype() == DType::f32);
  CHECK(values(x.grad()) == V{3, 3});
  CHECK_FALSE(x.to(DType::i64).requires_grad());
}

// ---- in place ----

TEST_CASE("in-place changes write this tensor's bytes and count a version") {
  Tensor t = zeros({2, 2});
  const void* bytes = t.data_ptr();
  const uint32_t before = t.storage().version();
  t.fill_(2).add_(1).mul_(3).add_(ones({2}), 0.5).sub_(ones({2, 2})).mul_(full({2, 1}, 2));
  CHECK(values(t) == V{17, 17, 17, 17});
  t += ones({1});
  t *= full({}, 2);
  t -= ones({2, 2});
  CHECK(values(t) == V{35, 35, 35, 35});
  CHECK(t.data_ptr() == bytes);
  CHECK(t.storage().version() >= before + 9);
  CHECK(values(t.zero_()) == V{0, 0, 0, 0});
}

TEST_CASE("copy_ broadcasts, converts, and takes the gradient's place") {
  Tensor t = zeros({2, 3});
  t.copy_(arange(1, 4));
  CHECK(values(t) == V{1, 2, 3, 1, 2, 3});
  CHECK_THROWS_WITH_AS(t.copy_(zeros({4})), Contains("[4]"), ShapeError);
  CHECK_THROWS_AS(t.copy_(zeros({2, 2, 3})), ShapeError);

  Tensor w = tensor(std::vector<double>{1, 2, 3}).requires_grad_();
  Tensor a = ones({2, 3}).requires_grad_();
  Tensor y = a * 2.0;
  y.copy_(w);  // what came from a is overwritten
  CHECK(y.requires_grad());
  (y * y).sum().backward();
  CHECK(values(a.grad()) == V{0, 0, 0, 0, 0, 0});
  CHECK(values(w.grad()) == V{4, 8, 12});
  CHECK(w.grad().dtype() == DType::f64);

  CHECK_THROWS_WITH_AS(a.copy_(w), Contains("copy_"), AutogradError);
  CHECK_THROWS_WITH_AS(a.fill_(1), Contains("fill_"), AutogradError);
  NoGradGuard guard;
  a.copy_(w);
  CHECK(values(a) == V{1, 2, 3, 1, 2, 3});
}

TEST_CASE("what repeats its elements cannot be written in place") {
  Tensor t = ones({1, 3}).expand({2, 3});
  CHECK_THROWS_AS(t.add_(1), ShapeError);
  CHECK_THROWS_AS(t.mul_(ones({2, 3})), ShapeError);
  CHECK_THROWS_WITH_AS(t.copy_(arange(0, 6).view({2, 3})), Contains("repeats"), ShapeError);
}

TEST_CASE("copy_ between parts of the same bytes reads before it writes") {
  Tensor m = arange(0, 9).view({3, 3});
  m.copy_(m.t());
  CHECK(values(m) == V{0, 3, 6, 1, 4, 7, 2, 5, 8});
  Tensor line = arange(0, 40000), head = line.narrow(0, 1, 39999);
  head.copy_(line.narrow(0, 0, 39999));
  for (int64_t i : {1, 2, 3, 20000, 39999}) CHECK(line[i].item<int64_t>() == i - 1);
  m.copy_(m);
  CHECK(values(m) == V{0, 3, 6, 1, 4, 7, 2, 5, 8});
}

// ---- the memory order of results ----

TEST_CASE("channels-last is a stride order that element-wise ops keep") {
  const Tensor x = channels_last(2, 3, 4, 5);
  CHECK(x.is_channels_last());
  CHECK_FALSE(x.is_contiguous());
  CHECK((x + x).is_channels_last());
  CHECK(relu(x).is_channels_last());
  CHECK((x * 2.0).is_channels_last());
  CHECK((x + ones({3, 1, 1})).is_channels_last());
  CHECK((x + x.contiguous()).is_channels_last());
  CHECK((x.contiguous() + ones({3, 1, 1})).is_contiguous());
  CHECK(values(x + x.contiguous()) == values(x * 2.0));
  CHECK_FALSE(zeros({2, 3, 4}).is_channels_last());
  const Tensor one_channel = zeros({2, 1, 4, 5});  // both orders at once
  CHECK(one_channel.is_channels_last());
  CHECK(one_channel.is_contiguous());
  for (const Strides& outside : {Strides{1, 1}, Strides{-2, 1}, Strides{4, 1}, Strides{2}})
    CHECK_THROWS_AS(empty_strided({2, 2}, outside), ShapeError);
  const Tensor strided = empty_strided({2, 3}, {1, 2});
  CHECK_FALSE(strided.is_contiguous());
  CHECK(strided.t().is_contiguous());
}

TEST_CASE("to_string: an empty tensor with a long dimension is short") {
  CHECK(zeros({100000000, 0}).to_string().size() < 200);
  CHECK(zeros({0, 3}).to_string() == "tensor([], shape [0, 3], f32)");
}

TEST_CASE("set_grad: neither a tensor nor a view of it is its own gradient") {
  const Tensor x = ones({2}).requires_grad_();
  CHECK_THROWS_AS(x.set_grad(x), AutogradError);
  CHECK_THROWS_AS(x.set_grad(x.view({2})), AutogradError);
  x.set_grad(x.detach());
  CHECK(x.grad().to_vector<double>() == V{1, 1});
}

TEST_CASE("transpose and narrow: what is out of range is named") {
  CHECK_THROWS_AS(zeros({}).transpose(5, -9), IndexError);
  CHECK(zeros({}).transpose(0, -1).dim() == 0);
  CHECK_THROWS_WITH_AS(zeros({9}).narrow(0, 5, std::numeric_limits<int64_t>::max()),
                       Contains("start 5 and length 9223372036854775807"), IndexError);
}

TEST_CASE("from_blob: what it refuses it does not release") {
  int64_t data[2] = {1, 2};
  bool released = false;
  CHECK_THROWS_AS(from_blob(data, {2}, {.dtype = DType::i64, .requires_grad = true},
                            [&] { released = true; }),
                  DTypeError);
  CHECK_FALSE(released);
}
