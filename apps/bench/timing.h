// Timing by turns: two things are run alternately for several rounds, so that a machine whose speed
// drifts treats both alike; the ratio is taken round by round.
#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <vector>

namespace lockstep::bench {

struct Timing {
  double median = 0, least = 0;  // seconds a call
};

inline double seconds(const std::function<void()>& f, int calls) {
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < calls; ++i) f();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / calls;
}

inline double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

inline Timing summary(const std::vector<double>& times) {
  return {median(times), *std::min_element(times.begin(), times.end())};
}

/// How many calls of f fill about `budget` seconds, at least one.
inline int calls_for(const std::function<void()>& f, double budget) {
  for (int i = 0; i < 3; ++i) f();
  return std::max(1, static_cast<int>(budget / std::max(1e-9, seconds(f, 1))));
}

inline Timing time_alone(const std::function<void()>& f, int rounds = 7, double budget = 0.15) {
  const int calls = calls_for(f, budget);
  std::vector<double> times;
  for (int r = 0; r < rounds; ++r) times.push_back(seconds(f, calls));
  return summary(times);
}

struct Pair {
  Timing a, b;
  double ratio = 0;  // median over rounds of a / b
};
inline Pair time_by_turns(const std::function<void()>& a, const std::function<void()>& b,
                          int rounds = 9, double budget = 0.15) {
  const int calls_a = calls_for(a, budget), calls_b = calls_for(b, budget);
  std::vector<double> times_a, times_b, ratios;
  for (int r = 0; r < rounds; ++r) {
    times_a.push_back(seconds(a, calls_a));
    times_b.push_back(seconds(b, calls_b));
    ratios.push_back(times_a.back() / times_b.back());
  }
  return {summary(times_a), summary(times_b), median(ratios)};
}

}  // namespace lockstep::bench
