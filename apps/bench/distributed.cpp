#include "distributed.h"

#include <cstdio>
#include <cstdlib>
#include <filesystem>

#include "models.h"
#include "timing.h"

using nlohmann::json;

namespace lockstep::bench {

namespace {

json step_case(const std::string& name, int64_t batch, const dist::Group& group) {
  manual_seed(1);
  const RankStep rank = ddp_step(name, batch, group);
  for (int i = 0; i < 5; ++i) rank.step();
  Tensor calls =
      tensor<int64_t>({std::max<int64_t>(3, static_cast<int64_t>(0.2 / seconds(rank.step, 2)))});
  group.broadcast(calls);
  std::vector<double> times, overlaps, waits;
  for (int round = 0; round < 7; ++round) {
    group.barrier();
    times.push_back(seconds(rank.step, static_cast<int>(calls.item<int64_t>())));
    overlaps.push_back(rank.stats().overlap());
    waits.push_back(rank.stats().final_wait);
  }
  const Timing t = summary(times);
  return {{"ms", t.median * 1e3},
          {"ms_least", t.least * 1e3},
          {"overlap", median(overlaps)},
          {"final_wait_ms", median(waits) * 1e3},
          {"gradient_bytes", rank.stats().gradient_bytes},
          {"parameter_bytes", rank.parameter_bytes}};
}

json all_reduce_case(const dist::Group& group) {
  json rows = json::array();
  const bool shares =
      group.process_group().records_are_free();  // only then is bucket memory special
  for (int64_t bytes : {int64_t{4}, int64_t{4096}, int64_t{1} << 20, int64_t{25} << 20})
    for (bool bucket : {true, false}) {
      if (bucket && !shares) continue;
      Tensor t = zeros({bytes / 4});
      if (bucket) t.body().storage = group.process_group().allocate(static_cast<size_t>(bytes));
      t.zero_();
      const int calls = static_cast<int>(
          std::clamp<int64_t>((int64_t{200} << 20) / (bytes + (1 << 18)), 10, shares ? 500 : 100));
      std::vector<double> times;
      for (int round = 0; round < 7; ++round) {
        group.barrier();
        times.push_back(seconds([&] { group.all_reduce(t); }, calls));
      }
      rows.push_back({{"backend", group.backend()},
                      {"bytes", bytes},
                      {"memory", bucket ? "bucket" : "any"},
                      {"us", summary(times).median * 1e6}});
    }
  return rows;
}

std::string program(const char* name) {
  return (std::filesystem::read_symlink("/proc/self/exe").parent_path() / name).string();
}

/// Starts this program again on `ranks` ranks of one thread each, and reads what rank 0 prints.
json on_ranks(int ranks, const std::string& arguments) {
  const std::string command = "LOCKSTEP_NUM_THREADS=1 " + program("lockstep-run") + " -n " +
                              std::to_string(ranks) + " --no-prefix --filter-ranks 0 " +
                              program("lockstep-bench") + " " + arguments;
  FILE* pipe = popen(command.c_str(), "r");
  LOCKSTEP_CHECK(pipe, Error, "lockstep-bench: cannot start ", command);
  std::string text;
  for (char buffer[4096]; const size_t n = fread(buffer, 1, sizeof buffer, pipe);)
    text.append(buffer, n);
  LOCKSTEP_CHECK(pclose(pipe) == 0, Error, "lockstep-bench: failed: ", command);
  return json::parse(text);
}

}  // namespace

json rank_case(const std::string& name, int64_t batch, const std::string& backend) {
  const auto group = dist::init({.backend = backend});
  if (name == "barrier") {
    group.barrier();
    return json::object();
  }
  return name == "all-reduce" ? all_reduce_case(group) : step_case(name, batch, group);
}

json ranks() {
  json rows = json::array();
  for (auto [name, batch, budget] :
       {std::tuple("cnn", 128, 1.9), std::tuple("mlp_784_512_512_10", 128, 1.6)}) {
    const std::string arguments = str_cat("--rank-case ", name, " --batch ", batch);
    std::vector<double> one, two;
    json last;
    for (int round = 0; round < 3; ++round) {
      one.push_back(on_ranks(1, arguments)["ms"]);
      last = on_ranks(2, arguments);
      two.push_back(last["ms"]);
    }
    rows.push_back({{"name", name},
                    {"batch", batch},
                    {"one_rank_ms", median(one)},
                    {"two_ranks_ms", median(two)},
                    {"throughput", median(one) / median(two)},
                    {"budget", budget},
                    {"overlap", last["overlap"]},
                    {"final_wait_ms", last["final_wait_ms"]},
                    {"gradient_bytes", last["gradient_bytes"]},
                    {"parameter_bytes", last["parameter_bytes"]}});
  }
  return rows;
}

json all_reduce() {
  json rows = on_ranks(2, "--rank-case all-reduce --backend shm");
  try {
    for (const json& row : on_ranks(2, "--rank-case all-reduce --backend gloo"))
      rows.push_back(row);
  } catch (const Error&) {
    std::fprintf(stderr,
                 "lockstep-bench: without the gloo backend there is nothing to compare with\n");
  }
  return rows;
}

json growth() {
  json rows = json::array();
  for (int ranks = 2; ranks <= 8; ++ranks)
    for (json row : on_ranks(ranks, "--rank-case all-reduce --backend shm")) {
      row["ranks"] = ranks;
      rows.push_back(row);
    }
  return rows;
}

json wrapper() {
  json rows = json::array();
  for (const char* name : {"mlp_784_512_512_10", "cnn"}) {
    const auto bare = plain_step(name, 128);
    const RankStep wrapped = ddp_step(name, 128, dist::Group());
    const Pair t = time_by_turns(wrapped.step, bare);
    rows.push_back({{"name", name},
                    {"wrapped_ms", t.a.median * 1e3},
                    {"bare_ms", t.b.median * 1e3},
                    {"ratio", t.ratio}});
  }
  return rows;
}

json start_up() {
  const auto once = [] { on_ranks(2, "--rank-case barrier"); };
  for (int i = 0; i < 3; ++i) once();
  std::vector<double> times;
  for (int i = 0; i < 15; ++i) times.push_back(seconds(once, 1));
  return {{"ms", median(times) * 1e3}, {"ms_least", summary(times).least * 1e3}};
}

void print_distributed(const json& all) {
  auto number = [](const json& j, const char* key) { return j.value(key, 0.0); };
  if (all.contains("ranks")) {
    std::printf("same global batch, one thread a rank  one rank  two ranks  throughput  budget\n");
    for (const json& r : all["ranks"]) {
      std::printf("  %-28s bs%-4d %8.3f ms %7.3f ms %8.2fx %9.2fx\n",
                  r["name"].get<std::string>().c_str(), r["batch"].get<int>(),
                  number(r, "one_rank_ms"), number(r, "two_ranks_ms"), number(r, "throughput"),
                  number(r, "budget"));
      std::printf(
          "    reduced before the last gradient: %.0f %% of the bytes; final wait %.3f ms; "
          "gradients %.2f MiB for %.2f MiB of parameters\n",
          100 * number(r, "overlap"), number(r, "final_wait_ms"),
          number(r, "gradient_bytes") / (1 << 20), number(r, "parameter_bytes") / (1 << 20));
    }
  }
  const auto table = [&](const char* key, const char* title) {
    if (!all.contains(key)) return;
    std::printf("%s\n", title);
    for (const json& r : all[key])
      std::printf("  %d ranks, %-4s %9lld bytes, %-6s memory %10.2f us\n", r.value("ranks", 2),
                  r["backend"].get<std::string>().c_str(), r["bytes"].get<long long>(),
                  r["memory"].get<std::string>().c_str(), number(r, "us"));
  };
  table("all_reduce", "all-reduce between two ranks");
  table("growth", "all-reduce with the number of ranks");
  if (all.contains("wrapper"))
    for (const json& r : all["wrapper"])
      std::printf(
          "wrapper at world size 1, %-20s %8.3f ms, bare %8.3f ms, ratio %.3f  (budget 1.01)\n",
          r["name"].get<std::string>().c_str(), number(r, "wrapped_ms"), number(r, "bare_ms"),
          number(r, "ratio"));
  if (all.contains("start_up"))
    std::printf(
        "two ranks from start to exit, meeting at a barrier: %.1f ms (least %.1f; budget 20)\n",
        number(all["start_up"], "ms"), number(all["start_up"], "ms_least"));
}

}  // namespace lockstep::bench
