// What several ranks cost and bring: training steps on two ranks against one, all-reduce by backend and size,
// its growth with the number of ranks, the wrapper alone, and starting and meeting.
#pragma once

#include <cstdint>
#include <string>

#include <nlohmann/json.hpp>

namespace lockstep::bench {

nlohmann::json ranks();
nlohmann::json all_reduce();
nlohmann::json growth();
nlohmann::json wrapper();
nlohmann::json start_up();
void print_distributed(const nlohmann::json& all);

/// What the ranks run that this program starts: a training case, "all-reduce" or "barrier".
nlohmann::json rank_case(const std::string& name, int64_t batch, const std::string& backend);

}  // namespace lockstep::bench
