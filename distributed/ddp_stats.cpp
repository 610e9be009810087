#include <lockstep/distributed/ddp_stats.h>

namespace lockstep::dist {

double DdpStats::communication() const {
  double sum = 0;
  for (const BucketTrace& b : buckets) sum += b.seconds;
  return sum;
}

double DdpStats::overlap() const {
  size_t all = 0, early = 0;
  for (const BucketTrace& b : buckets) {
    all += b.bytes;
    if (b.completed_after >= 0 && b.completed_after < arrivals) early += b.bytes;
  }
  return all ? static_cast<double>(early) / static_cast<double>(all) : 0;
}

std::string DdpStats::text() const {
  const auto ms = [](double seconds) { return str_cat(1e3 * seconds, " ms"); };
  std::string text =
      str_cat("DDP: ", forwards, " forwards, ", synchronised_backwards, " synchronised and ",
              local_backwards, " local backwards; last: forward ", ms(forward), ", backward ",
              ms(backward), ", communication ", ms(communication()),
              ", of it waiting after the last node ", ms(final_wait), ", overlap ", 100 * overlap(),
              " % of the bytes; gradients take ", gradient_bytes, " bytes; a static graph would ",
              static_graph_is_safe ? "" : "not ", "be safe");
  for (size_t b = 0; b < buckets.size(); ++b)
    text += str_cat("\n  bucket ", b, ": ", buckets[b].bytes, " bytes, ",
                    buckets[b].parameters.size(), " parameters from ",
                    buckets[b].parameters.empty() ? "none" : buckets[b].parameters[0],
                    ", launched after ", buckets[b].launched_after, " of ", arrivals, " gradients");
  for (size_t r = 0; r < unused.size(); ++r)
    for (const std::string& name : unused[r]) text += str_cat("\n  unused on rank ", r, ": ", name);
  return text;
}

}  // namespace lockstep::dist
