// Copies between layouts and dtypes (copy_, contiguous, to, fill_), against a walk over the
// elements that shares no code with them.
#include <doctest/doctest.h>

#include <cstring>
#include <vector>

#include <lockstep/tensor/ops/copy.h>
#include <lockstep/tensor/parallel.h>
#include <lockstep/tensor/tensor.h>

using namespace lockstep;

namespace {

constexpr DType kDTypes[] = {DType::f32, DType::f64, DType::i64,
                             DType::i32, DType::i16, DType::i8, DType::u8, DType::boolean};

/// The address of the element with row-major index i.
char* address(const Tensor& t, int64_t i) {
  int64_t offset = 0;
  for (int d = t.dim() - 1; d >= 0; i /= t.shape()[d], --d)
    offset += i % t.shape()[d] * t.strides()[d];
  return static_cast<char*>(t.data_ptr()) + offset * static_cast<int64_t>(size_of(t.dtype()));
}
template <class T>
T& element(const Tensor& t, int64_t i) {
  return *reinterpret_cast<T*>(address(t, i));
}

/// Distinct values, as far as the dtype has them.
void number(const Tensor& t) {
  dispatch("number", t.dtype(), [&]<class T>(TypeTag<T>) {
    for (int64_t i = 0; i < t.numel(); ++i)
      element<T>(t, i) = static_cast<T>(i % 3 == 0 ? 0 : i % 127);  // i8 holds no more
  });
}

/// Tensors of shape [6, 5, 9, 8] over different memory.
std::vector<Tensor> layouts(DType t) {
  return {empty({6, 5, 9, 8}, {.dtype = t}),
          empty({6, 9, 8, 5}, {.dtype = t}).permute({0, 3, 1, 2}),
          empty({8, 9, 5, 6}, {.dtype = t}).permute({3, 2, 1, 0}),
          empty({6, 5, 8, 9}, {.dtype = t}).transpose(2, 3),
          empty({13, 6, 9, 17}, {.dtype = t})
              .slice(0, {1, 13, 2})
              .slice(1, {1, 6})
              .slice(3, {1, 17, 2})};
}

template <class T>
bool same_elements(const Tensor& a, const Tensor& b) {
  for (int64_t i = 0; i < a.numel(); ++i)
    if (element<T>(a, i) != element<T>(b, i)) return false;
  return true;
}

}  // namespace

TEST_CASE("every layout to every layout") {
  for (DType t : kDTypes)
    for (Tensor& from : layouts(t))
      for (Tensor& to : layouts(t)) {
        number(from);
        to.copy_(from);
        dispatch("check", t, [&]<class T>(TypeTag<T>) { CHECK(same_elements<T>(to, from)); });
      }
}

TEST_CASE("every dtype to every dtype, by C++'s conversions; bool is what differs from 0") {
  for (DType from : kDTypes)
    for (DType to : kDTypes)
      for (Tensor& x : layouts(from)) {
        number(x);
        const Tensor y = x.to(to);
        dispatch("from", from, [&]<class F>(TypeTag<F>) {
          dispatch("to", to, [&]<class T>(TypeTag<T>) {
            bool same = true;
            for (int64_t i = 0; i < x.numel(); ++i)
              same &= element<T>(y, i) == static_cast<T>(element<F>(x, i));
            CHECK(same);
          });
        });
      }
  const Tensor x = tensor(std::vector<double>{-1.7, 0.3, 2.9});
  CHECK(x.to(DType::i64).to_vector<int64_t>() == std::vector<int64_t>{-1, 0, 2});
  CHECK(x.to(DType::u8).to_vector<int64_t>() == std::vector<int64_t>{255, 0, 2});
  CHECK(x.to(DType::boolean).to_vector<int64_t>() == std::vector<int64_t>{1, 1, 1});
}

TEST_CASE("transposes of every size and element width keep the bytes beside them") {
  for (DType t : {DType::u8, DType::bf16, DType::f32, DType::f64}) {
    const size_t bytes = size_of(t);
    for (int64_t rows : {1, 3, 4, 15, 16, 17, 33, 64})
      for (int64_t columns : {1, 2, 4, 5, 16, 31, 40}) {
        // The result is a window of a larger tensor, whose rim must not change.
        const Tensor from = empty({columns, rows}, {.dtype = t}),
                     room = empty({rows + 2, columns + 2}, {.dtype = t});
        auto fill = [&](const Tensor& x, int first) {
          auto* p = static_cast<unsigned char*>(x.data_ptr());
          for (size_t i = 0; i < static_cast<size_t>(x.numel()) * bytes; ++i)
            p[i] = static_cast<unsigned char>(first + 31 * i + i / 7);
        };
        fill(from, 1);
        fill(room, 100);
        const std::vector<unsigned char> before(static_cast<unsigned char*>(room.data_ptr()),
                                                static_cast<unsigned char*>(room.data_ptr()) +
                                                    static_cast<size_t>(room.numel()) * bytes);
        const Tensor to = room.slice(0, {1, rows + 1}).slice(1, {1, columns + 1});
        kernels::copy(to, from.t());
        bool inside = true, outside = true;
        for (int64_t r = 0; r < rows + 2; ++r)
          for (int64_t c = 0; c < columns + 2; ++c) {
            const int64_t at = r * (columns + 2) + c;
            const bool rim = r == 0 || c == 0 || r > rows || c > columns;
            const void* want =
                rim ? static_cast<const void*>(&before[static_cast<size_t>(at) * bytes])
                    : address(from, (c - 1) * rows + r - 1);
            (rim ? outside : inside) &= std::memcmp(address(room, at), want, bytes) == 0;
          }
        CHECK(inside);
        CHECK(outside);
      }
  }
}

TEST_CASE("large copies, on several threads") {
  const int before = get_num_threads();
  set_num_threads(3);
  const Tensor x = empty({16, 64, 24, 20});
  number(x);
  Tensor last = empty({16, 24, 20, 64}).permute({0, 3, 1, 2});
  last.copy_(x);
  CHECK(same_elements<float>(last, x));
  CHECK(same_elements<float>(last.contiguous(), x));
  CHECK(same_elements<float>(x.clone(), x));
  Tensor wide = empty({1000, 700});
  number(wide);
  CHECK(same_elements<float>(wide.t().contiguous(), wide.t()));
  set_num_threads(before);
}

TEST_CASE("a source broadcasts") {
  const Tensor row = tensor(std::vector<float>{1, 2, 3});
  Tensor y = zeros({2, 3});
  y.copy_(row);
  CHECK(y.to_vector<double>() == std::vector<double>{1, 2, 3, 1, 2, 3});
  y.copy_(tensor(std::vector<double>{7, 8}).unsqueeze(1));
  CHECK(y.to_vector<double>() == std::vector<double>{7, 7, 7, 8, 8, 8});
  y.copy_(scalar(5));
  CHECK(y.to_vector<double>() == std::vector<double>(6, 5.0));
  CHECK_THROWS_AS(y.copy_(ones({4})), ShapeError);
  CHECK_THROWS_AS(y.copy_(ones({1, 2, 3})), ShapeError);
}

TEST_CASE("fill_ writes its window and nothing else") {
  for (DType t : kDTypes) {
    const Tensor room = zeros({5, 9}, {.dtype = t});
    room.slice(0, {1, 4}).slice(1, {1, 8, 2}).fill_(1);
    const std::vector<double> v = room.to_vector<double>();
    for (int i = 0; i < 45; ++i) {
      const int r = i / 9, c = i % 9;
      CHECK(v[static_cast<size_t>(i)] == (r >= 1 && r < 4 && c % 2 == 1 && c < 8));
    }
  }
  CHECK(full({70000}, 2.5).to_vector<double>() == std::vector<double>(70000, 2.5));
  CHECK(full({2}, -1, {.dtype = DType::u8}).to_vector<int64_t>() == std::vector<int64_t>{255, 255});
}
