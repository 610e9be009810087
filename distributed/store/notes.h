// Notes in the store: what each rank of a group leaves there so that the others' errors can say where it
// stood. Leaving one waits for nobody, and reading them hides no error.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include <lockstep/distributed/store.h>

namespace lockstep::dist {

/// In place of the rank's last one; at most kNoteBytes. `group` is the prefix of the group's keys, the
/// rank the job's.
LOCKSTEP_API void leave_note(Store& store, const std::string& group, int rank,
                             std::string_view text);

/// "; rank 0: 3 forwards; rank 2: 2 forwards", of those ranks that left one; without a store nothing.
LOCKSTEP_API std::string read_notes(Store& store, const std::string& group,
                                    const std::vector<int>& ranks);

}  // namespace lockstep::dist
