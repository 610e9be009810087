// The launcher's event loop.
#include <lockstep/distributed/launch/attempt.h>

#include <poll.h>
#include <sys/epoll.h>
#include <sys/wait.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <list>
#include <optional>

#include <lockstep/distributed/launch/failure_notes.h>
#include <lockstep/distributed/launch/rank_process.h>
#include <lockstep/tensor/error.h>

namespace lockstep::dist {

namespace {

using Clock = std::chrono::steady_clock;

class Attempt {
 public:
  Attempt(LaunchJob& job, int number) : job_(job), deaths_(epoll_create1(EPOLL_CLOEXEC)) {
    for (RankPlan& plan : plan_ranks(job.options, job.plan, number)) {
      plan.variables.push_back(notes_.variable());
      RankProcess& rank = ranks_.emplace_back(job, plan, number);
      epoll_event event{EPOLLIN, {.ptr = &rank}};
      epoll_ctl(deaths_.get(), EPOLL_CTL_ADD, rank.death(), &event);
    }
  }

  int run() {
    while (!std::all_of(ranks_.begin(), ranks_.end(),
                        [](const RankProcess& r) { return r.is_over(); }))
      wait_for_events();
    if (!has_failed_ && !reached_.empty()) fail_with(reached_[0]);
    return code_;
  }

 private:
  struct Failure {
    const RankProcess* rank;
    int status;  // of waitpid
  };

  void wait_for_events();
  int milliseconds_to_deadline() const;
  void act_on_deadlines();
  void handle_signals();
  std::vector<RankProcess*> ended_ranks();
  void reap();
  void fail_with(const Failure& failure);
  void stop(int signal);
  void signal_all(int signal);

  LaunchJob& job_;
  std::list<RankProcess> ranks_;
  FailureNotes notes_;
  Fd deaths_;  // an epoll of the ranks' death()
  int code_ = 0;
  bool has_failed_ = false, stopping_ = false;
  std::vector<Failure> reached_;  // failures after a note, in the order of the ends
  int told_by_ = 0;               // the signal that asked the launcher to end the job
  std::optional<Clock::time_point> blame_at_, kill_at_;
};

void Attempt::wait_for_events() {
  std::vector<pollfd> polled{{job_.signals.fd(), POLLIN, 0}, {notes_.fd(), POLLIN, 0}};
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
  if (poll(polled.data(), polled.size(), milliseconds_to_deadline()) >= 0) {
    job_.out.flush();
    job_.err.flush();
    for (size_t i = 0; i < sources.size(); ++i)
      if (polled[first_source + i].revents && !sources[i]->pump()) sources[i]->finish();
    notes_.read();  // the queue is short
    if (polled[0].revents) handle_signals();
  }
  act_on_deadlines();
}

int Attempt::milliseconds_to_deadline() const {
  if (!blame_at_ && !kill_at_) return -1;
  const auto never = Clock::time_point::max();
  const auto next = std::min(blame_at_.value_or(never), kill_at_.value_or(never));
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(next - Clock::now()).count();
  return static_cast<int>(std::max<long>(left, 0));
}

void Attempt::act_on_deadlines() {
  if (blame_at_ && Clock::now() >= *blame_at_) fail_with(reached_[0]);
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
      signal_all(SIGKILL);  // the second request ends the job at once
    } else {
      told_by_ = *signal;
      job_.interrupted = true;
      stop(*signal);
    }
  }
  if (deaths) reap();
}

// In the order in which they ended, as far as the kernel tells: epoll lists descriptors in the order
// in which they became ready.
std::vector<RankProcess*> Attempt::ended_ranks() {
  std::vector<epoll_event> events(ranks_.size());
  const int n = epoll_wait(deaths_.get(), events.data(), static_cast<int>(events.size()), 0);
  std::vector<RankProcess*> ended;
  for (int i = 0; i < n; ++i)
    ended.push_back(static_cast<RankProcess*>(events[static_cast<size_t>(i)].data.ptr));
  for (RankProcess& r : ranks_)
    if (r.has_died() && std::find(ended.begin(), ended.end(), &r) == ended.end())
      ended.push_back(&r);
  return ended;
}

void Attempt::reap() {
  const std::vector<RankProcess*> ended = ended_ranks();
  notes_.read();  // a rank has sent its note before it ends
  for (RankProcess* rank : ended) {
    const int status = rank->kill_and_reap();
    if (status == 0 || has_failed_) continue;
    if (!notes_.has(rank->rank())) {
      fail_with({rank, status});
      continue;
    }
    reached_.push_back({rank, status});
    if (!blame_at_) blame_at_ = Clock::now() + job_.options.grace_period();
  }
}

void Attempt::fail_with(const Failure& failure) {
  const RankProcess& rank = *failure.rank;
  const int status = failure.status;
  has_failed_ = true;
  blame_at_.reset();
  code_ = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  std::string text = str_cat("lockstep-run: rank ", rank.rank(), " (pid ", rank.pid(), ") ");
  if (WIFSIGNALED(status))
    text +=
        str_cat("was killed by signal ", WTERMSIG(status), " (", strsignal(WTERMSIG(status)), ")");
  else
    text += str_cat("failed with exit code ", WEXITSTATUS(status));
  if (told_by_) text += str_cat(", after ", strsignal(told_by_), " to all ranks");
  text += '\n';
  // stderr's lines are preferred, where there are any.
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
  signal_all(SIGCONT);  // or a stopped rank would not see it
  kill_at_ = Clock::now() + job_.options.grace_period();
}

void Attempt::signal_all(int signal) {
  for (const RankProcess& r : ranks_) r.send(signal);
}

}  // namespace

int run_attempt(LaunchJob& job, int attempt) { return Attempt(job, attempt).run(); }

}  // namespace lockstep::dist
