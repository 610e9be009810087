// LaunchJob: its beginning and its end.
#include <lockstep/distributed/launch/job.h>

#include <linux/close_range.h>
#include <poll.h>
#include <unistd.h>

#include <chrono>
#include <vector>

namespace lockstep::dist {

LaunchJob::LaunchJob(const LaunchOptions& launch_options)
    : options(launch_options),
      plan(make_plan(launch_options)),
      out(STDOUT_FILENO),
      err(STDERR_FILENO) {
  // What our caller left open is not the ranks' business.
  close_range(3, ~0U, CLOSE_RANGE_CLOEXEC);
}

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
