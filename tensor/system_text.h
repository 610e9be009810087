// What an error number of the system means, in English whatever the program's locale: std::strerror
// and gai_strerror translate by LC_MESSAGES, and error texts of the library do not depend on it.
#pragma once

#include <string>

#include <lockstep/tensor/export.h>

namespace lockstep {

/// "No such file or directory" for ENOENT. Leaves errno as it was; may be called by any thread.
LOCKSTEP_API std::string system_text(int error);
/// The same for what getaddrinfo returns.
LOCKSTEP_API std::string resolver_text(int error);

}  // namespace lockstep
