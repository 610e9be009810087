#include <lockstep/distributed/ddp/orthogonalize.h>

#include <cmath>
#include <numbers>

namespace lockstep::dist {

void orthogonalize(const Tensor& a, double epsilon) {
  const Tensor columns = a.t().to(DType::f64).contiguous();  // [columns, rows]
  const int64_t rows = a.size(0);
  for (int64_t i = 0; i < a.size(1); ++i) {
    double* column = columns.data<double>() + i * rows;
    for (int64_t j = 0; j < i; ++j) {
      const double* before = columns.data<double>() + j * rows;
      double product = 0;
      for (int64_t k = 0; k < rows; ++k) product += before[k] * column[k];
      for (int64_t k = 0; k < rows; ++k) column[k] -= product * before[k];
    }
    double squares = 0;
    for (int64_t k = 0; k < rows; ++k) squares += column[k] * column[k];
    if (squares == 0) continue;
    const double scale = 1 / (std::sqrt(squares) + epsilon);
    for (int64_t k = 0; k < rows; ++k) column[k] *= scale;
  }
  Tensor(a).copy_(columns.t());
}

void draw_zero_columns(const Tensor& a, RandomKey key) {
  const Tensor values = a.to(DType::f64).contiguous().clone();
  double* v = values.data<double>();
  const int64_t rows = a.size(0), columns = a.size(1);
  for (int64_t c = 0; c < columns; ++c) {
    bool zero = true;
    for (int64_t k = 0; k < rows; ++k) zero &= v[k * columns + c] == 0;
    for (int64_t k = 0; zero && k < rows; ++k) {
      const auto bits = key.block(static_cast<uint64_t>(k * columns + c));
      const double u = 1 - static_cast<double>(RandomKey::uniform(bits[0]));  // (0, 1]
      v[k * columns + c] =
          std::sqrt(-2 * std::log(u)) *
          std::cos(2 * std::numbers::pi * static_cast<double>(RandomKey::uniform(bits[1])));
    }
  }
  Tensor(a).copy_(values);
}

}  // namespace lockstep::dist
