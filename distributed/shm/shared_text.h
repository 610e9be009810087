// SharedText: a short text in memory that several ranks map. Its words are atomic: a reader may see
// the beginning of one text and the end of the next one, and no more harm.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace lockstep::dist {

/// Lies in zeroed memory; holds at most kBytes - 1 characters.
template <size_t kBytes>
class SharedText {
 public:
  /// What is longer is cut.
  void write(std::string_view text) {
    text = text.substr(0, kBytes - 1);
    for (size_t i = 0; i < kBytes; i += sizeof(uint64_t)) {
      uint64_t word = 0;
      if (i < text.size())
        std::memcpy(&word, text.data() + i, std::min(text.size() - i, sizeof word));
      words_[i / sizeof word].store(word, std::memory_order_relaxed);
      if (i >= text.size()) break;  // the terminator is written
    }
  }
  std::string read() const {
    std::string text;
    for (const auto& shared : words_) {
      const uint64_t word = shared.load(std::memory_order_relaxed);
      char bytes[sizeof word];
      std::memcpy(bytes, &word, sizeof word);
      const size_t length = strnlen(bytes, sizeof bytes);
      text.append(bytes, length);
      if (length < sizeof bytes) break;
    }
    return text;
  }

 private:
  std::atomic<uint64_t> words_[kBytes / sizeof(uint64_t)];
};

}  // namespace lockstep::dist
