// The launcher's event loop.
#include <lockstep/distributed/launcher.h>

#include <fcntl.h>
#include <linux/close_range.h>
#include <poll.h>
#include <signal.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <optional>

#include <lockstep/distributed/launch_plan.h>
#include <lockstep/distributed/line_output.h>
#include <lockstep/distributed/watchdog.h>
#include <lockstep/tensor/error.h>

namespace lockstep::dist {

namespace {

using Clock = std::chrono::steady_clock;
constexpr int kForwarded[] = {SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2};

bool ends_the_job(int signal) { return signal != SIGUSR1 && signal != SIGUSR2; }

struct Rank {
  int rank = 0;
  pid_t pid = -1;
  bool over = false;
  std::vector<LineOutput> outputs;  // of those of stdout and stderr that come through us
};

class Launcher {
 public:
  explicit Launcher(const LaunchOptions& options)
      : options_(options), ranks_(static_cast<size_t>(options.ranks)) {}

  int run() {
    take_signals();
    watchdog_.emplace();
    const std::string run_id = make_run_id();
    ::setenv("LOCKSTEP_TOKEN", make_token().c_str(), 0);  // the user's own goes first
    for (int r = 0; r < options_.ranks; ++r) start(r, run_id);
    while (std::any_of(ranks_.begin(), ranks_.end(), [](const Rank& r) { return !r.over; })) turn();
    watchdog_.reset();
    return code_;
  }

 private:
  void take_signals();
  void start(int rank, const std::string& run_id);
  void open_output(Rank& rank, int stream, Fd* child_end);
  [[noreturn]] void become(const Rank& rank, const Fd (&streams)[2], int status,
                           const std::string& run_id);
  void turn();
  void handle_signals();
  void reap();
  void bury(Rank& rank);
  void fail_with(const Rank& rank, int status);
  void stop(int signal);
  void signal_all(int signal);

  const LaunchOptions& options_;
  std::vector<Rank> ranks_;
  std::optional<Watchdog> watchdog_;
  sigset_t caught_, before_;
  Fd signals_;
  int code_ = 0;
  bool stopping_ = false;
  int told_by_ = 0;  // the signal that we were told to end with
  std::optional<Clock::time_point> kill_at_;
};

void Launcher::take_signals() {
  // What our caller left open is not the ranks' business.
  close_range(3, ~0U, CLOSE_RANGE_CLOEXEC);
  signal(SIGPIPE, SIG_IGN);
  sigemptyset(&caught_);
  sigaddset(&caught_, SIGCHLD);
  for (const int s : kForwarded) sigaddset(&caught_, s);
  sigprocmask(SIG_BLOCK, &caught_, &before_);
  signals_ = Fd(signalfd(-1, &caught_, SFD_CLOEXEC | SFD_NONBLOCK));
  LOCKSTEP_CHECK(signals_, DistError, "launch: cannot receive signals: ", std::strerror(errno));
}

void Launcher::open_output(Rank& rank, int stream, Fd* child_end) {
  const auto& shown = options_.filter_ranks;
  const bool show =
      shown.empty() || std::find(shown.begin(), shown.end(), rank.rank) != shown.end();
  const bool terminal = isatty(stream) == 1;
  // Rank 0 keeps the terminal: a progress bar redraws its line there.
  if (rank.rank == 0 && terminal && show && options_.log_dir.empty()) return;
  int ends[2];
  LOCKSTEP_CHECK(pipe2(ends, O_CLOEXEC) == 0, DistError,
                 "launch: cannot make a pipe: ", std::strerror(errno));
  *child_end = Fd(ends[1]);
  Fd log;
  if (!options_.log_dir.empty()) {
    const std::string folder = options_.log_dir + "/attempt_0";
    std::error_code error;
    std::filesystem::create_directories(folder, error);
    const std::string path =
        str_cat(folder, "/rank_", rank.rank, stream == STDOUT_FILENO ? ".out" : ".err");
    log = Fd(open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
    LOCKSTEP_CHECK(log, IoError, "launch: cannot write ", path, ": ", std::strerror(errno));
  }
  std::string prefix;
  if (options_.prefix) {
    prefix = str_cat("[", rank.rank, "] ");
    if (terminal && !getenv("NO_COLOR"))
      prefix = str_cat("\033[", 31 + rank.rank % 6, "m[", rank.rank, "]\033[0m ");
  }
  rank.outputs.emplace_back(Fd(ends[0]), show ? stream : -1, prefix, std::move(log));
}

void Launcher::start(int number, const std::string& run_id) {
  Rank& rank = ranks_[static_cast<size_t>(number)];
  rank.rank = number;
  Fd streams[2];
  open_output(rank, STDOUT_FILENO, &streams[0]);
  open_output(rank, STDERR_FILENO, &streams[1]);
  int status[2];
  LOCKSTEP_CHECK(pipe2(status, O_CLOEXEC) == 0, DistError,
                 "launch: cannot make a pipe: ", std::strerror(errno));
  const Fd from(status[0]);
  Fd to(status[1]);
  rank.pid = fork();
  if (rank.pid == 0) become(rank, streams, to.get(), run_id);
  to.reset();
  int error = rank.pid < 0 ? errno : 0;
  // Ends without a word when the program has started.
  while (rank.pid > 0 && read(from.get(), &error, sizeof error) < 0 && errno == EINTR) {
  }
  if (error == 0) return;
  for (size_t r = static_cast<size_t>(number); r < ranks_.size(); ++r) ranks_[r].over = true;
  if (rank.pid > 0) {
    watchdog_->forget(rank.pid);
    waitpid(rank.pid, nullptr, 0);
  }
  signal_all(SIGKILL);
  fail<DistError>("launch: cannot start ", options_.command[0], ": ", std::strerror(error));
}

// In the child: everything up to the program itself.
void Launcher::become(const Rank& rank, const Fd (&streams)[2], int status,
                      const std::string& run_id) {
  setpgid(0, 0);
  watchdog_->announce(getpid());
  sigprocmask(SIG_SETMASK, &before_, nullptr);
  signal(SIGPIPE, SIG_DFL);
  // A background group may not read the terminal, and only one rank can read the input at all.
  if (rank.rank != 0 || isatty(STDIN_FILENO)) {
    const int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
    dup2(null, STDIN_FILENO);
  }
  for (int i = 0; i < 2; ++i)
    if (streams[i]) dup2(streams[i].get(), STDOUT_FILENO + i);
  for (const std::string& variable : rank_variables(options_, rank.rank, run_id)) {
    const size_t equals = variable.find('=');
    setenv(variable.substr(0, equals).c_str(), variable.c_str() + equals + 1, 1);
  }
  std::vector<char*> arguments;
  for (const std::string& a : options_.command) arguments.push_back(const_cast<char*>(a.c_str()));
  arguments.push_back(nullptr);
  execvp(arguments[0], arguments.data());
  const int error = errno;
  [[maybe_unused]] const ssize_t n = write(status, &error, sizeof error);
  _exit(127);
}

void Launcher::turn() {
  std::vector<pollfd> polled{{signals_.get(), POLLIN, 0}};
  std::vector<LineOutput*> sources;
  // Where our own output is congested its sources wait, and so do the ranks; signals and deaths do
  // not.
  bool congested[3] = {};
  for (const int stream : {STDOUT_FILENO, STDERR_FILENO}) {
    pollfd p{stream, POLLOUT, 0};
    congested[stream] = poll(&p, 1, 0) == 0;
    if (congested[stream]) polled.push_back(p);
  }
  const size_t first_source = polled.size();
  for (Rank& r : ranks_)
    for (LineOutput& output : r.outputs)
      if (output.pipe() >= 0 && !(output.to() >= 0 && congested[output.to()])) {
        polled.push_back({output.pipe(), POLLIN, 0});
        sources.push_back(&output);
      }
  int timeout = -1;
  if (kill_at_) {
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(*kill_at_ - Clock::now()).count();
    timeout = static_cast<int>(std::max<long>(left, 0));
  }
  poll(polled.data(), polled.size(), timeout);
  for (size_t i = 0; i < sources.size(); ++i)
    if (polled[first_source + i].revents && !sources[i]->pump()) sources[i]->finish();
  if (polled[0].revents) handle_signals();
  if (kill_at_ && Clock::now() >= *kill_at_) {
    kill_at_.reset();
    signal_all(SIGKILL);
  }
}

void Launcher::handle_signals() {
  signalfd_siginfo info;
  bool deaths = false;
  while (read(signals_.get(), &info, sizeof info) == sizeof info) {
    const int signal = static_cast<int>(info.ssi_signo);
    if (signal == SIGCHLD) {
      deaths = true;
      continue;
    }
    if (!ends_the_job(signal))
      signal_all(signal);
    else if (told_by_)
      signal_all(SIGKILL);  // told twice
    else {
      told_by_ = signal;
      stop(signal);
    }
  }
  if (deaths) reap();
}

void Launcher::reap() {
  for (Rank& r : ranks_) {
    if (r.over) continue;
    siginfo_t info{};
    if (waitid(P_PID, static_cast<id_t>(r.pid), &info, WEXITED | WNOHANG | WNOWAIT) == 0 &&
        info.si_pid == r.pid)
      bury(r);
  }
}

void Launcher::bury(Rank& rank) {
  // While the dead leader is not reaped its number cannot name anybody else's group.
  kill(-rank.pid, SIGKILL);
  watchdog_->forget(rank.pid);
  int status = 0;
  waitpid(rank.pid, &status, 0);
  rank.over = true;
  for (LineOutput& output : rank.outputs) output.finish();
  if (status != 0 && code_ == 0) fail_with(rank, status);
}

void Launcher::fail_with(const Rank& rank, int status) {
  code_ = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  std::string text = str_cat("lockstep-run: rank ", rank.rank, " (pid ", rank.pid, ") ");
  if (WIFSIGNALED(status))
    text +=
        str_cat("was killed by signal ", WTERMSIG(status), " (", strsignal(WTERMSIG(status)), ")");
  else
    text += str_cat("failed with exit code ", WEXITSTATUS(status));
  if (told_by_) text += str_cat(", after ", strsignal(told_by_), " to all ranks");
  text += '\n';
  // stderr's lines say more than stdout's, where there are any.
  for (auto output = rank.outputs.rbegin(); output != rank.outputs.rend() && !told_by_; ++output) {
    const auto& lines = output->last_lines();
    if (lines.empty()) continue;
    text += "lockstep-run: its last lines:\n";
    for (size_t i = lines.size() > 10 ? lines.size() - 10 : 0; i < lines.size(); ++i)
      text += str_cat("  ", lines[i], "\n");
    break;
  }
  write_all(STDERR_FILENO, text);
  if (!stopping_) stop(SIGTERM);
}

void Launcher::stop(int signal) {
  stopping_ = true;
  signal_all(signal);
  kill_at_ = Clock::now() + std::chrono::microseconds(static_cast<int64_t>(options_.grace * 1e6));
}

void Launcher::signal_all(int signal) {
  for (const Rank& r : ranks_)
    if (!r.over) kill(-r.pid, signal);
}

}  // namespace

int launch(const LaunchOptions& options) {
  LOCKSTEP_CHECK(!options.command.empty(), ValueError, "launch: names no program");
  LOCKSTEP_CHECK(options.ranks >= 1, ValueError, "launch: needs at least one rank, got ",
                 options.ranks);
  LaunchOptions filled = options;
  if (filled.master_port == 0) filled.master_port = free_port();
  if (options.dry_run) {
    write_all(STDOUT_FILENO, plan_text(filled, make_run_id()));
    return 0;
  }
  return Launcher(filled).run();
}

}  // namespace lockstep::dist
