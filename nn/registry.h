// The registry of living parameters, buffers and modules, by address. Internal to this folder.
#pragma once

#include <span>
#include <string>
#include <vector>

#include <lockstep/nn/entries.h>

namespace lockstep::nn::detail {

/// The number of parts constructed so far: unless it has changed, a check finds what it found
/// before.
uint64_t parts_constructed();

/// A part that a module refers to and does not name.
struct Unnamed {
  std::string error;
  const void* part;
};
/// Marks what the module's fields name, and throws Error for a part inside the module's own bytes
/// that none of them names. Pointers among these bytes to unnamed parts that are younger than the
/// module, as those that it owns are, go to `pointed`: another module may yet name them.
void check_fields(Module& module, const Entries& entries, std::vector<Unnamed>& pointed);
/// Throws the text of the first that no module has named since.
void check_still_unnamed(const std::vector<Unnamed>& pointed);

/// Whether a living Parameter or Buffer has this body; and whether some module names one that has.
struct BodyUse {
  bool lives = false, named = false;
};
BodyUse use_of(const TensorBody* body);

}  // namespace lockstep::nn::detail
