// lockstep-run: starts a program as several ranks on this host.
//
//   lockstep-run -n 4 ./train --lr 0.1
//
// This file is the command line; the work is distributed/launcher.h's.
#include <CLI/CLI.hpp>

#include <cstdio>
#include <memory>

#include <lockstep/distributed/launch_plan.h>
#include <lockstep/tensor/error.h>

namespace {
struct Help : CLI::Formatter {
  std::string make_usage(const CLI::App*, std::string) const override {
    return "Usage: lockstep-run [options] program [arguments]\n";
  }
};
}  // namespace

int main(int argc, char** argv) {
  constexpr int kUsage = 2;
  lockstep::dist::LaunchOptions options;
  std::string ranks = "1";

  CLI::App app("Starts a program as several ranks on this host, and looks after them.",
               "lockstep-run");
  app.formatter(std::make_shared<Help>());
  app.prefix_command();
  app.add_option("-n,--nproc-per-node", ranks,
                 "ranks to start: a number, or auto for one per processor [1]");
  app.add_flag("--prefix,!--no-prefix", options.prefix, "[rank] before each line of output [on]");
  app.add_option("--log-dir", options.log_dir,
                 "also write each rank's output to DIR/attempt_0/rank_R.{out,err}");
  app.add_option("--filter-ranks", options.filter_ranks,
                 "show the output of these ranks only, e.g. 0,2")
      ->delimiter(',')
      ->allow_extra_args(false);
  app.add_option("--grace", options.grace,
                 "seconds that ranks have to end before they are killed [5]")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--master-port", options.master_port,
                 "MASTER_PORT for the ranks; 0: a free one [0]")
      ->check(CLI::Range(0, 65535));
  app.add_flag("--dry-run", options.dry_run,
               "print each rank's variables and command, and start nothing");
  try {
    app.parse(argc, argv);
    options.command = app.remaining();
    if (!options.command.empty() && options.command[0] == "--")
      options.command.erase(options.command.begin());
    if (options.command.empty()) throw CLI::RequiredError("program");
    if (options.command[0][0] == '-') throw CLI::ExtrasError({options.command[0]});
    if (ranks == "auto")
      options.ranks = lockstep::dist::processors();
    else if (!CLI::detail::lexical_cast(ranks, options.ranks) || options.ranks < 1 ||
             options.ranks > 1024)
      throw CLI::ValidationError("-n", "needs a number of 1 .. 1024 or auto, got " + ranks);
    for (const int r : options.filter_ranks)
      if (r < 0 || r >= options.ranks)
        throw CLI::ValidationError("--filter-ranks", "has no rank " + std::to_string(r));
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? 0 : kUsage;
  }
  try {
    return lockstep::dist::launch(options);
  } catch (const lockstep::Error& e) {
    std::fprintf(stderr, "lockstep-run: %s\n", e.what());
    return 127;
  }
}
