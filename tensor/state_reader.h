// StateReader: checked reading of a state dict, for implementing load_state_dict. An entry that is
// missing, of another form, given twice or not expected is a ValueError that names it, so that a
// dict from a damaged file changes nothing if everything is read before anything is assigned.
//
//   StateReader in("Counter", state);
//   const int64_t steps = in.integer("steps");
//   in.finish();
//   steps_ = steps;
#pragma once

#include <map>

#include <lockstep/tensor/safetensors.h>

namespace lockstep {

/// A whole number as an entry of a state dict: i64, 0-d.
LOCKSTEP_API Tensor integer_entry(int64_t value);

/// What does not fit in a state that is loaded, gathered to be reported at once.
struct LOCKSTEP_API Misfits {
  std::vector<std::string> missing, unexpected;
  std::vector<std::string> misshapen, wrong;  // each with what is wrong about it
  bool names_fit() const { return missing.empty() && unexpected.empty(); }
  bool values_fit() const { return misshapen.empty() && wrong.empty(); }
  /// A line for each list that is not empty, after a line break each.
  std::string text() const;
};

class LOCKSTEP_API StateReader {
 public:
  /// `owner` is whose state it is, for messages.
  StateReader(std::string owner, const NamedTensors& state);

  /// Takes the entry of that name, of any form.
  Tensor tensor(const std::string& name);
  /// One element of dtype i64, at least `least`.
  int64_t integer(const std::string& name, int64_t least);
  int64_t integer(const std::string& name);
  /// One element of floating dtype.
  double number(const std::string& name);
  /// ValueError if an entry was not taken.
  void finish() const;

 private:
  std::string owner_;
  std::map<std::string, Tensor> remaining_;
};

}  // namespace lockstep
