// W ranks equal one process, over the whole of what DistributedDataParallel offers: models with batch norm
// and attention, accumulation, unused parameters, static graphs, bucket sizes. A pairwise sample of the
// combinations runs by default, all of them with LOCKSTEP_EQUALITY=all.
#include <doctest/doctest.h>

#include <cstdlib>

#include "equality_models.h"
#include "ranks.h"
#include "sockets.h"

using namespace lockstep;
using namespace equality;

namespace {

std::vector<Config> configs(int size) {
  const char* which = std::getenv("LOCKSTEP_EQUALITY");
  if (which && std::string(which) == "all") return all_configs();
  return pairwise_configs(static_cast<unsigned>(size));
}

double difference(const Tensor& a, const Tensor& b) {
  return (abs(a - b).max() / abs(b).max()).item<double>();
}

void check_config(const Config& c, const dist::Group& group) {
  const Tensor mine = train_config(c, group, group.size(), 1);
  const Tensor all = group.all_gather(mine);
  for (int r = 0; r < group.size(); ++r)
    ranks::require(all[r].to_vector<double>() == mine.to_vector<double>(),
                   str_cat(c.text(), ": rank ", r, " holds other bits"));
  const Tensor again = train_config(c, group, group.size(), 2);
  ranks::require(again.to_vector<double>() == mine.to_vector<double>(),
                 c.text() + ": a second run gave other bits");
  if (!group.is_main()) return;
  const double d = difference(mine, train_config(c, dist::Group(), group.size()));
  const double most = c.recipe == Recipe::sgd_f64   ? 1e-12
                      : c.recipe == Recipe::sgd_f32 ? 1e-5
                                                    : 1e-4;
  ranks::require(d <= most, str_cat(c.text(), ": differs from one process by ", d));
}

void check_all(const dist::Group& group) {
  for (const Config& c : configs(group.size())) check_config(c, group);
  // The others' check is rank 0's; nobody leaves before it is done.
  group.barrier();
}

}  // namespace

TEST_CASE("ranks as threads equal one process") {
  for (int size = 1; size <= 4; ++size) {
    CAPTURE(size);
    CHECK_NOTHROW(dist::run_local(size, check_all, {.timeout = std::chrono::seconds(60)}));
  }
}

TEST_CASE("rank: equality" * doctest::skip()) {
  const char* backend = std::getenv("LOCKSTEP_TEST_BACKEND");
  auto group = dist::init({.backend = backend, .timeout = std::chrono::seconds(60)});
  REQUIRE(group.backend() == backend);
  CHECK_NOTHROW(check_all(group));
}

void check_processes(int size, std::map<std::string, std::string> variables) {
  if (const char* which = std::getenv("LOCKSTEP_EQUALITY")) variables["LOCKSTEP_EQUALITY"] = which;
  const auto ended =
      ranks::run_ranks(size, "rank: equality", {.deadline = 120, .variables = variables});
  CHECK(ranks::failures(ended) == "");
}

TEST_CASE("ranks as processes over shm equal one process") {
  for (int size = 2; size <= 4; ++size) {
    CAPTURE(size);
    check_processes(size, {{"LOCKSTEP_TEST_BACKEND", "shm"}});
  }
}

TEST_CASE("ranks as processes over gloo equal one process") {
#ifdef LOCKSTEP_HAS_GLOO
  for (int size = 2; size <= 3; ++size) {
    CAPTURE(size);
    check_processes(size, {{"LOCKSTEP_TEST_BACKEND", "gloo"},
                           {"MASTER_ADDR", "127.0.0.1"},
                           {"MASTER_PORT", std::to_string(sockets::Listener().port())},
                           {"LOCKSTEP_TOKEN", "a secret"}});
  }
#else
  MESSAGE("skipped: Lockstep was built without Gloo");
#endif
}
