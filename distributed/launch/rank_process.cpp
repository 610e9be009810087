// RankProcess: fork and exec, signals and reaping of one rank.
#include <lockstep/distributed/launch/rank_process.h>

#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include <lockstep/tensor/error.h>

namespace lockstep::dist {

namespace {

// A file that takes a copy of one stream. Below the folder that the user named no symbolic link is
// followed: in a folder that others may write to, it could lead anywhere.
Fd open_log(const std::string& folder, int attempt, int rank, int stream) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  const std::string part = str_cat("attempt_", attempt);
  const std::string name = str_cat("rank_", rank, stream == STDOUT_FILENO ? ".out" : ".err");
  const Fd top(open(folder.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
  if (top) mkdirat(top.get(), part.c_str(), 0777);
  const Fd inner(openat(top.get(), part.c_str(), O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  // Without O_NONBLOCK a FIFO would wait for its reader.
  constexpr int kHow = O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;
  Fd log(inner ? openat(inner.get(), name.c_str(), kHow, 0666) : -1);
  const int code = errno;
  struct stat facts {};
  const bool is_file = log && fstat(log.get(), &facts) == 0 && S_ISREG(facts.st_mode);
  const char* why = log                                ? "it is no regular file"
                    : code == ELOOP || code == ENOTDIR ? "a symbolic link stands in its path"
                                                       : std::strerror(code);
  LOCKSTEP_CHECK(is_file, IoError, "launch: cannot write ", folder, "/", part, "/", name, ": ",
                 why);
  return log;
}

template <class... Parts>
[[noreturn]] void fail_to_start(const Parts&... what) {
  const int error = errno;
  const std::string_view hint = error == EMFILE || error == ENFILE
                                    ? "; each rank takes three descriptors, see ulimit -n"
                                : error == EAGAIN ? "; see ulimit -u, and the cgroup's pids.max"
                                                  : "";
  fail<DistError>("launch: ", what..., ": ", std::strerror(error), hint);
}

bool bind_to(const std::vector<int>& processors) {
  const int most = *std::max_element(processors.begin(), processors.end()) + 1;
  cpu_set_t* set = CPU_ALLOC(static_cast<size_t>(most));
  const size_t bytes = CPU_ALLOC_SIZE(static_cast<size_t>(most));
  CPU_ZERO_S(bytes, set);
  for (const int p : processors) CPU_SET_S(static_cast<size_t>(p), bytes, set);
  const bool bound = sched_setaffinity(0, bytes, set) == 0;
  CPU_FREE(set);
  return bound;
}

}  // namespace

RankProcess::RankProcess(LaunchJob& job, const RankPlan& plan, int attempt)
    : watchdog_(job.watchdog), rank_(plan.rank) {
  Fd streams[2];
  open_output(job, attempt, STDOUT_FILENO, &streams[0]);
  open_output(job, attempt, STDERR_FILENO, &streams[1]);
  int status[2];
  if (pipe2(status, O_CLOEXEC) != 0) fail_to_start("cannot make a pipe for rank ", rank_);
  const Fd from(status[0]);
  Fd to(status[1]);
  pid_ = fork();
  if (pid_ == 0) become(job, plan, streams, to.get());
  if (pid_ < 0) fail_to_start("cannot make a process for rank ", rank_);
  death_ = Fd(static_cast<int>(syscall(SYS_pidfd_open, pid_, 0)));
  to.reset();
  int error = 0;
  ssize_t n = 0;
  // At its end without an error number when the program has started.
  while ((n = read(from.get(), &error, sizeof error)) < 0 && errno == EINTR) {
  }
  if (n != sizeof error) return;
  kill_and_reap();
  errno = error;
  fail_to_start("cannot start ", job.options.command[0]);
}

RankProcess::~RankProcess() {
  if (pid_ > 0 && !over_) kill_and_reap();
}

void RankProcess::open_output(LaunchJob& job, int attempt, int stream, Fd* child_end) {
  const LaunchOptions& options = job.options;
  const bool out = stream == STDOUT_FILENO, logged = !options.log_dir.empty();
  const auto& chosen = options.filter_ranks;
  const bool show =
      (chosen.empty() || std::find(chosen.begin(), chosen.end(), rank_) != chosen.end()) &&
      (!logged || (out ? options.show_out : options.show_err));
  const bool terminal = isatty(stream) == 1;
  // Rank 0 writes to the terminal directly, so that a progress bar can redraw its line.
  if (rank_ == 0 && terminal && show && !logged) return;
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) fail_to_start("cannot make a pipe for rank ", rank_);
  Fd reading(ends[0]);
  *child_end = Fd(ends[1]);
  Fd log;
  if (logged) log = open_log(options.log_dir, attempt, rank_, stream);
  std::string prefix;
  if (options.prefix) {
    prefix = str_cat("[", rank_, "] ");
    if (terminal && !getenv("NO_COLOR"))
      prefix = str_cat("\033[", 31 + rank_ % 6, "m[", rank_, "]\033[0m ");
  }
  Outlet* shown = out ? &job.out : &job.err;
  outputs_.emplace_back(std::move(reading), show ? shown : nullptr, prefix, std::move(log));
}

// In the child: everything up to the program itself.
void RankProcess::become(const LaunchJob& job, const RankPlan& plan, const Fd (&streams)[2],
                         int status) const {
  setpgid(0, 0);
  watchdog_.announce();
  job.signals.restore();
  job.restore_limits();
  // A background group may not read the terminal, and only one rank can read the input at all.
  if (rank_ != 0 || isatty(STDIN_FILENO)) {
    const int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
    dup2(null, STDIN_FILENO);
  }
  for (int i = 0; i < 2; ++i)
    if (streams[i]) dup2(streams[i].get(), STDOUT_FILENO + i);
  for (const std::string& variable : plan.variables) {
    const size_t equals = variable.find('=');
    setenv(variable.substr(0, equals).c_str(), variable.c_str() + equals + 1, 1);
  }
  std::vector<char*> arguments;
  for (const std::string& a : job.options.command)
    arguments.push_back(const_cast<char*>(a.c_str()));
  arguments.push_back(nullptr);
  if (plan.processors.empty() || bind_to(plan.processors)) execvp(arguments[0], arguments.data());
  const int error = errno;
  [[maybe_unused]] const ssize_t n = write(status, &error, sizeof error);
  _exit(127);
}

void RankProcess::send(int signal) const {
  if (!over_) kill(-pid_, signal);
}

bool RankProcess::has_died() const {
  siginfo_t info{};
  return !over_ &&
         waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG | WNOWAIT) == 0 &&
         info.si_pid == pid_;
}

int RankProcess::kill_and_reap() {
  // Until the leader is reaped its process id cannot be reused, so the signal reaches this group only.
  kill(-pid_, SIGKILL);
  watchdog_.forget(pid_);
  int status = 0;
  while (waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
  }
  over_ = true;
  death_.reset();
  for (LineOutput& output : outputs_) output.finish();
  return status;
}

}  // namespace lockstep::dist
