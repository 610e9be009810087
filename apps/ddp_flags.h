// The flags of distributed training, as the demos share them: what dist::init and
// DistributedDataParallel take, under --ddp_... Every flag is spelled with underscores or hyphens.
//
//   DdpFlags ddp;
//   ddp.add_to(app);
//   ...
//   auto group = dist::init(ddp.init());
//   dist::DistributedDataParallel net{Net{}, group, ddp.options};
#pragma once

#include <algorithm>
#include <string>

#include <CLI/CLI.hpp>

#include <lockstep/distributed/data_parallel.h>

/// "--ddp-timeout,--ddp_timeout" for "ddp_timeout".
inline std::string spellings(const std::string& name) {
  std::string hyphens = name;
  std::replace(hyphens.begin(), hyphens.end(), '_', '-');
  return "--" + hyphens + ",--" + name;
}

/// An option that is on or off: --name, --name true, --name false.
inline void add_switch(CLI::App& app, const std::string& name, bool& value,
                       const std::string& description) {
  const auto set = [&value](const CLI::results_t& given) {
    const bool alone = given[0].empty() || given[0] == "{}";  // CLI11 stands in for no word so
    if (alone) value = true;
    return alone || CLI::detail::lexical_cast(given[0], value);
  };
  app.add_option(spellings(name), set,
                 description + (value ? "; on by default" : "; off by default"))
      ->expected(0, 1)
      ->type_name("[true|false]");
}

struct DdpFlags {
  std::string backend;
  double timeout = 1800;  // seconds
  lockstep::dist::DistributedDataParallelOptions options = {};

  void add_to(CLI::App& app) {
    app.add_option(spellings("ddp_backend"), backend,
                   "how ranks communicate, e.g. shm; by default the best that serves all");
    app.add_option(spellings("ddp_timeout"), timeout, "seconds until a collective gives up")
        ->check(CLI::PositiveNumber)
        ->capture_default_str();
    app.add_option(spellings("ddp_bucket_cap_mb"), options.bucket_cap_mb,
                   "MiB of gradients that are reduced at a time")
        ->check(CLI::PositiveNumber)
        ->capture_default_str();
    add_switch(app, "ddp_find_unused_parameters", options.find_unused_parameters,
               "let parameters stay without gradient on some ranks");
    add_switch(app, "ddp_broadcast_buffers", options.broadcast_buffers,
               "send rank 0's buffers with every synchronised backward");
  }

  lockstep::dist::InitOptions init() const {
    using Seconds = std::chrono::duration<double>;
    return {.backend = backend,
            .timeout =
                std::chrono::ceil<lockstep::dist::Milliseconds>(Seconds(std::min(timeout, 1e9)))};
  }
};

/// Parses, or ends the program: with 0 after --help, with 2 after a usage error.
inline void parse_or_exit(CLI::App& app, int argc, char** argv) {
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    std::exit(app.exit(e) == 0 ? 0 : 2);
  }
}
