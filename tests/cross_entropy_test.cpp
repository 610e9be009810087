// cross_entropy and mse_loss against their definitions: reductions, smoothing, ignored samples,
// layouts.
#include "op_check.h"

#include <limits>

#include <lockstep/tensor/ops/cross_entropy.h>
#include <lockstep/tensor/ops/mse_loss.h>

using namespace lockstep;
using namespace op_check;

namespace {

Tensor labels(const std::vector<int64_t>& values) { return tensor(values); }

/// Losses per sample, logits [N, C]; 0 for ignored ones.
std::vector<double> reference(const Tensor& logits, const std::vector<int64_t>& target,
                              CrossEntropyOptions o) {
  const auto x = logits.to_vector<double>();
  const size_t classes = static_cast<size_t>(logits.size(1));
  std::vector<double> losses;
  for (size_t i = 0; i < target.size(); ++i) {
    const double* row = x.data() + i * classes;
    const double largest = *std::max_element(row, row + classes);
    double total = 0, loss = 0;
    for (size_t c = 0; c < classes; ++c) total += std::exp(row[c] - largest);
    for (size_t c = 0; c < classes && target[i] != o.ignore_index; ++c) {
      const double log_p = row[c] - largest - std::log(total);
      loss -= log_p * (o.label_smoothing / double(classes) +
                       (target[i] == int64_t(c) ? 1 - o.label_smoothing : 0));
    }
    losses.push_back(loss);
  }
  return losses;
}
double counted(const std::vector<int64_t>& target, int64_t ignore) {
  return static_cast<double>(target.size()) -
         static_cast<double>(std::count(target.begin(), target.end(), ignore));
}

const std::vector<int64_t> kTarget{2, 0, 4, -100, 1, 2};

}  // namespace

TEST_CASE("every reduction, smoothing and layout agrees with the definition") {
  for (int64_t classes : {5, 40, 1000})
    for (DType dtype : {DType::f32, DType::f64})
      for (const auto& [name, x] : layouts({6, classes}, dtype, 1, -10, 10))
        for (double smoothing : {0.0, 0.1, 1.0})
          for (int64_t ignore : {int64_t{-100}, int64_t{2}}) {
            std::vector<int64_t> target = kTarget;
            if (ignore == 2) target[3] = 0;
            const std::string what =
                str_cat(classes, " ", dtype, " ", name, " ", smoothing, " ", ignore);
            CrossEntropyOptions o{.ignore_index = ignore, .label_smoothing = smoothing};
            const auto want = reference(x, target, o);
            double total = 0;
            for (double w : want) total += w;
            const double tolerance = dtype == DType::f32 ? 2e-6 : 1e-13;
            const Tensor mean = cross_entropy(x, labels(target), o);
            CHECK(mean.shape() == Shape{});
            CHECK(mean.dtype() == dtype);
            check_close("mean " + what, mean, {total / counted(target, ignore)}, tolerance);
            o.reduction = Reduction::sum;
            check_close("sum " + what, cross_entropy(x, labels(target), o), {total}, tolerance);
            o.reduction = Reduction::none;
            check_close("none " + what, cross_entropy(x, labels(target), o), want, tolerance);
          }
}

TEST_CASE("more dimensions, one sample, and targets with gaps") {
  const Tensor x = random_tensor({2, 3, 4, 5});  // [N, C, H, W]
  const Tensor target = randint(0, 3, {2, 4, 5});
  const Tensor rows = x.permute({0, 2, 3, 1}).reshape({40, 3});
  const auto want = reference(rows, target.to_vector<int64_t>(), {});
  const Tensor losses = cross_entropy(x, target, {.reduction = Reduction::none});
  CHECK(losses.shape() == target.shape());
  check_close("per pixel", losses, want, 1e-13);
  check_close("one sample", cross_entropy(rows[7], target.reshape({40})[7]), {want[7]}, 1e-13);
  const Tensor every_second = target.reshape({40}).slice(0, {.step = 2});
  check_close(
      "gaps",
      cross_entropy(rows.slice(0, {.step = 2}), every_second, {.reduction = Reduction::none})[3],
      {want[6]}, 1e-13);
}

TEST_CASE("large logits, nothing to average, special values") {
  const Tensor x = tensor<float>({1000, 0, -1000, 0, 1000, 0}, {2, 3});
  check_close("large", cross_entropy(x, labels({0, 2}), {.reduction = Reduction::none}), {0, 1000},
              1e-7);
  CHECK(std::isnan(cross_entropy(x, labels({-100, -100})).item<double>()));
  CHECK(cross_entropy(x, labels({-100, -100}), {.reduction = Reduction::sum}).item<double>() == 0);
  CHECK(std::isnan(cross_entropy(zeros({0, 3}), zeros({0}, {.dtype = DType::i64})).item<double>()));
  Tensor odd = zeros({2, 3});
  odd[0].narrow(0, 1, 1).fill_(std::numeric_limits<double>::quiet_NaN());
  const auto losses =
      cross_entropy(odd, labels({0, 0}), {.reduction = Reduction::none}).to_vector<double>();
  CHECK(std::isnan(losses[0]));
  CHECK(losses[1] == doctest::Approx(std::log(3.0)));
  // An impossible class costs infinitely much as a label, nothing otherwise.
  const double inf = std::numeric_limits<double>::infinity();
  const Tensor masked = tensor<double>({0, 0, -inf}, {1, 3});
  CHECK(cross_entropy(masked, labels({0})).item<double>() == doctest::Approx(std::log(2.0)));
  CHECK(cross_entropy(masked, labels({2})).item<double>() == inf);
}

TEST_CASE("derivatives, first and second") {
  for (Reduction reduction : {Reduction::mean, Reduction::sum, Reduction::none})
    for (double smoothing : {0.0, 0.2}) {
      const CrossEntropyOptions o{.reduction = reduction, .label_smoothing = smoothing};
      const std::string what =
          str_cat("reduction ", static_cast<int>(reduction), " smoothing ", smoothing);
      check_gradients(what, [&](auto& x) { return cross_entropy(x[0], labels(kTarget), o); },
                      {random_tensor({6, 5})});
    }
  const Tensor target = randint(0, 3, {2, 4});
  check_gradients("[N, C, d]", [&](auto& x) { return square(cross_entropy(x[0], target)); },
                  {random_tensor({2, 3, 4})});
}

TEST_CASE("ignored samples get no gradient, even from bad logits") {
  Tensor x = full({2, 3}, std::numeric_limits<double>::quiet_NaN());
  x[1].fill_(0);
  x.requires_grad_();
  cross_entropy(x, labels({-100, 1})).backward();
  check_close("gradient", x.grad(), {0, 0, 0, 1 / 3.0, -2 / 3.0, 1 / 3.0}, 1e-6);
}

TEST_CASE("cross_entropy: the recorded gradient is the plain one, on special values too") {
  const double inf = std::numeric_limits<double>::infinity(), nan = std::nan("");
  struct Case {
    std::vector<double> logits;
    std::vector<int64_t> target;
    std::vector<double> dy, want;
  };
  const double a = 1 / (1 + std::exp(1) + std::exp(2)), b = a * std::exp(1), c = b * std::exp(1);
  for (DType t : {DType::f32, DType::f64})
    for (const Case& k : std::vector<Case>{
             {{1, 2, 3, 5, 5, 5}, {-100, -100}, {1, 1}, {0, 0, 0, 0, 0, 0}},
             {{1, 2, 3, nan, inf, -inf}, {2, -100}, {2, inf}, {2 * a, 2 * b, 2 * c - 2, 0, 0, 0}},
             {{-inf, -inf, -inf, 1, 2, 3}, {-100, 0}, {nan, 1}, {0, 0, 0, a - 1, b, c}},
             {{1, 2, -inf, 3e38, 0, -3e38}, {1, 2}, {0, 1}, {0, 0, 0, 1, 0, -1}},
             {{1, 2, 3, 1, 2, 3}, {0, 1}, {inf, -inf}, {-inf, inf, inf, -inf, inf, -inf}}})
      for (bool recorded : {false, true}) {
        const Tensor x = tensor(k.logits, {2, 3}).to(t).requires_grad_();
        const Tensor losses =
            cross_entropy(x, tensor(k.target), {.reduction = Reduction::none});
        const Tensor g = autograd::grad({losses}, {x}, {tensor(k.dy).to(t)},
                                        {.create_graph = recorded})[0];
        check_close(str_cat(t, " recorded ", recorded), g.detach(), k.want, 1e-6);
      }
  // Nothing to average: the loss is NaN, its gradient 0.
  for (bool recorded : {false, true}) {
    const Tensor x = zeros({2, 3}).requires_grad_();
    const Tensor g = autograd::grad({cross_entropy(x, labels({-100, -100}))}, {x}, {},
                                    {.create_graph = recorded})[0];
    check_close("none counted", g.detach(), std::vector<double>(6, 0), 0);
  }
}

TEST_CASE("cross_entropy: losses beyond the largest number are averaged before they are rounded") {
  const Tensor x = tensor<float>({3e38f, -3e38f, 0, 0, 0, 0, 0, 0}, {4, 2});
  CHECK(cross_entropy(x, labels({1, 0, 0, 0})).item<double>() == doctest::Approx(1.5e38));
  CHECK(cross_entropy(x, labels({1, 0, 0, 0}), {.label_smoothing = 0.5}).item<double>() ==
        doctest::Approx(0.75 * 1.5e38));
}

TEST_CASE("errors of cross_entropy") {
  const Tensor x = zeros({2, 3});
  CHECK_THROWS_WITH_AS(cross_entropy(x, labels({0, 3})),
                       doctest::Contains("sample 1 has label 3 with C = 3"), IndexError);
  CHECK_THROWS_WITH_AS(cross_entropy(x, labels({-1, 0})),
                       doctest::Contains("sample 0 has label -1"), IndexError);
  CHECK_THROWS_WITH_AS(cross_entropy(x, labels({0})),
                       doctest::Contains("target of shape [2], got [1]"), ShapeError);
  CHECK_THROWS_WITH_AS(cross_entropy(x, zeros({2})), doctest::Contains("i64"), DTypeError);
  CHECK_THROWS_AS(cross_entropy(labels({1, 2, 3}), labels({0})), DTypeError);
  CHECK_THROWS_AS(cross_entropy(x, labels({0, 0}), {.label_smoothing = 2}), ValueError);
  CHECK_THROWS_AS(cross_entropy(scalar(1), labels({0})), ShapeError);
}

TEST_CASE("mse_loss") {
  for (DType dtype : {DType::f32, DType::f64})
    for (const Shape& shape : {Shape{}, Shape{7}, Shape{3, 4}})
      for (const auto& [name, x] : layouts(shape, dtype, 1)) {
        const Tensor t = random_tensor(shape, dtype, 2);
        std::vector<double> want;
        double total = 0;
        for (int64_t i = 0; i < x.numel(); ++i) {
          const double d = x.to_vector<double>()[static_cast<size_t>(i)] -
                           t.to_vector<double>()[static_cast<size_t>(i)];
          want.push_back(d * d);
          total += d * d;
        }
        check_close("none", mse_loss(x, t, Reduction::none), want, tolerance_of(dtype));
        check_close("sum", mse_loss(x, t, Reduction::sum), {total}, tolerance_of(dtype));
        check_close("mean", mse_loss(x, t), {total / double(want.size())}, tolerance_of(dtype));
      }
  check_gradients("mse_loss", [](auto& x) { return mse_loss(x[0], x[1]); },
                  {random_tensor({3, 2}), random_tensor({3, 2}, DType::f64, 2)});
  CHECK_THROWS_WITH_AS(mse_loss(zeros({3, 1}), zeros({3})), doctest::Contains("[3, 1] and [3]"),
                       ShapeError);
  CHECK_THROWS_AS(mse_loss(zeros({3}), zeros({3}, {.dtype = DType::f64})), DTypeError);
  CHECK_THROWS_AS(mse_loss(arange(0, 3), arange(0, 3)), DTypeError);
}
