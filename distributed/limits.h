// Which limit of the system an error comes from, for messages.
#pragma once

#include <cstddef>
#include <string>

#include <lockstep/tensor/export.h>

namespace lockstep::dist {

/// "Too many open files; this process may have 64 (ulimit -n)".
LOCKSTEP_API std::string error_text(int error);
/// Why no thread could be started, and what to do.
LOCKSTEP_API std::string thread_limit_text(const std::string& what);
/// Why a file of `bytes` bytes would be too large for this process; empty when it is not. Writing
/// it would end the process by SIGXFSZ.
std::string file_size_limit_text(size_t bytes);
/// Opens /dev/null in place of standard input, output and error where they are closed. A socket
/// would take their numbers, and what the program prints would go to a peer.
void open_standard_descriptors();

}  // namespace lockstep::dist
