// Error and its subclasses: the library reports every failure by throwing one of them.
// A message gives the op, the rule, the actual values and a hint, in this order:
//   "matmul: inner dimensions differ: [2, 3] x [4, 5]; did you mean b.transpose(0, 1)?"
#pragma once

#include <charconv>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

#include <lockstep/tensor/export.h>

namespace lockstep {

class LOCKSTEP_API Error : public std::exception {
 public:
  explicit Error(std::string text) : text_(std::move(text)) {}
  const char* what() const noexcept override { return text_.c_str(); }
  /// Adds where it happened, e.g. "in Net.fc1 (Linear 9216->128)"; modules call this as the error
  /// propagates.
  void add_context(std::string_view where) {
    last_line_ = text_.size();
    text_.append("\n  ").append(where);
    place_ = {};
  }

  /// The modules that the error has propagated through: the outermost so far, the path below it,
  /// the innermost's name.
  struct Place {
    const void* outermost = nullptr;
    std::string path, innermost;
  };
  const Place& place() const { return place_; }
  /// Replaces the last line of context (`same_line`), or adds another; called for each module.
  void set_place(Place place, std::string_view where, bool same_line) {
    if (same_line) text_.resize(last_line_);
    add_context(where);
    place_ = std::move(place);
  }

 private:
  std::string text_;
  size_t last_line_ = 0;
  Place place_;
};

class LOCKSTEP_API ShapeError : public Error {
  using Error::Error;
};
class LOCKSTEP_API DTypeError : public Error {
  using Error::Error;
};
class LOCKSTEP_API DeviceError : public Error {
  using Error::Error;
};
class LOCKSTEP_API IndexError : public Error {
  using Error::Error;
};
class LOCKSTEP_API ValueError : public Error {
  using Error::Error;
};
class LOCKSTEP_API AutogradError : public Error {
  using Error::Error;
};
class LOCKSTEP_API IoError : public Error {
  using Error::Error;
};
class LOCKSTEP_API OutOfMemory : public Error {
  using Error::Error;
};
class LOCKSTEP_API DistError : public Error {
  using Error::Error;
};

// Overload append(text, x) for a type to use its values in messages.
inline void append(std::string& text, std::string_view s) { text += s; }
inline void append(std::string& text, const char* s) { text += s; }
inline void append(std::string& text, char c) { text += c; }
inline void append(std::string& text, bool b) { text += b ? "true" : "false"; }
template <class N>
requires(std::is_arithmetic_v<N> && !std::is_same_v<N, bool> &&
         !std::is_same_v<N, char>) void append(std::string& text, N n) {
  char buffer[48];
  text.append(buffer, std::to_chars(buffer, buffer + sizeof buffer, n).ptr);
}

/// The parts of a message joined: str_cat("got ", shape, " and ", dtype).
template <class... Parts>
std::string str_cat(const Parts&... parts) {
  std::string text;
  (append(text, parts), ...);
  return text;
}

/// Throws E with the joined parts.
template <class E = Error, class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  throw E(str_cat(parts...));
}

}  // namespace lockstep

/// LOCKSTEP_CHECK(condition, ShapeError, "matmul: ...", a.shape()): the message is built on failure
/// only.
#define LOCKSTEP_CHECK(condition, E, ...) \
  do {                                    \
    if (!(condition)) [[unlikely]]        \
      ::lockstep::fail<E>(__VA_ARGS__);   \
  } while (false)
