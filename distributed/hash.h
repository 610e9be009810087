// hash_of: a number that stands for a text, the same on every rank and machine. No secret: for telling
// calls, modules and jobs apart.
#pragma once

#include <cstdint>
#include <string_view>

namespace lockstep::dist {

/// FNV-1a, 64 bits (Fowler, Noll and Vo).
constexpr uint64_t hash_of(std::string_view text) {
  uint64_t hash = 0xCBF29CE484222325;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001B3;
  return hash;
}

}  // namespace lockstep::dist
