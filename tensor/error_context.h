// Context for exceptions that pass through the library from code of the user.
#pragma once

#include <string>
#include <string_view>
#include <typeinfo>

#include <lockstep/tensor/export.h>

namespace lockstep::detail {

/// Rethrows the exception being handled with `where` as another line of its text: an Error as it is,
/// exactly a std::runtime_error, std::logic_error or class derived from these in <stdexcept> as the
/// same class. What has another type (the user's own classes, an int) is rethrown unchanged, after a
/// warning that names it and `where`.
[[noreturn]] LOCKSTEP_API void rethrow_with_context(std::string_view where);

/// The type's name as in source code.
LOCKSTEP_API std::string type_name(const std::type_info& type);

}  // namespace lockstep::detail
