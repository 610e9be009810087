// Warnings: faults that are no errors. They go to stderr unless the program routes them elsewhere.
#pragma once

#include <functional>
#include <string>

#include <lockstep/tensor/error.h>

namespace lockstep {

/// Takes over all warnings of the process; an empty function restores the default, one line on
/// stderr. Several threads may call the handler at once; it may warn and set handlers itself. A call
/// that is under way on another thread when the handler is replaced still finishes.
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
