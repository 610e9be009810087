// What tests look for in texts: the message of the error that a call must throw, and parts of it.
#pragma once

#include <concepts>
#include <string>
#include <vector>

#include <lockstep/tensor/error.h>

#include "ranks.h"

/// The message of the E that f throws. Another exception passes through.
template <class E = lockstep::Error, std::invocable F>
std::string error_of(F f) {
  try {
    f();
  } catch (const E& e) {
    return e.what();
  }
  return "no error of this kind";
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// Throws unless the text has all the parts; for code of ranks.
inline void expect(const std::string& text, const std::vector<std::string>& parts) {
  for (const std::string& part : parts)
    ranks::require(contains(text, part), "\"" + text + "\" lacks \"" + part + "\"");
}
