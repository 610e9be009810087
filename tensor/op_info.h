// OpInfo: what is known of an op before it runs. Every op that is loaded is in a list, made by the
// ops themselves, so that tests and policies can go through all of them.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include <lockstep/tensor/export.h>
#include <lockstep/tensor/precision.h>

namespace lockstep {

struct OpInfo {
  const char* name;     // as in "relu"; several types of op may share one
  const void* type;     // the same for each run of one op, and different for every other
  bool in_place;        // writes its result to input 0
  Precision precision;  // what it asks of automatic mixed precision
};

inline void append(std::string& text, Precision p) {
  constexpr const char* names[] = {"given", "lower", "full", "widest"};
  text += names[static_cast<int>(p)];
}

/// All ops that are loaded, the library's and the user's, sorted by name. Several instances of a
/// template have one entry each.
LOCKSTEP_API std::vector<OpInfo> op_infos();
/// Their names, each once. For tests that must cover every op.
LOCKSTEP_API std::vector<std::string> op_names();

namespace detail {

LOCKSTEP_API bool register_op(const OpInfo& info);

template <class Op>
inline constexpr char op_type = 0;

template <class Op>
constexpr OpInfo op_info(bool in_place = false) {
  Precision precision = Precision::given;
  if constexpr (requires { Op::precision; }) precision = Op::precision;
  return {Op::name, &op_type<Op>, in_place, precision};
}
/// Registers Op when the binary that records it is loaded.
template <class Op>
inline const bool registered = register_op(op_info<Op>());

}  // namespace detail
}  // namespace lockstep
