#include <lockstep/distributed/ddp/replicas.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>

#include <lockstep/distributed/hash.h>

namespace lockstep::dist {
namespace {

constexpr int64_t kMostSamples = 16;               // of a parameter
constexpr int64_t kAllSamples = int64_t{1} << 16;  // of all parameters, about

/// Element k, counted in row-major order.
const std::byte* element(const Tensor& t, int64_t k) {
  int64_t offset = 0;
  for (int d = t.dim(); d-- > 0;) {
    offset += k % t.shape()[d] * t.strides()[d];
    k /= t.shape()[d];
  }
  return static_cast<const std::byte*>(t.data_ptr()) +
         offset * static_cast<int64_t>(size_of(t.dtype()));
}

std::string_view text_of(const void* bytes, size_t n) {
  return {static_cast<const char*>(bytes), n};
}

}  // namespace

uint64_t sample_of(const NamedTensors& parameters, uint64_t round) {
  const auto count = std::max<int64_t>(1, static_cast<int64_t>(parameters.size()));
  const int64_t most = std::clamp<int64_t>(kAllSamples / count, 1, kMostSamples);
  uint64_t hash = 0;
  for (const auto& [name, p] : parameters) {
    const int64_t n = p.numel();
    if (n == 0) continue;
    const int64_t step = std::max<int64_t>(1, n / most);
    for (int64_t k = static_cast<int64_t>(round % static_cast<uint64_t>(step)); k < n; k += step)
      hash = hash * 0x9E3779B97F4A7C15 + hash_of(text_of(element(p, k), size_of(p.dtype())));
  }
  return hash;
}

uint64_t processor_kind() {
  static const uint64_t kind = [] {
    const char* limit = std::getenv("LOCKSTEP_MAX_ISA");
    std::string text = limit ? limit : "";
    std::ifstream file("/proc/cpuinfo");
    for (std::string line; std::getline(file, line) && !line.empty();)  // the first processor
      for (const std::string_view key : {"vendor_id", "cpu family", "model\t", "flags", "Features",
                                         "CPU implementer", "CPU part"})
        if (line.starts_with(key)) text += line;
    return hash_of(text);
  }();
  return kind;
}

std::pair<int, int> compare_replicas(ProcessGroup& group, const NamedTensors& parameters) {
  const auto n = static_cast<int64_t>(parameters.size());
  Tensor mine = empty({n}, {.dtype = DType::i64}),
         all = empty({group.size(), n}, {.dtype = DType::i64});
  for (int64_t i = 0; i < n; ++i) {
    const Tensor dense = parameters[static_cast<size_t>(i)].second.detach().contiguous();
    const size_t bytes = static_cast<size_t>(dense.numel()) * size_of(dense.dtype());
    mine.data<int64_t>()[i] =
        bytes == 0 ? 0 : static_cast<int64_t>(hash_of(text_of(dense.data_ptr(), bytes)));
  }
  group.all_gather(all, mine, {.label = "DDP's comparison of parameters"})->wait();
  const int64_t* hash = all.data<int64_t>();  // [rank, parameter]
  for (int64_t i = 0; i < n; ++i)
    for (int r = 1; r < group.size(); ++r)
      if (hash[r * n + i] != hash[i]) return {static_cast<int>(i), r};
  return {-1, 0};
}

}  // namespace lockstep::dist
