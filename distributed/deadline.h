// Deadlines that cannot overflow: a time that is longer than ten years is ten years.
#pragma once

#include <algorithm>
#include <chrono>

namespace lockstep::dist {

using Clock = std::chrono::steady_clock;

/// A time of zero or more that can be added to a time point, other times added to it included.
inline std::chrono::milliseconds bounded(std::chrono::milliseconds time) {
  return std::clamp<std::chrono::milliseconds>(time, std::chrono::milliseconds(0),
                                               std::chrono::hours(24 * 3650));
}

inline Clock::time_point deadline_after(std::chrono::milliseconds time) {
  return Clock::now() + bounded(time);
}

/// A time limit as poll() takes it, rounded up; 0 when it is over.
inline int milliseconds_until(Clock::time_point deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left, 0, 1 << 30));
}

}  // namespace lockstep::dist
