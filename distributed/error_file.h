// How a failing rank tells its launcher why. torchrun names a file in TORCHELASTIC_ERROR_FILE, and
// puts the message that it finds there into its report.
//
//   int main(int argc, char** argv) try {
//     ...
//   } catch (const std::exception& e) {
//     return dist::report_failure("train", e);
//   }
//
// A program that catches nothing is served too: init() calls record_errors().
#pragma once

#include <exception>
#include <string_view>

#include <lockstep/tensor/export.h>

namespace lockstep::dist {

/// The end of a main that has caught `error`: prints "program: what" on stderr, writes the error
/// file, and returns the exit code, 1.
LOCKSTEP_API int report_failure(std::string_view program, const std::exception& error);

/// Writes the error to the file that TORCHELASTIC_ERROR_FILE names, in torchrun's form; a warning
/// when that fails. Does nothing when the variable is not set.
LOCKSTEP_API void write_error_file(const std::exception& error);

/// From here on an exception that nobody catches is written to that file before it ends the
/// process; what std::terminate did before it does after. Once is enough. Does nothing when the
/// variable is not set.
LOCKSTEP_API void record_errors();

}  // namespace lockstep::dist
