// Notes in the store, one key per rank.
#include <lockstep/distributed/store/notes.h>

namespace lockstep::dist {

namespace {
std::string key_of(const std::string& group, int rank) { return str_cat(group, "/note/", rank); }
}  // namespace

void leave_note(Store& store, const std::string& group, int rank, std::string_view text) {
  LOCKSTEP_CHECK(text.size() <= kNoteBytes, ValueError, "note: a note has at most ", kNoteBytes,
                 " bytes, this one has ", text.size());
  store.tell(key_of(group, rank), std::string(text));
}

std::string read_notes(Store& store, const std::string& group, const std::vector<int>& ranks) {
  std::string notes;
  try {
    for (const int r : ranks)
      if (const auto note = store.try_get(key_of(group, r)))
        notes += str_cat("; rank ", r, ": ", *note);
  } catch (const DistError&) {
    // What made the caller ask is the error to report.
  }
  return notes;
}

}  // namespace lockstep::dist
