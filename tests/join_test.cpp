// cat and stack: values by layout and dtype, gradients to each part, errors.
#include "op_check.h"

#include <lockstep/tensor/ops/join.h>

using namespace lockstep;
using namespace op_check;

TEST_CASE("cat puts every part in its place, whatever its layout and dtype") {
  for (DType dtype : {DType::f32, DType::f64, DType::i64, DType::i32, DType::u8, DType::boolean})
    for (int d : {0, 1, 2, -1}) {
      Shape first{2, 3, 4}, second{2, 3, 4};
      second[wrap_dim("test", d, 3)] = 5;
      for (const auto& [name_a, a] : layouts(first, dtype, 1, 0, 9))
        for (const auto& [name_b, b] : layouts(second, dtype, 2, 0, 9)) {
          INFO(name_a << " " << name_b << " " << d);
          const Tensor y = cat({a, b, a}, d);
          const int64_t n = a.size(d);
          CHECK(y.dtype() == dtype);
          CHECK(y.size(d) == 2 * n + 5);
          check_close("first", y.narrow(d, 0, n), a.to_vector<double>(), 0);
          check_close("second", y.narrow(d, n, 5), b.to_vector<double>(), 0);
          check_close("third", y.narrow(d, n + 5, n), a.to_vector<double>(), 0);
        }
    }
}

TEST_CASE("stack makes a dimension") {
  const std::vector<Tensor> parts{random_tensor({2, 3}), random_tensor({3, 2}, DType::f64, 2).t(),
                                  random_tensor({2, 1}, DType::f64, 3).expand({2, 3})};
  for (int d : {0, 1, 2, -1}) {
    const Tensor y = stack(parts, d);
    CHECK(y.dim() == 3);
    CHECK(y.size(d) == 3);
    for (int64_t i = 0; i < 3; ++i)
      check_close("part", y.select(d, i), parts[size_t(i)].to_vector<double>(), 0);
  }
  CHECK(stack({scalar(1), scalar(2)}).to_vector<double>() == std::vector<double>{1, 2});
}

TEST_CASE("dtypes promote, empty parts count for nothing, channels-last stays") {
  CHECK(cat({ones({2}), arange(0, 2)}).dtype() == DType::f32);
  CHECK(cat({ones({2}, {.dtype = DType::f64}), ones({2})}).to_vector<double>() ==
        std::vector<double>{1, 1, 1, 1});
  CHECK(stack({arange(0, 2), ones({2}, {.dtype = DType::u8})}).dtype() == DType::i64);
  CHECK(cat({ones({2, 0}), ones({2, 3})}, 1).shape() == Shape{2, 3});
  const Tensor a = random_tensor({2, 4, 5, 3}).permute({0, 3, 1, 2}),
               b = random_tensor({2, 4, 5, 2}).permute({0, 3, 1, 2});
  CHECK(cat({a, b}, 1).is_channels_last());
  check_close("values", cat({a, b}, 1).narrow(1, 3, 2), b.to_vector<double>(), 0);
  CHECK(cat({a.contiguous(), b}, 1).is_contiguous());
}

TEST_CASE("derivatives") {
  check_gradients("cat",
                  [](auto& x) {
                    return square(cat({x[0], x[1]}, 1));
                  },
                  {random_tensor({2, 3}), random_tensor({2, 1}, DType::f64, 2)});
  check_gradients("cat with itself",
                  [](auto& x) {
                    return square(cat({x[0], x[0] * x[0]}, 0));
                  },
                  {random_tensor({2, 3})});
  check_gradients("stack",
                  [](auto& x) {
                    return square(stack({x[0], x[1]}, 1));
                  },
                  {random_tensor({2, 3}), random_tensor({2, 3}, DType::f64, 2)});
  Tensor a = ones({2}).requires_grad_(), b = ones({2}, {.dtype = DType::f64}).requires_grad_();
  (cat({a, b}) * tensor<double>({1, 2, 3, 4})).sum().backward();
  CHECK(a.grad().dtype() == DType::f32);
  CHECK(a.grad().to_vector<double>() == std::vector<double>{1, 2});
  CHECK(b.grad().to_vector<double>() == std::vector<double>{3, 4});
  a.set_grad({});
  stack({b, a}, 1).sum().backward();
  CHECK(a.grad().dtype() == DType::f32);
}

TEST_CASE("errors") {
  const std::vector<Tensor> none;
  CHECK_THROWS_WITH_AS(cat(none, 0), doctest::Contains("at least one"), ValueError);
  CHECK_THROWS_WITH_AS(cat({zeros({2, 3}), zeros({2, 4})}, 0),
                       doctest::Contains("tensor 1 is [2, 4]"), ShapeError);
  CHECK_THROWS_AS(cat({zeros({2}), zeros({2, 1})}, 0), ShapeError);
  CHECK_THROWS_AS(cat({zeros({2})}, 1), IndexError);
  CHECK_THROWS_WITH_AS(cat({scalar(1)}, 0), doctest::Contains("use stack"), ShapeError);
  CHECK_THROWS_WITH_AS(stack({zeros({2}), zeros({3})}), doctest::Contains("tensor 1 is [3]"),
                       ShapeError);
  CHECK_THROWS_AS(stack({zeros({2})}, 2), IndexError);
}
