// Warnings: the one way the library speaks without being asked. A program can route them elsewhere.
#pragma once

#include <functional>
#include <string>

#include <lockstep/tensor/error.h>

namespace lockstep {

/// Takes over all warnings of the process; an empty function restores the default, one line on
/// stderr.
LOCKSTEP_API void set_warning_handler(std::function<void(const std::string&)> handler);

namespace detail {
LOCKSTEP_API void emit_warning(const std::string& text);
}
/// Hands the joined parts to the handler.
template <class... Parts>
void warn(const Parts&... parts) {
  detail::emit_warning(str_cat(parts...));
}

}  // namespace lockstep
