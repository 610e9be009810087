#include <lockstep/tensor/warning.h>

#include <cstdio>
#include <mutex>

namespace lockstep {
namespace {
std::mutex mutex;
std::function<void(const std::string&)> handler;
}  // namespace

void set_warning_handler(std::function<void(const std::string&)> h) {
  std::lock_guard lock(mutex);
  handler = std::move(h);
}

namespace detail {
void emit_warning(const std::string& text) {
  std::lock_guard lock(mutex);
  if (handler)
    handler(text);
  else
    std::fprintf(stderr, "lockstep: warning: %s\n", text.c_str());
}
}  // namespace detail

}  // namespace lockstep
