// ControlRecord: what each rank tells the others of one synchronised backward, fixed before its
// first launch: which parameters it uses, and where it stands, for errors that name the rank at
// fault.
#pragma once

#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include <lockstep/tensor/error.h>

namespace lockstep::dist {

struct ControlRecord {
  uint32_t forwards = 0;         // since the last reduction
  uint32_t local_backwards = 0;  // since the last reduction
  std::vector<char> used;        // by parameter

  std::vector<std::byte> encode() const {
    std::vector<std::byte> bytes(8 + (used.size() + 7) / 8);
    std::memcpy(bytes.data(), &forwards, 4);
    std::memcpy(bytes.data() + 4, &local_backwards, 4);
    for (size_t i = 0; i < used.size(); ++i)
      if (used[i]) bytes[8 + i / 8] |= std::byte{1} << (i % 8);
    return bytes;
  }
  static ControlRecord decode(std::span<const std::byte> bytes, size_t parameters) {
    LOCKSTEP_CHECK(bytes.size() == 8 + (parameters + 7) / 8, DistError, "DDP: a control record of ",
                   bytes.size(), " bytes for ", parameters, " parameters");
    ControlRecord r;
    std::memcpy(&r.forwards, bytes.data(), 4);
    std::memcpy(&r.local_backwards, bytes.data() + 4, 4);
    r.used.resize(parameters);
    for (size_t i = 0; i < parameters; ++i)
      r.used[i] = (bytes[8 + i / 8] >> (i % 8) & std::byte{1}) != std::byte{0};
    return r;
  }
};

}  // namespace lockstep::dist
