// PeerError: a DistError for which another rank is the reason, or one that a group ended with. What
// a program or the library decides by is the cause; the text is for people.
#pragma once

#include <string>
#include <string_view>
#include <utility>

#include <lockstep/tensor/error.h>
#include <lockstep/tensor/process.h>

namespace lockstep::dist {

enum class Cause : unsigned char {
  other,
  died,      // a rank's process or thread ended without a goodbye
  left,      // a rank has said goodbye
  aborted,   // somebody called abort(), or an exception unwound a rank's group
  late,      // a deadline passed
  disagree,  // ranks called different collectives
  deadlock,  // ranks wait for each other in different groups
};

/// Why a group ended.
struct Ending {
  Cause cause = Cause::other;
  std::string text = {};

  /// As the store keeps it.
  std::string packed() const { return static_cast<char>('0' + static_cast<int>(cause)) + text; }
  static Ending unpacked(const std::string& value) {
    if (value.empty() || value[0] < '0' || value[0] > '0' + static_cast<int>(Cause::deadlock))
      return {Cause::other, value};
    return {static_cast<Cause>(value[0] - '0'), value.substr(1)};
  }
};

class LOCKSTEP_API PeerError : public DistError {
 public:
  PeerError(Cause cause, std::string text) : DistError(std::move(text)), cause_(cause) {}
  Cause cause() const { return cause_; }

 private:
  Cause cause_;
};

/// Throws DistError in a forked child of the process that made what `origin` is a member of.
inline void check_here(const Origin& origin, std::string_view what) {
  LOCKSTEP_CHECK(origin.is_here(), DistError, what,
                 ": this belongs to the process that made it, of which this one is a forked child");
}

}  // namespace lockstep::dist
