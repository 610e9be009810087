// The umbrella header has what a program needs that extends Lockstep: ops, files and backends of its own.
#include <lockstep/lockstep.h>

#include <doctest/doctest.h>

#include "temporary_folder.h"

using namespace lockstep;

namespace {

/// x^3
struct Cube {
  static constexpr const char* name = "cube";
  static constexpr unsigned saves = kInput(0);
  Tensor forward(const Tensor& x) { return x * x * x; }
  void backward(const Saved& saved, const Tensor& dy, InputGradients& dx) const {
    const Tensor x = saved.input(0);
    dx.set(0, dy * x * x * 3.0);
  }
};

}  // namespace

TEST_CASE("the umbrella header has what ops of one's own are made of") {
  const Tensor x = tensor<double>({2, -3}).requires_grad_();
  apply(Cube{}, x).sum().backward();
  CHECK(x.grad().to_vector<double>() == std::vector<double>{12, 27});
  const Tensor picked = take_along(x.detach(), tensor<int64_t>({1}), 0);
  CHECK(picked.to_vector<double>() == std::vector<double>{-3});
}

TEST_CASE("the umbrella header reads and writes files") {
  const TemporaryFolder folder;
  write_file_atomically(folder / "a", std::string_view("text"));
  CHECK(read_file(folder / "a") == "text");
}

TEST_CASE("the umbrella header registers backends") {
  dist::register_backend("none", [](const dist::Environment&, const dist::InitOptions&) {
    return std::shared_ptr<dist::ProcessGroup>();
  });
  const auto names = dist::backends();
  CHECK(std::find(names.begin(), names.end(), "none") != names.end());
}

TEST_CASE("the umbrella header has the transforms and file formats of data sets") {
  const data::RandomShift none{0};
  const Tensor images = ones({1, 2, 2});
  const std::vector<int64_t> indices{0};
  CHECK(none(images, indices, {}).to_vector<double>() == images.to_vector<double>());
  CHECK_THROWS_AS(data::read_idx("/nonexistent"), IoError);
}
