// Collectives on a connected Gloo context: tensors become bytes that lie side by side, Gloo moves
// them, and the results are written where the outputs are.
#pragma once

#include <memory>

#include <gloo/context.h>

#include <lockstep/distributed/process_group.h>

namespace lockstep::dist::gloo_backend {

/// Runs a collective to its end. `tag` is equal on the ranks whose calls agree, and on no others.
void exchange(const std::shared_ptr<gloo::Context>& context, const Collective& call, uint32_t tag,
              Milliseconds timeout);

/// An empty meeting of all ranks.
void meet_all(const std::shared_ptr<gloo::Context>& context, uint32_t tag, Milliseconds timeout);

/// FNV-1a, cut to what a tag has room for.
uint32_t tag_of(std::string_view text);

}  // namespace lockstep::dist::gloo_backend
