// run_ranks: real processes for a test. Each rank is this test program again, running one test case
// that is skipped otherwise (TEST_CASE("rank: ..." * doctest::skip())), with the launch variables
// of its rank. A hang is a failure: at the deadline what still runs is killed and reported as such.
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

extern char** environ;

namespace ranks {

// Sanitizers slow everything down.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr int kPatience = 10;
#else
inline constexpr int kPatience = 2;  // and so do machines with much else to do
#endif

struct Ended {
  int rank = 0;
  int code = -1;   // exit code
  int signal = 0;  // that ended it
  bool hung = false;
  double seconds = 0;
  std::string output;  // stdout and stderr
};

struct Options {
  double deadline = 20;  // seconds
  std::map<std::string, std::string> variables = {};
  std::map<int, std::map<std::string, std::string>> of_rank = {};  // on top, by rank
  std::vector<int> only = {};                                      // start these ranks alone
};

inline double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// Throws with `text` unless it holds; for code of ranks, which may run in threads.
inline void require(bool holds, const std::string& text) {
  if (!holds) throw std::runtime_error(text);
}

/// Throws where what began at `begin` (a time of now()) took too long.
inline void below(double begin, double seconds, const std::string& what) {
  const double took = now() - begin;
  require(took < seconds * kPatience, what + " took " + std::to_string(took) + " s");
}

/// The parent's environment without any launcher's variables, and with these.
inline std::vector<std::string> environment(const std::map<std::string, std::string>& more) {
  std::vector<std::string> all;
  for (char** e = environ; *e; ++e) {
    const std::string name = std::string(*e).substr(0, std::string(*e).find('='));
    const bool launch = name == "RANK" || name == "WORLD_SIZE" || name.starts_with("LOCAL_") ||
                        name.starts_with("MASTER_") || name.starts_with("LOCKSTEP_") ||
                        name.starts_with("OMPI_") || name.starts_with("PMI_") ||
                        name.starts_with("SLURM_") || name.starts_with("TORCHELASTIC_");
    if (!launch && !more.contains(name)) all.push_back(*e);
  }
  for (const auto& [name, value] : more) all.push_back(name + "=" + value);
  return all;
}

/// Starts a program with its output going to the file `output`, in an environment of its own.
inline pid_t start(const std::vector<std::string>& command, int output,
                   const std::map<std::string, std::string>& variables) {
  std::vector<char*> arguments, environment_;
  for (const std::string& a : command) arguments.push_back(const_cast<char*>(a.c_str()));
  arguments.push_back(nullptr);
  const std::vector<std::string> all = environment(variables);
  for (const std::string& e : all) environment_.push_back(const_cast<char*>(e.c_str()));
  environment_.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, output, 1);
  posix_spawn_file_actions_adddup2(&actions, output, 2);
  pid_t pid = -1;
  const int error =
      posix_spawnp(&pid, arguments[0], &actions, nullptr, arguments.data(), environment_.data());
  posix_spawn_file_actions_destroy(&actions);
  require(error == 0, std::string("cannot start ") + command[0] + ": " + std::strerror(error));
  return pid;
}

inline std::string read_all(int file) {
  std::string text;
  char buffer[4096];
  for (off_t at = 0;;) {
    const ssize_t n = pread(file, buffer, sizeof buffer, at);
    if (n <= 0) return text;
    text.append(buffer, static_cast<size_t>(n));
    at += n;
  }
}

/// Waits for a process; kills it at the deadline (a time of now()).
inline Ended wait_for(pid_t pid, double deadline) {
  Ended e;
  const double begin = now();
  int status = 0;
  pid_t got = 0;
  while ((got = waitpid(pid, &status, WNOHANG)) == 0) {
    if (now() > deadline) {
      e.hung = true;
      kill(pid, SIGKILL);
      got = waitpid(pid, &status, 0);
      break;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  if (got == pid && WIFEXITED(status)) e.code = WEXITSTATUS(status);
  if (got == pid && WIFSIGNALED(status)) e.signal = WTERMSIG(status);
  e.seconds = now() - begin;
  return e;
}

/// Several processes may write to it: each write goes to its end.
inline int new_file() {
  const int file = memfd_create("output", MFD_CLOEXEC);
  fcntl(file, F_SETFL, O_APPEND);
  return file;
}

inline std::atomic<int> runs = 0;
inline std::string run_id_of(int run) {
  return "test-" + std::to_string(getpid()) + "-" + std::to_string(run);
}
inline std::string next_run_id() { return run_id_of(runs++); }

inline std::vector<Ended> run_ranks(int size, const std::string& test_case,
                                    const Options& options = {}) {
  const std::string run_id = next_run_id();
  const std::string self = std::filesystem::read_symlink("/proc/self/exe");
  std::vector<int> started = options.only;
  for (int r = 0; options.only.empty() && r < size; ++r) started.push_back(r);
  std::vector<pid_t> pids;
  std::vector<int> files;
  const double begin = now();
  for (const int r : started) {
    std::map<std::string, std::string> variables{{"RANK", std::to_string(r)},
                                                 {"WORLD_SIZE", std::to_string(size)},
                                                 {"LOCAL_RANK", std::to_string(r)},
                                                 {"LOCAL_WORLD_SIZE", std::to_string(size)},
                                                 {"TORCHELASTIC_RUN_ID", run_id}};
    for (const auto& [name, value] : options.variables) variables[name] = value;
    if (const auto own = options.of_rank.find(r); own != options.of_rank.end())
      for (const auto& [name, value] : own->second) variables[name] = value;
    files.push_back(new_file());
    pids.push_back(start({self, "--test-case=" + test_case, "--no-skip"}, files.back(), variables));
  }
  std::vector<Ended> ended(started.size());
  for (size_t i = 0; i < started.size(); ++i) {
    ended[i] = wait_for(pids[i], begin + options.deadline * kPatience);
    ended[i].rank = started[i];
    ended[i].output = read_all(files[i]);
    close(files[i]);
  }
  return ended;
}

/// All ended with code 0; what they said otherwise.
inline std::string failures(const std::vector<Ended>& ended) {
  std::string text;
  for (const Ended& e : ended)
    if (e.hung || e.code != 0 || e.output.find("test cases: 0 ") != std::string::npos)
      text += "rank " + std::to_string(e.rank) + (e.hung ? " hung" : "") + ", code " +
              std::to_string(e.code) + ", signal " + std::to_string(e.signal) + ":\n" + e.output +
              "\n";
  return text;
}

inline int open_descriptors() {
  int n = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd"))
    ++n;
  return n;
}

/// Whether the meeting point of a job, or a socket named after it, is still listed.
inline bool is_listed(const std::string& meeting_point) {
  std::ifstream sockets("/proc/net/unix");
  for (std::string line; std::getline(sockets, line);)
    if (line.find("@" + meeting_point) != std::string::npos) return true;
  return false;
}

}  // namespace ranks
