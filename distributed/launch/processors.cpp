// Dealing processors to ranks.
#include <lockstep/distributed/launch/processors.h>

#include <sched.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <sstream>
#include <tuple>

#include <lockstep/tensor/error.h>

namespace lockstep::dist {

namespace {

constexpr int kMostProcessors = 8192;

std::optional<std::string> first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  if (!std::getline(file, line)) return std::nullopt;
  return line;
}

// The threads of a core next to each other, and cores of a package; where the machine does not
// describe itself, in numerical order.
std::vector<int> by_core(std::vector<int> processors, const std::string& system) {
  const auto number = [&](int processor, const char* name) {
    const auto text = first_line(str_cat(system, "/cpu/cpu", processor, "/topology/", name));
    int n = 0;
    if (text) std::from_chars(text->data(), text->data() + text->size(), n);
    return text ? n : processor;
  };
  std::map<int, std::tuple<int, int>> core;  // package and core of each processor
  for (const int p : processors) core[p] = {number(p, "physical_package_id"), number(p, "core_id")};
  std::stable_sort(processors.begin(), processors.end(),
                   [&](int a, int b) { return core[a] < core[b]; });
  return processors;
}

std::vector<Place> by_share(int ranks, const std::vector<int>& processors) {
  const int n = static_cast<int>(processors.size());
  std::vector<Place> all(static_cast<size_t>(ranks));
  for (int r = 0; r < ranks; ++r) {
    Place& place = all[static_cast<size_t>(r)];
    const int begin = static_cast<int>(int64_t{r} * n / ranks),
              end = std::max(static_cast<int>(int64_t{r + 1} * n / ranks), begin + 1);
    place.processors.assign(processors.begin() + begin, processors.begin() + end);
    place.threads = end - begin;
  }
  return all;
}

std::vector<std::vector<int>> memory_nodes(const std::vector<int>& processors,
                                           const std::string& system) {
  const std::string folder = system + "/node";
  std::map<int, std::vector<int>> nodes;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename();
    int number = -1;
    if (!name.starts_with("node") ||
        std::from_chars(name.data() + 4, name.data() + name.size(), number).ptr !=
            name.data() + name.size() ||
        number < 0)
      continue;
    const auto list = first_line(entry.path() / "cpulist");
    if (!list) continue;
    std::vector<int> ours;
    for (const int p : parse_cpu_list(*list))
      if (std::binary_search(processors.begin(), processors.end(), p)) ours.push_back(p);
    if (!ours.empty()) nodes[number] = std::move(ours);
  }
  LOCKSTEP_CHECK(!nodes.empty(), ValueError, "launch: --bind numa: ", folder,
                 " describes no memory node that has any of our processors; use --bind core");
  std::vector<std::vector<int>> all;
  for (auto& [number, ours] : nodes) all.push_back(std::move(ours));
  return all;
}

std::vector<Place> by_node(int ranks, const std::vector<std::vector<int>>& nodes) {
  const int n = static_cast<int>(nodes.size());
  const auto node_of = [&](int rank) { return static_cast<size_t>(int64_t{rank} * n / ranks); };
  std::vector<int> sharing(nodes.size());
  for (int r = 0; r < ranks; ++r) ++sharing[node_of(r)];
  std::vector<Place> all;
  for (int r = 0; r < ranks; ++r) {
    const auto& node = nodes[node_of(r)];
    all.push_back({node, std::max(1, static_cast<int>(node.size()) / sharing[node_of(r)])});
  }
  return all;
}

}  // namespace

std::vector<int> allowed_processors() {
  std::vector<int> all;
  cpu_set_t* set = CPU_ALLOC(kMostProcessors);
  const size_t bytes = CPU_ALLOC_SIZE(kMostProcessors);
  CPU_ZERO_S(bytes, set);
  if (sched_getaffinity(0, bytes, set) == 0)
    for (int p = 0; p < kMostProcessors; ++p)
      if (CPU_ISSET_S(p, bytes, set)) all.push_back(p);
  CPU_FREE(set);
  LOCKSTEP_CHECK(!all.empty(), DistError, "launch: the system names no processor that we may use");
  return all;
}

std::vector<Place> places(Bind bind, int ranks, const std::vector<int>& processors,
                          const std::string& system) {
  if (bind == Bind::core) return by_share(ranks, by_core(processors, system));
  if (bind == Bind::numa) return by_node(ranks, memory_nodes(processors, system));
  const int share = std::max(1, static_cast<int>(processors.size()) / ranks);
  return std::vector<Place>(static_cast<size_t>(ranks), Place{{}, share});
}

std::vector<int> parse_cpu_list(const std::string& text) {
  std::vector<int> all;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, ',');) {
    int first = -1, last = -1;
    const char* end = part.data() + part.size();
    auto read = std::from_chars(part.data(), end, first);
    last = first;
    if (read.ptr != end && *read.ptr == '-') read = std::from_chars(read.ptr + 1, end, last);
    if (read.ec != std::errc() || read.ptr != end || first < 0 || last >= kMostProcessors) break;
    for (int p = first; p <= last; ++p) all.push_back(p);
  }
  return all;
}

}  // namespace lockstep::dist
