// lockstep-bench: times training steps beside their bare products, the cost of small ops, and two
// ranks against one. All figures of one run belong together; compare ratios, since machines differ
// and drift.
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "bare.h"
#include "models.h"
#include "timing.h"

using namespace lockstep;
using namespace lockstep::bench;
using nlohmann::json;

namespace {

json steps(const std::string& only) {
  json rows = json::array();
  for (const Case& c : cases()) {
    if (c.name.find(only) == std::string::npos) continue;
    const auto step = c.make_step();
    const auto products = bare(c.products);
    json row{{"name", c.name}, {"budget", c.budget}};
    if (products) {
      const Pair t = time_by_turns(step, *products);
      row.update({{"ms", t.a.median * 1e3},
                  {"ms_least", t.a.least * 1e3},
                  {"bare_ms", t.b.median * 1e3},
                  {"ratio", t.ratio}});
    } else {
      const Timing t = time_alone(step);
      row.update({{"ms", t.median * 1e3}, {"ms_least", t.least * 1e3}});
    }
    rows.push_back(row);
  }
  return rows;
}

std::string describe(const Product& p) {
  if (p.kind == Product::gemm)
    return str_cat(p.m, 'x', p.n, 'x', p.k, p.ta ? " a^T" : "", p.tb ? " b^T" : "");
  const char* what = p.kind == Product::conv_forward ? "forward"
                     : p.kind == Product::conv_data  ? "data"
                                                     : "weights";
  return str_cat("conv 3x3 ", p.in, "->", p.out, " at ", p.size, 'x', p.size, " x", p.batch, ' ',
                 what);
}

json products() {
  json rows = json::array();
  for (const Case& c : cases())
    for (const Product& p : c.products) {
      const auto f = bare({p});
      if (!f) return rows;
      const Timing t = time_alone(*f, 5, 0.05);
      rows.push_back({{"case", c.name},
                      {"product", describe(p)},
                      {"us", t.median * 1e6},
                      {"gflops", p.flops() / t.least * 1e-9}});
    }
  return rows;
}

json overhead() {
  const Tensor a = rand({4}), b = rand({4}), w = rand({4}, {.requires_grad = true});
  const Timing plain = time_alone([&] { Tensor c = a + b; });
  const Timing tracked = time_alone([&] { Tensor c = w + b; });
  return {{"add_4_us", plain.least * 1e6}, {"add_4_with_graph_us", tracked.least * 1e6}};
}

/// Run on every rank: milliseconds a step, from rank 0's clock between barriers.
json rank_case(const std::string& name, int64_t batch) {
  auto group = dist::init();
  manual_seed(1);
  const auto step = ddp_step(name, batch, group);
  for (int i = 0; i < 5; ++i) step();
  Tensor calls =
      tensor<int64_t>({std::max<int64_t>(3, static_cast<int64_t>(0.2 / seconds(step, 2)))});
  group.broadcast(calls);
  std::vector<double> times;
  for (int round = 0; round < 7; ++round) {
    group.barrier();
    times.push_back(seconds(step, static_cast<int>(calls.item<int64_t>())));
  }
  const Timing t = summary(times);
  return {{"ms", t.median * 1e3}, {"ms_least", t.least * 1e3}};
}

json all_reduce_case() {
  auto group = dist::init();
  json rows = json::array();
  for (int64_t bytes : {int64_t{4}, int64_t{4096}, int64_t{1} << 20, int64_t{25} << 20})
    for (bool bucket : {true, false}) {
      Tensor t = zeros({bytes / 4});
      if (bucket) t.body().storage = group.process_group().allocate(static_cast<size_t>(bytes));
      t.zero_();
      const int calls = static_cast<int>(
          std::clamp<int64_t>((int64_t{200} << 20) / (bytes + (1 << 18)), 10, 500));
      std::vector<double> times;
      for (int round = 0; round < 7; ++round) {
        group.barrier();
        times.push_back(seconds([&] { group.all_reduce(t); }, calls));
      }
      rows.push_back({{"bytes", bytes},
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

json ranks() {
  json rows = json::array();
  for (auto [name, batch, budget] :
       {std::tuple("cnn", 128, 1.9), std::tuple("mlp_784_512_512_10", 128, 1.6)}) {
    const std::string arguments = str_cat("--rank-case ", name, " --batch ", batch);
    std::vector<double> one, two;
    for (int round = 0; round < 3; ++round) {
      one.push_back(on_ranks(1, arguments)["ms"]);
      two.push_back(on_ranks(2, arguments)["ms"]);
    }
    rows.push_back({{"name", name},
                    {"batch", batch},
                    {"one_rank_ms", median(one)},
                    {"two_ranks_ms", median(two)},
                    {"throughput", median(one) / median(two)},
                    {"budget", budget}});
  }
  return rows;
}

void print(const json& all) {
  auto number = [](const json& j, const char* key) { return j.value(key, 0.0); };
  if (all.contains("steps")) {
    std::printf("training step, one thread            ms    bare ms   ratio  budget\n");
    for (const json& r : all["steps"])
      std::printf("  %-30s %8.3f %9.3f %7.2f  %5.2f\n", r["name"].get<std::string>().c_str(),
                  number(r, "ms"), number(r, "bare_ms"), number(r, "ratio"), number(r, "budget"));
  }
  if (all.contains("overhead"))
    std::printf(
        "adding two tensors of 4 elements: %.3f us, with a graph node %.3f us  (budget 0.12, "
        "0.25)\n",
        number(all["overhead"], "add_4_us"), number(all["overhead"], "add_4_with_graph_us"));
  if (all.contains("ranks")) {
    std::printf("same global batch, one thread a rank  one rank  two ranks  throughput  budget\n");
    for (const json& r : all["ranks"])
      std::printf("  %-28s bs%-4d %8.3f ms %7.3f ms %8.2fx %9.2fx\n",
                  r["name"].get<std::string>().c_str(), r["batch"].get<int>(),
                  number(r, "one_rank_ms"), number(r, "two_ranks_ms"), number(r, "throughput"),
                  number(r, "budget"));
  }
  if (all.contains("all_reduce")) {
    std::printf("all-reduce between two ranks\n");
    for (const json& r : all["all_reduce"])
      std::printf("  %9lld bytes, %-6s memory %10.2f us\n", r["bytes"].get<long long>(),
                  r["memory"].get<std::string>().c_str(), number(r, "us"));
  }
  if (all.contains("bare")) {
    std::printf(
        "bare products on oneDNN, one thread (to expect: 85-97 GFLOP/s on an AVX2 core, 233-270 on "
        "AVX-512)\n");
    for (const json& r : all["bare"])
      std::printf("  %-26s %-44s %9.1f us %7.1f GFLOP/s\n", r["case"].get<std::string>().c_str(),
                  r["product"].get<std::string>().c_str(), number(r, "us"), number(r, "gflops"));
  }
}

}  // namespace

int main(int argc, char** argv) try {
  CLI::App app{"Times Lockstep beside the bare products it is made of."};
  bool as_json = false;
  std::string what = "all", name, only;
  int64_t batch = 128;
  app.add_flag("--json", as_json, "print JSON");
  app.add_option("what", what, "all, steps, bare, overhead, ranks or all-reduce")
      ->check(CLI::IsMember({"all", "steps", "bare", "overhead", "ranks", "all-reduce"}));
  app.add_option("--only", only, "steps whose names contain this");
  app.add_option("--rank-case", name, "what the ranks run that this program starts")->group("");
  app.add_option("--batch", batch, "")->group("");
  CLI11_PARSE(app, argc, argv);
  set_num_threads(1);
  if (!name.empty()) {
    const json result = name == "all-reduce" ? all_reduce_case() : rank_case(name, batch);
    if (dist::default_group().is_main()) std::printf("%s\n", result.dump().c_str());
    return 0;
  }
  const bool all = what == "all";
  json result;
  if (all || what == "steps") result["steps"] = steps(only);
  if (all || what == "overhead") result["overhead"] = overhead();
  if (all || what == "ranks") result["ranks"] = ranks();
  if (all || what == "all-reduce") result["all_reduce"] = on_ranks(2, "--rank-case all-reduce");
  if (all || what == "bare") result["bare"] = products();
  if (as_json)
    std::printf("%s\n", result.dump(2).c_str());
  else
    print(result);
} catch (const std::exception& e) {
  std::fprintf(stderr, "lockstep-bench: %s\n", e.what());
  return 1;
}
