// What the tests of lockstep-run share: launches in the foreground, with their exit code and output,
// and in the background, to be hurt while they run.
#pragma once

#include <doctest/doctest.h>

#include <regex>
#include <sstream>

#include "ranks.h"
#include "texts.h"

namespace launches {

using ranks::Ended;

inline std::string launcher() {
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe");
  return self.parent_path().parent_path() / "lockstep-run";
}

inline std::vector<std::string> command_line(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), launcher());
  return arguments;
}

inline Ended run(std::vector<std::string> arguments,
                 const std::map<std::string, std::string>& variables = {}) {
  const int file = ranks::new_file();
  const pid_t pid = ranks::start(command_line(std::move(arguments)), file, variables);
  Ended e = ranks::wait_for(pid, ranks::now() + 20 * ranks::kPatience);
  e.output = ranks::read_all(file);
  close(file);
  CHECK(!e.hung);
  return e;
}

// n ranks that each run a shell script.
inline Ended run_script(int n, const std::string& script, std::vector<std::string> options = {}) {
  options.insert(options.end(), {"-n", std::to_string(n), "sh", "-c", script});
  return run(options);
}

inline std::string sorted_lines(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  std::sort(lines.begin(), lines.end());
  std::string all;
  for (const std::string& line : lines) all += line + "\n";
  return all;
}

// Whether a process runs; a zombie that nobody reaps does not.
inline bool runs(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string stat;
  if (!std::getline(file, stat)) return false;
  return stat.substr(stat.rfind(')') + 2, 1) != "Z";
}

inline bool all_end(const std::vector<pid_t>& pids, double seconds) {
  const double deadline = ranks::now() + seconds * ranks::kPatience;
  for (;;) {
    bool any = false;
    for (const pid_t pid : pids) any |= runs(pid);
    if (!any || ranks::now() > deadline) return !any;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

// A launcher that runs in the background, and the numbers that its ranks have printed so far.
struct Background {
  int file = ranks::new_file();
  pid_t pid;
  mutable bool waited = false;

  Background(const Background&) = delete;
  Background& operator=(const Background&) = delete;
  Background(int n, const std::string& script, std::vector<std::string> options = {}) {
    options.insert(options.end(), {"-n", std::to_string(n), "sh", "-c", script});
    pid = ranks::start(command_line(options), file, {});
  }
  ~Background() {
    if (!waited) {
      kill(pid, SIGKILL);  // the ranks follow
      waitpid(pid, nullptr, 0);
    }
    close(file);
  }
  std::string output() const { return ranks::read_all(file); }
  void wait_until(const std::string& part, int times) const {
    const double deadline = ranks::now() + 10 * ranks::kPatience;
    for (;;) {
      const std::string text = output();
      int n = 0;
      for (size_t at = 0; (at = text.find(part, at)) != std::string::npos; ++at) ++n;
      if (n >= times) return;
      ranks::require(ranks::now() < deadline, "the ranks never said " + part + ": " + text);
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  }
  std::vector<pid_t> pids() const {
    const std::string text = output();
    const std::regex number("pid=([0-9]+)");
    std::vector<pid_t> all;
    for (std::sregex_iterator it(text.begin(), text.end(), number), end; it != end; ++it)
      all.push_back(std::stoi((*it)[1]));
    return all;
  }
  Ended wait() const {
    waited = true;
    return ranks::wait_for(pid, ranks::now() + 15 * ranks::kPatience);
  }
};

}  // namespace launches
