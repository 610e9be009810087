// Options that decide what a rank communicates must be the same on all ranks: a rank that saves a file
// waits for the others to take part. They are compared at the start, so that the error names the option.
#pragma once

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include <lockstep/distributed/group.h>

using NamedOptions = std::vector<std::pair<std::string, std::string>>;  // names and values

/// What of an option is compared where ranks may write different values, as for paths.
inline std::string presence(const std::string& value) {
  return value.empty() ? "not given" : "given";
}

/// Throws ValueError on every rank, with the first option that differs, its values and their ranks.
/// The names must be the same on all ranks. A collective call.
inline void check_same_options(const lockstep::dist::Group& group, const NamedOptions& options) {
  using namespace lockstep;
  constexpr size_t kMost = 64;  // bytes of a value that are compared and shown
  Tensor mine = zeros({static_cast<int64_t>(options.size()), kMost}, {.dtype = DType::u8});
  for (size_t i = 0; i < options.size(); ++i)
    std::memcpy(mine.data<uint8_t>() + i * kMost, options[i].second.data(),
                std::min(options[i].second.size(), kMost));
  const Tensor all = group.all_gather(mine);  // [ranks, options, kMost]
  const auto value = [&](int rank, size_t i) {
    const auto* at = reinterpret_cast<const char*>(all.data<uint8_t>()) +
                     (static_cast<size_t>(rank) * options.size() + i) * kMost;
    return std::string(at, strnlen(at, kMost));
  };
  for (size_t i = 0; i < options.size(); ++i)
    for (int r = 1; r < group.size(); ++r)
      LOCKSTEP_CHECK(value(r, i) == value(0, i), ValueError, options[i].first, ": ", value(0, i),
                     " on rank 0, ", value(r, i), " on rank ", r,
                     "; start every rank with the same options");
}
