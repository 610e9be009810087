// How processors are dealt to ranks, on machines described by a folder.
#include <doctest/doctest.h>

#include <algorithm>
#include <filesystem>

#include <lockstep/distributed/launch/processors.h>
#include <lockstep/tensor/error.h>

#include "temporary_folder.h"

using namespace lockstep;
using namespace lockstep::dist;
using Processors = std::vector<int>;

namespace {

void describe(const TemporaryFolder& system, int processor, int package, int core) {
  const std::string folder = system / ("cpu/cpu" + std::to_string(processor) + "/topology");
  std::filesystem::create_directories(folder);
  put_file(folder + "/physical_package_id", std::to_string(package) + "\n");
  put_file(folder + "/core_id", std::to_string(core) + "\n");
}

void describe_node(const TemporaryFolder& system, const std::string& name,
                   const std::string& list) {
  std::filesystem::create_directories(system / ("node/" + name));
  put_file(system / ("node/" + name + "/cpulist"), list + "\n");
}

}  // namespace

TEST_CASE("lists of processors") {
  CHECK(parse_cpu_list("0-3,8,10-11") == Processors{0, 1, 2, 3, 8, 10, 11});
  CHECK(parse_cpu_list("5") == Processors{5});
  CHECK(parse_cpu_list("") == Processors{});
  CHECK(parse_cpu_list("2-") == Processors{});
  CHECK(parse_cpu_list("1,x") == Processors{1});
  CHECK(parse_cpu_list("-4") == Processors{});
  CHECK(parse_cpu_list("0-999999999") == Processors{});
}

TEST_CASE("none: nobody is bound, everybody has a share of the threads") {
  const auto all = places(Bind::none, 3, {0, 1, 2, 3, 4, 5, 6});
  REQUIRE(all.size() == 3);
  for (const Place& p : all) {
    CHECK(p.processors.empty());
    CHECK(p.threads == 2);
  }
  CHECK(places(Bind::none, 9, {0, 1})[8].threads == 1);
}

TEST_CASE("core: contiguous shares, all processors used") {
  const TemporaryFolder system;
  const auto all = places(Bind::core, 3, {0, 1, 2, 3, 6, 7, 9}, system.path());
  CHECK(all[0].processors == Processors{0, 1});
  CHECK(all[1].processors == Processors{2, 3});
  CHECK(all[2].processors == Processors{6, 7, 9});
  CHECK(all[0].threads == 2);
  CHECK(all[2].threads == 3);
  // More ranks than processors share them evenly.
  const auto many = places(Bind::core, 5, {4, 5}, system.path());
  const Processors expected[] = {{4}, {4}, {4}, {5}, {5}};
  for (size_t r = 0; r < 5; ++r) {
    CHECK(many[r].processors == expected[r]);
    CHECK(many[r].threads == 1);
  }
}

TEST_CASE("core: the two threads of a core stay together") {
  const TemporaryFolder system;
  // Four cores in two packages; processor p + 4 is the second thread of processor p's core.
  for (int p = 0; p < 8; ++p) describe(system, p, p % 4 / 2, p % 2);
  const auto all = places(Bind::core, 4, {0, 1, 2, 3, 4, 5, 6, 7}, system.path());
  for (int r = 0; r < 4; ++r) CHECK(all[static_cast<size_t>(r)].processors == Processors{r, r + 4});
}

TEST_CASE("numa: ranks over nodes, each bound to all of its node that we may use") {
  const TemporaryFolder system;
  describe_node(system, "node0", "0-3");
  describe_node(system, "node1", "4-7");
  describe_node(system, "node2", "");     // memory without processors
  describe_node(system, "node3", "8-9");  // not ours
  describe_node(system, "nodes", "0-9");
  const auto all = places(Bind::numa, 3, {1, 2, 3, 4, 5, 6, 7}, system.path());
  CHECK(all[0].processors == Processors{1, 2, 3});
  CHECK(all[1].processors == Processors{1, 2, 3});
  CHECK(all[2].processors == Processors{4, 5, 6, 7});
  CHECK(all[0].threads == 1);
  CHECK(all[1].threads == 1);
  CHECK(all[2].threads == 4);
  const auto one = places(Bind::numa, 1, {1, 4}, system.path());
  CHECK(one[0].processors == Processors{1});
}

TEST_CASE("numa without nodes is an error") {
  const TemporaryFolder system;
  CHECK_THROWS_WITH_AS(places(Bind::numa, 2, {0, 1}, system.path()),
                       doctest::Contains("describes no memory node"), ValueError);
}

TEST_CASE("this machine") {
  const Processors ours = allowed_processors();
  CHECK(!ours.empty());
  CHECK(std::is_sorted(ours.begin(), ours.end()));
}
