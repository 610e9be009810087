// The launcher's event loop.
#include <lockstep/distributed/launch/attempt.h>

#include <poll.h>
#include <sys/wait.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <list>
#include <optional>

#include <lockstep/distributed/launch/rank_process.h>
#include <lockstep/tensor/error.h>

namespace lockstep::dist {

namespace {

using Clock = std::chrono::steady_clock;

class Attempt {
 public:
  Attempt(LaunchJob& job, int number) : job_(job) {
    for (const RankPlan& plan : plan_ranks(job.options, job.plan, number))
      ranks_.emplace_back(job, plan, number);
  }

  int run() {
    while (!std::all_of(ranks_.begin(), ranks_.end(),
                        [](const RankProcess& r) { return r.is_over(); }))
      turn();
    return code_;
  }

 private:
  void turn();
  void handle_signals();
  void reap();
  void fail_with(const RankProcess& rank, int status);
  void stop(int signal);
  void signal_all(int signal);

  LaunchJob& job_;
  std::list<RankProcess> ranks_;
  int code_ = 0;
  bool stopping_ = false;
  int told_by_ = 0;  // the signal that we were told to end with
  std::optional<Clock::time_point> kill_at_;
};

void Attempt::turn() {
  std::vector<pollfd> polled{{job_.signals.fd(), POLLIN, 0}};
  // Where our own output is congested its sources wait, and so do the ranks; signals and deaths do
  // not.
  for (const Outlet* outlet : {&job_.out, &job_.err})
    if (outlet->congested()) polled.push_back({outlet->fd(), POLLOUT, 0});
  const size_t first_source = polled.size();
  std::vector<LineOutput*> sources;
  for (RankProcess& r : ranks_)
    for (LineOutput& output : r.outputs())
      if (output.pipe() >= 0 && output.has_room()) {
        polled.push_back({output.pipe(), POLLIN, 0});
        sources.push_back(&output);
      }
  int timeout = -1;
  if (kill_at_) {
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(*kill_at_ - Clock::now()).count();
    timeout = static_cast<int>(std::max<long>(left, 0));
  }
  if (poll(polled.data(), polled.size(), timeout) >= 0) {
    job_.out.flush();
    job_.err.flush();
    for (size_t i = 0; i < sources.size(); ++i)
      if (polled[first_source + i].revents && !sources[i]->pump()) sources[i]->finish();
    if (polled[0].revents) handle_signals();
  }
  if (kill_at_ && Clock::now() >= *kill_at_) {
    kill_at_.reset();
    signal_all(SIGKILL);
  }
}

void Attempt::handle_signals() {
  bool deaths = false;
  while (const auto signal = job_.signals.next()) {
    if (*signal == SIGCHLD) {
      deaths = true;
    } else if (!LaunchSignals::ends_the_job(*signal)) {
      signal_all(*signal);
    } else if (told_by_) {
      signal_all(SIGKILL);  // told twice
    } else {
      told_by_ = *signal;
      job_.interrupted = true;
      stop(*signal);
    }
  }
  if (deaths) reap();
}

void Attempt::reap() {
  std::vector<std::pair<RankProcess*, int>> dead;  // with its status
  for (RankProcess& r : ranks_)
    if (r.has_died()) dead.emplace_back(&r, r.bury());
  // Nobody says in which order they died. An exit code may be the answer to another rank's death, a
  // signal hardly is.
  std::stable_partition(dead.begin(), dead.end(),
                        [](const auto& d) { return WIFSIGNALED(d.second); });
  for (const auto& [rank, status] : dead)
    if (status != 0 && code_ == 0) fail_with(*rank, status);
}

void Attempt::fail_with(const RankProcess& rank, int status) {
  code_ = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  std::string text = str_cat("lockstep-run: rank ", rank.rank(), " (pid ", rank.pid(), ") ");
  if (WIFSIGNALED(status))
    text +=
        str_cat("was killed by signal ", WTERMSIG(status), " (", strsignal(WTERMSIG(status)), ")");
  else
    text += str_cat("failed with exit code ", WEXITSTATUS(status));
  if (told_by_) text += str_cat(", after ", strsignal(told_by_), " to all ranks");
  text += '\n';
  // stderr's lines say more than stdout's, where there are any.
  const auto& outputs = rank.outputs();
  for (auto output = outputs.rbegin(); output != outputs.rend() && !told_by_; ++output) {
    const auto& lines = output->last_lines();
    if (lines.empty()) continue;
    text += "lockstep-run: its last lines:\n";
    for (size_t i = lines.size() > 10 ? lines.size() - 10 : 0; i < lines.size(); ++i)
      text += str_cat("  ", lines[i], "\n");
    break;
  }
  job_.err.put(text);
  if (!stopping_) stop(SIGTERM);
}

void Attempt::stop(int signal) {
  stopping_ = true;
  signal_all(signal);
  kill_at_ = Clock::now() + job_.options.grace_period();
}

void Attempt::signal_all(int signal) {
  for (const RankProcess& r : ranks_) r.send(signal);
}

}  // namespace

int run_attempt(LaunchJob& job, int attempt) { return Attempt(job, attempt).run(); }

}  // namespace lockstep::dist
