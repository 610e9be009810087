// launch: runs the job, and again up to --max-restarts times.
#include <lockstep/distributed/launch/launcher.h>

#include <cstdio>

#include <lockstep/distributed/launch/attempt.h>
#include <lockstep/tensor/error.h>

namespace lockstep::dist {

namespace {

// What programs and shells end with when they were called wrongly, or could not be run: another
// attempt would end the same way.
bool means_wrong_usage(int code) { return code == 2 || code == 126 || code == 127; }

}  // namespace

int launch(const LaunchOptions& options) {
  if (options.dry_run) {
    const LaunchPlan plan = make_plan(options);
    std::fputs(plan_text(options, plan_ranks(options, plan, 0)).c_str(), stdout);
    return 0;
  }
  LaunchJob job(options);
  if (options.nodes > 1 && !user_has_token())
    job.err.put(
        "lockstep-run: LOCKSTEP_TOKEN is not set: ranks of different nodes will not prove that "
        "they belong together\n");
  for (int attempt = 0;; ++attempt) {
    const int code = run_attempt(job, attempt);
    if (code == 0 || job.interrupted || attempt == options.max_restarts) return code;
    if (means_wrong_usage(code)) {
      job.err.put(str_cat("lockstep-run: not restarted: exit code ", code,
                          " says that the program was called wrongly\n"));
      return code;
    }
    job.err.put(
        str_cat("lockstep-run: restarting (", attempt + 1, " of ", options.max_restarts, ")\n"));
  }
}

}  // namespace lockstep::dist
