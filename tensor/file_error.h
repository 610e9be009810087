// Errors of files: the system's error number becomes an IoError with a hint.
#pragma once

#include <string>
#include <string_view>

#include <lockstep/tensor/error.h>

namespace lockstep::detail {

/// "a/b" -> "a", "b" -> ".", "/b" -> "/".
std::string folder_of(const std::string& path);
/// IoError "op: cannot WHAT PATH: what `error` means; hint".
[[noreturn]] LOCKSTEP_API void fail_file(std::string_view op, std::string_view what,
                                         const std::string& path, int error);
/// IoError for a path that is empty or has a NUL byte, which the system would cut.
LOCKSTEP_API void check_path(std::string_view op, const std::string& path);

}  // namespace lockstep::detail
