// LaunchJob: start and end of a launch.
#include <lockstep/distributed/launch/job.h>

#include <poll.h>
#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <vector>

#include <lockstep/distributed/launch/descriptors.h>

namespace lockstep::dist {

LaunchJob::LaunchJob(const LaunchOptions& launch_options)
    : options(launch_options),
      plan(make_plan(launch_options)),
      out(STDOUT_FILENO),
      err(STDERR_FILENO) {
  close_descriptors_on_exec(3);  // ranks do not inherit what our caller left open
  getrlimit(RLIMIT_NOFILE, &descriptors_before_);
  const rlimit most{descriptors_before_.rlim_max, descriptors_before_.rlim_max};
  setrlimit(RLIMIT_NOFILE, &most);
}

void LaunchJob::restore_limits() const { setrlimit(RLIMIT_NOFILE, &descriptors_before_); }

LaunchJob::~LaunchJob() {
  using Clock = std::chrono::steady_clock;
  const auto give_up = Clock::now() + options.grace_period();
  while (out.congested() || err.congested()) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(give_up - Clock::now()).count();
    if (interrupted && left <= 0) return;
    std::vector<pollfd> polled{{signals.fd(), POLLIN, 0}};
    for (Outlet* outlet : {&out, &err})
      if (outlet->congested()) polled.push_back({outlet->fd(), POLLOUT, 0});
    poll(polled.data(), polled.size(), interrupted ? static_cast<int>(left) : -1);
    while (const auto signal = signals.next())
      if (LaunchSignals::ends_the_job(*signal)) return;
    out.flush();
    err.flush();
  }
}

}  // namespace lockstep::dist
