// lockstep-bench: times training steps beside their bare products, the cost of small ops, and two
// ranks against one. All figures of one run belong together; compare ratios, since machines differ
// and drift.
#include <cstdio>
#include <string>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "bare.h"
#include "distributed.h"
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
  print_distributed(all);
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
  std::string what = "all", name, only, backend;
  int64_t batch = 128;
  app.add_flag("--json", as_json, "print JSON");
  const std::vector<std::string> parts{"steps",      "overhead", "bare",    "ranks",
                                       "all-reduce", "growth",   "wrapper", "start-up"};
  app.add_option("what", what,
                 "all, or one of: steps, overhead, bare (one rank); ranks, all-reduce, growth, "
                 "wrapper, start-up (several)")
      ->check([&](const std::string& given) {
        const bool known =
            given == "all" || std::find(parts.begin(), parts.end(), given) != parts.end();
        return known ? std::string() : "no part is called " + given;
      });
  app.add_option("--only", only, "steps whose names contain this");
  app.add_option("--rank-case", name, "what the ranks run that this program starts")->group("");
  app.add_option("--batch", batch, "")->group("");
  app.add_option("--backend", backend, "")->group("");
  CLI11_PARSE(app, argc, argv);
  set_num_threads(1);
  if (!name.empty()) {
    const json result = rank_case(name, batch, backend);
    if (dist::default_group().is_main()) std::printf("%s\n", result.dump().c_str());
    return 0;
  }
  const bool all = what == "all";
  json result;
  if (all || what == "steps") result["steps"] = steps(only);
  if (all || what == "overhead") result["overhead"] = overhead();
  if (all || what == "ranks") result["ranks"] = ranks();
  if (all || what == "all-reduce") result["all_reduce"] = all_reduce();
  if (all || what == "growth") result["growth"] = growth();
  if (all || what == "wrapper") result["wrapper"] = wrapper();
  if (all || what == "start-up") result["start_up"] = start_up();
  if (all || what == "bare") result["bare"] = products();
  if (as_json)
    std::printf("%s\n", result.dump(2).c_str());
  else
    print(result);
} catch (const std::exception& e) {
  std::fprintf(stderr, "lockstep-bench: %s\n", e.what());
  return 1;
}
