#include <lockstep/tensor/system_text.h>

#include <locale.h>
#include <netdb.h>

#include <cerrno>
#include <cstring>

namespace lockstep {
namespace {

/// Null if the system has none, which POSIX rules out unless memory does.
locale_t classic_locale() {
  static const locale_t classic = ::newlocale(LC_ALL_MASK, "C", nullptr);
  return classic;
}

}  // namespace

std::string system_text(int error) {
  const int before = errno;
  const locale_t classic = classic_locale();
  std::string text = classic ? ::strerror_l(error, classic) : "error " + std::to_string(error);
  errno = before;
  return text;
}

std::string resolver_text(int error) {
  const locale_t classic = classic_locale(), before = classic ? ::uselocale(classic) : nullptr;
  std::string text = ::gai_strerror(error);
  if (before) ::uselocale(before);
  return text;
}

}  // namespace lockstep
