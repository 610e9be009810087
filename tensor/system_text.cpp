#include <lockstep/tensor/system_text.h>

#include <locale.h>

#include <cerrno>
#include <cstring>

namespace lockstep {

std::string system_text(int error) {
  const int before = errno;
  static const locale_t classic = ::newlocale(LC_ALL_MASK, "C", nullptr);
  std::string text = classic ? ::strerror_l(error, classic) : "error " + std::to_string(error);
  errno = before;
  return text;
}

}  // namespace lockstep
