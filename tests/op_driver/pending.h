// Checks of the op driver that fail for faults which are known and not mended yet. A line goes
// together with its fault; when none is left, so does this file.
#pragma once

#include <string>

namespace op_driver {

struct Pending {
  const char *check, *rows;  // beginnings of the test's and the rows' names
};
inline constexpr Pending kPending[] = {
    // Ops overflow on the way where the kernel, in a wider type, does not.
    {"a recorded gradient", "batch_norm"},
};

inline bool is_pending(const std::string& check, const std::string& row) {
  for (const Pending& p : kPending)
    if (check.starts_with(p.check) && row.starts_with(p.rows)) return true;
  return false;
}

}  // namespace op_driver
