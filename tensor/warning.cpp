#include <lockstep/tensor/warning.h>

#include <cstdio>
#include <memory>
#include <mutex>

namespace lockstep {
namespace {

using Handler = std::function<void(const std::string&)>;

std::mutex mutex;
std::shared_ptr<const Handler> handler;

}  // namespace

void set_warning_handler(Handler h) {
  auto next = h ? std::make_shared<const Handler>(std::move(h)) : nullptr;
  const std::lock_guard lock(mutex);
  handler.swap(next);  // the old one is destroyed once the lock is released
}

namespace detail {
void emit_warning(const std::string& text) {
  // Called without the lock: a handler may warn, or replace itself.
  std::shared_ptr<const Handler> current;
  {
    const std::lock_guard lock(mutex);
    current = handler;
  }
  if (current)
    (*current)(text);
  else
    std::fprintf(stderr, "lockstep: warning: %s\n", text.c_str());
}
}  // namespace detail

}  // namespace lockstep
