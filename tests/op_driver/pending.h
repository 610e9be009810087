// Checks of the op driver that fail for faults which are known and not mended yet. A line goes
// together with its fault; when none is left, so does this file.
#pragma once

#include <string>

namespace op_driver {

struct Pending {
  const char *check, *rows;  // beginnings of the test's and the rows' names
};
inline constexpr Pending kPending[] = {
    {"every dtype", "batch_norm by the batch"},  // without channels: refused
    {"derivatives", "batch_norm by the batch"},
    {"derivatives", "conv2d"},
    {"every dtype", "conv2d"},       // of no images: refused
    {"every dtype", "max_pool2d"},   // of integers: refused
    {"gradients", "cross_entropy"},  // of nothing but ignored samples: NaN when recorded
    {"special values", "sum"},       // partial sums of f32 overflow
    {"special values", "mean"},
    {"special values", "var"},
    {"special values", "cross_entropy"},
    {"special values", "layer_norm"},
    {"special values", "batch_norm"},
    {"a recorded gradient", "cross_entropy"},
    {"a recorded gradient", "layer_norm"},
    {"a recorded gradient", "batch_norm"},
};

inline bool is_pending(const std::string& check, const std::string& row) {
  for (const Pending& p : kPending)
    if (check.starts_with(p.check) && row.starts_with(p.rows)) return true;
  return false;
}

}  // namespace op_driver
