// What the library says when it is asked to: nothing, unless LOCKSTEP_DEBUG is info or detail.
#pragma once

#include <string_view>

namespace lockstep::dist {

/// One line on stderr under LOCKSTEP_DEBUG=info or detail.
void log_info(std::string_view text);

}  // namespace lockstep::dist
