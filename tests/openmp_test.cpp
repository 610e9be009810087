// Programs that use OpenMP themselves: ops before, inside and after the user's parallel regions, nested
// ones too, compute what they compute alone, and every setting of OpenMP stays as the user made it.
#include <doctest/doctest.h>

#include <omp.h>

#include <string>
#include <vector>

#include <lockstep/nn/nn.h>
#include <lockstep/optim/optim.h>
#include <lockstep/tensor/ops.h>
#include <lockstep/tensor/parallel.h>
#include <lockstep/tensor/random.h>

using namespace lockstep;

namespace {

/// All that a program can set of OpenMP, and the size of the team that it gets.
struct Settings {
  int most_threads = omp_get_max_threads(), dynamic = omp_get_dynamic(),
      levels = omp_get_max_active_levels(), team = 0;
  omp_sched_t schedule{};
  int chunk = 0;
  Settings() {
    omp_get_schedule(&schedule, &chunk);
#pragma omp parallel
    {
#pragma omp single
      team = omp_get_num_threads();
    }
  }
  bool operator==(const Settings&) const = default;
};

std::string bytes_of(const Tensor& t) {
  const Tensor dense = t.detach().contiguous();
  return std::string(static_cast<const char*>(dense.data_ptr()),
                     static_cast<size_t>(dense.numel()) * size_of(dense.dtype()));
}

/// A step of training that runs an op of each family, from a seed.
std::string train(int seed) {
  manual_seed(static_cast<uint64_t>(seed));
  nn::Sequential net{nn::Conv2d{1, 4, 3}, nn::BatchNorm2d{4}, nn::ReLU{},
                     nn::MaxPool2d{2},    nn::Flatten{},      nn::Linear{4 * 49, 130},
                     nn::LayerNorm{130},  nn::GELU{},         nn::Dropout{0.2},
                     nn::Linear{130, 5}};
  optim::SGD opt{net.parameters(), {.lr = 0.1, .momentum = 0.9}};
  const Tensor x = randn({130, 1, 16, 16}), y = randint(0, 5, {130});
  std::string bytes;
  for (int i = 0; i < 2; ++i) {
    opt.zero_grad();
    const Tensor loss = cross_entropy(net(x), y);
    loss.backward();
    opt.step();
    bytes += bytes_of(loss);
  }
  for (const Tensor& p : net.parameters()) bytes += bytes_of(p);
  return bytes;
}

struct Restore {
  int threads = omp_get_max_threads(), levels = omp_get_max_active_levels(),
      ours = get_num_threads();
  ~Restore() {
    omp_set_num_threads(threads);
    omp_set_max_active_levels(levels);
    set_num_threads(ours);
  }
};

}  // namespace

TEST_CASE("OpenMP: its settings are as before after ops of every family") {
  const Restore restore;
  for (const int theirs : {1, 3})
    for (const int ours : {1, 2}) {
      omp_set_num_threads(theirs);
      omp_set_schedule(omp_sched_dynamic, 3);
      omp_set_max_active_levels(2);
      set_num_threads(ours);
      const Settings before;
      CHECK(before.team == theirs);
      train(1);
      CHECK(Settings() == before);
      CHECK(get_num_threads() == ours);
    }
}

TEST_CASE("OpenMP: training inside the user's parallel region, and after it") {
  const Restore restore;
  omp_set_num_threads(3);
  std::vector<std::string> alone, inside(6);
  for (int i = 0; i < 6; ++i) alone.push_back(train(i));
  const Settings before;
#pragma omp parallel for schedule(dynamic, 1)
  for (int i = 0; i < 6; ++i) inside[static_cast<size_t>(i)] = train(i);
  CHECK(inside == alone);
  CHECK(Settings() == before);
  CHECK(train(0) == alone[0]);
}

TEST_CASE("OpenMP: training inside nested parallel regions") {
  const Restore restore;
  omp_set_max_active_levels(2);
  std::vector<std::string> inside(4);
  std::vector<int> teams(2);
#pragma omp parallel num_threads(2)
  {
    const int outer = omp_get_thread_num();
#pragma omp parallel num_threads(2)
    inside[static_cast<size_t>(2 * outer + omp_get_thread_num())] = train(7);
#pragma omp parallel num_threads(2)
    {
#pragma omp single
      teams[static_cast<size_t>(outer)] = omp_get_num_threads();
    }
  }
  for (const std::string& bytes : inside) CHECK((bytes.empty() || bytes == train(7)));
  CHECK(teams[0] == 2);
}
