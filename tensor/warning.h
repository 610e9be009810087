// Warnings: problems that are not errors. They go to stderr unless the program sets a handler.
#pragma once

#include <functional>
#include <string>

#include <lockstep/tensor/error.h>

namespace lockstep {

/// Sets the handler of all warnings of the process; an empty function restores the default, one
/// line on stderr. Several threads may call the handler at once; it may warn and set handlers
/// itself. A call that is running on another thread when the handler is replaced still finishes.
LOCKSTEP_API void set_warning_handler(std::function<void(const std::string&)> handler);

namespace detail {
LOCKSTEP_API void emit_warning(const std::string& text);
}
/// Calls the handler with the joined parts.
template <class... Parts>
void warn(const Parts&... parts) {
  detail::emit_warning(str_cat(parts...));
}

}  // namespace lockstep
