// The header of a safetensors file: parsed, and checked against itself and the file's length before
// anything is allocated for tensors.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <lockstep/tensor/file.h>
#include <lockstep/tensor/safetensors.h>

namespace lockstep::detail {

inline constexpr uint64_t kSafetensorsHeaderLimit = 100'000'000;  // the reference's
inline constexpr size_t kLongestTensorName = 4096;

struct TensorEntry {
  std::string name, dtype;
  std::vector<uint64_t> shape;    // at most 64 sizes of at most 2^48
  std::vector<uint64_t> offsets;  // begin and end, from the end of the header
  uint64_t bytes() const { return offsets[1] - offsets[0]; }
};

struct SafetensorsHeader {
  std::vector<TensorEntry> entries;  // sorted; each begins where the one before ends
  Metadata metadata;
  uint64_t data = 0;  // where the first tensor begins in the file
};

/// Throws IoError for a header that breaks the format, or does not describe the whole file.
SafetensorsHeader read_safetensors_header(const FileReader& file);

/// IoError: the file breaks the format.
[[noreturn]] void refuse_safetensors(const FileReader& file, std::string_view what);

/// A name from a file in a message: at most 80 bytes, and without control characters.
std::string quoted_name(std::string_view name);

}  // namespace lockstep::detail
