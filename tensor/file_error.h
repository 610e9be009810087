// What the readers and writers of files share: errors, in which the system's number becomes an
// IoError with a hint, and opening.
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
/// Takes a descriptor that open() returned, and returns it under a number above 2, or -1 with errno:
/// where a standard stream is closed, what the program prints must not get into a file.
LOCKSTEP_API int above_standard(int fd);
/// IoError for a path that is empty or has a NUL byte, which the system would cut.
LOCKSTEP_API void check_path(std::string_view op, const std::string& path);

}  // namespace lockstep::detail
