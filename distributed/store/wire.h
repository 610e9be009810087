// What travels between a Store and its server: frames, each four bytes of length and then that many
// bytes. Both sides take every byte for hostile: lengths are limited before anything is kept, and
// an Unpacker never reads past the end.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace lockstep::dist::store_wire {

inline constexpr size_t kMostKeyBytes = 1024;
inline constexpr size_t kMostValueBytes = 1 << 20;
inline constexpr size_t kMostKeys = 4096;            // in one request
inline constexpr size_t kMostTotalBytes = 64 << 20;  // of everything that a server keeps
inline constexpr size_t kMostGreetingBytes = 512;    // of a frame, before it is known who sends
inline constexpr size_t kMostRequestBytes = kMostValueBytes + kMostKeys * 64 + kMostKeyBytes;
inline constexpr size_t kMostReplyBytes = kMostTotalBytes + kMostValueBytes + 64;

enum class Op : uint8_t { set = 1, tell, set_once, get, add, remove, lost, join, leave, look_up };
enum class Reply : uint8_t {
  ok = 1,
  late,   // the deadline passed; text: what is missing
  error,  // text
  bye     // the server has left; sent without being asked
};

class Packer {
 public:
  Packer& number(uint64_t n, int bytes) {
    for (int i = 0; i < bytes; ++i) bytes_.push_back(static_cast<char>(n >> (8 * i)));
    return *this;
  }
  Packer& raw(std::string_view s) {
    bytes_ += s;
    return *this;
  }
  Packer& text(std::string_view s) { return number(s.size(), 4).raw(s); }
  const std::string& bytes() const { return bytes_; }
  std::string frame() const { return Packer().text(bytes_).bytes_; }

 private:
  std::string bytes_;
};

class Unpacker {
 public:
  explicit Unpacker(std::string_view bytes) : rest_(bytes) {}
  uint64_t number(int bytes) {
    const std::string_view from = raw(static_cast<size_t>(bytes));
    uint64_t n = 0;
    for (size_t i = from.size(); i-- > 0;) n = n << 8 | static_cast<unsigned char>(from[i]);
    return n;
  }
  std::string_view raw(size_t bytes) {
    ok_ &= bytes <= rest_.size();
    if (!ok_) return {};
    const std::string_view out = rest_.substr(0, bytes);
    rest_.remove_prefix(bytes);
    return out;
  }
  /// A text of at most `most` bytes.
  std::string_view text(size_t most) {
    const uint64_t bytes = number(4);
    ok_ &= bytes <= most;
    return ok_ ? raw(bytes) : std::string_view();
  }
  /// Whether all that was asked for was there.
  bool ok() const { return ok_; }
  /// ... and nothing else.
  bool done() const { return ok_ && rest_.empty(); }

 private:
  std::string_view rest_;
  bool ok_ = true;
};

}  // namespace lockstep::dist::store_wire
