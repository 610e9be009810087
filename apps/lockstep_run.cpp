// lockstep-run: starts a program as several ranks.
//
//   lockstep-run -n 4 ./train --lr 0.1
//
// This file reads the command line; distributed/launch/launcher.h does the work. Long options may
// also be written with underscores, as torchrun's are.
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cstdio>
#include <memory>

#include <lockstep/distributed/launch/cuda_devices.h>
#include <lockstep/distributed/launch/descriptors.h>
#include <lockstep/distributed/launch/launcher.h>
#include <lockstep/tensor/error.h>

namespace {

using namespace lockstep::dist;

constexpr int kUsage = 2, kCannotStart = 127;
constexpr int kPortOfSeveralNodes = 29400;

// The usage line, and of each option the spelling with hyphens only.
struct Help : CLI::Formatter {
  std::string make_usage(const CLI::App*, std::string) const override {
    return "Usage: lockstep-run [options] program [arguments]\n";
  }
  std::string make_option_name(const CLI::Option* option, bool) const override {
    std::string names;
    for (const std::string& name : CLI::detail::split(option->get_name(false, true), ','))
      if (name.find('_') == std::string::npos) names += (names.empty() ? "" : ",") + name;
    return names;
  }
};

// "-n,--nproc-per-node" and the same with underscores.
std::string both_spellings(const std::string& names) {
  std::string all = names;
  for (std::string name : CLI::detail::split(names, ',')) {
    const auto is_inner = [&](char& c) { return c == '-' && &c >= &name[2]; };
    const std::string before = name;
    for (char& c : name)
      if (is_inner(c)) c = '_';
    if (name != before) all += "," + name;
  }
  return all;
}

int number_of_ranks(const std::string& text) {
  if (text == "auto") return static_cast<int>(allowed_processors().size());
  if (text == "gpu") {
    const int devices = cuda_devices();
    if (devices == 0)
      throw CLI::ValidationError(
          "-n",
          "gpu needs a CUDA device, and this process sees none (is there a driver? what does "
          "CUDA_VISIBLE_DEVICES say?)");
    return devices;
  }
  int ranks = 0;
  if (!CLI::detail::lexical_cast(text, ranks) || ranks < 1 || ranks > 1024)
    throw CLI::ValidationError("-n", "needs a number of 1 .. 1024, auto or gpu, got " + text);
  return ranks;
}

LaunchOptions parse(CLI::App& app, int argc, char** argv) {
  LaunchOptions options;
  std::string ranks = "1", bind = "none";
  int tee = 3;
  const auto add = [&](const char* names, auto& value, const char* help) {
    return app.add_option(both_spellings(names), value, help);
  };
  add("-n,--nproc-per-node", ranks,
      "ranks to start: a number, auto for one per processor, gpu for one per CUDA device [1]");
  add("--nnodes", options.nodes, "hosts; each needs a lockstep-run of its own [1]")
      ->check(CLI::Range(1, 65536));
  auto* node_rank = add("--node-rank", options.node_rank, "which of the hosts this is, from 0");
  add("--master-addr", options.master_addr, "the host of rank 0 [this one]");
  auto* port = add("--master-port", options.master_port,
                   "MASTER_PORT; 0: a free one [0; with several hosts 29400]")
                   ->check(CLI::Range(0, 65535));
  add("--run-id,--rdzv-id", options.run_id,
      "tells this job from others [new; with several hosts made from address and port]");
  bool standalone = false;
  app.add_flag("--standalone", standalone,
               "one host, a free port and a new run id, which is the default");
  add("--max-restarts", options.max_restarts,
      "how often all ranks start again after one has failed [0]")
      ->check(CLI::NonNegativeNumber);
  add("--bind", bind,
      "bind ranks to processors: none, core (an equal share each) or numa (a memory node's) [none]")
      ->check(CLI::IsMember({"none", "core", "numa"}));
  app.add_flag("--prefix,!--no-prefix,!--no_prefix", options.prefix,
               "[rank] before each line of output [on]");
  add("--filter-ranks", options.filter_ranks, "show the output of these ranks only, e.g. 0,2")
      ->delimiter(',')
      ->allow_extra_args(false);
  auto* log_dir = add("--log-dir", options.log_dir,
                      "keep each rank's output in DIR/attempt_K/rank_R.{out,err}");
  add("--tee", tee, "with --log-dir, show as well: 0 nothing, 1 stdout, 2 stderr, 3 both [3]")
      ->check(CLI::Range(0, 3))
      ->needs(log_dir);
  add("--grace", options.grace, "seconds that ranks have to end before they are killed [5]")
      ->check(CLI::NonNegativeNumber);
  app.add_flag(both_spellings("--dry-run"), options.dry_run,
               "print each rank's variables and command, and start nothing");

  app.parse(argc, argv);
  options.command = app.remaining();
  if (!options.command.empty() && options.command[0] == "--")
    options.command.erase(options.command.begin());
  if (options.command.empty()) throw CLI::RequiredError("program");
  if (options.command[0][0] == '-') throw CLI::ExtrasError({options.command[0]});
  options.ranks = number_of_ranks(ranks);
  options.bind = bind == "core" ? Bind::core : bind == "numa" ? Bind::numa : Bind::none;
  options.show_out = tee & 1;
  options.show_err = tee & 2;
  if (standalone && (options.nodes > 1 || port->count() > 0))
    throw CLI::ValidationError("--standalone", "is one host with a free port");
  if (options.nodes > 1 && node_rank->count() == 0)
    throw CLI::ValidationError("--nnodes", "needs --node-rank with it");
  if (options.nodes > 1 && port->count() == 0) options.master_port = kPortOfSeveralNodes;
  return options;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Starts a program as several ranks, and looks after them.", "lockstep-run");
  app.formatter(std::make_shared<Help>());
  app.prefix_command();
  try {
    fill_standard_descriptors();
    return launch(parse(app, argc, argv));
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? 0 : kUsage;
  } catch (const lockstep::ValueError& e) {
    std::fprintf(stderr, "lockstep-run: %s\n", e.what());
    return kUsage;
  } catch (const lockstep::Error& e) {
    std::fprintf(stderr, "lockstep-run: %s\n", e.what());
    return kCannotStart;
  }
}
