// Files that are either whole or not there: write_file_atomically publishes a file under its name
// only when every byte is on the disk; FileReader reads one whose size is known first. Every
// failure is an IoError that names the path, what the system said and what to do about it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <lockstep/tensor/error.h>

namespace lockstep {

/// Takes the bytes of a file in order. Small pieces are gathered; large ones go straight to the
/// system.
class LOCKSTEP_API FileWriter {
 public:
  FileWriter(int fd, std::string path) : fd_(fd), path_(std::move(path)) {}
  FileWriter(const FileWriter&) = delete;
  FileWriter& operator=(const FileWriter&) = delete;

  void write(const void* data, size_t bytes);
  void write(std::string_view text) { write(text.data(), text.size()); }
  /// Bytes taken so far.
  uint64_t written() const { return written_; }
  /// Hands what is gathered to the system.
  void flush();

 private:
  void write_through(const char* data, size_t bytes);

  int fd_;
  std::string path_;
  uint64_t written_ = 0;
  std::vector<char> buffer_;
};

/// Writes the file beside its place (path + ".tmp-PID-N"), forces it to the disk and renames it: a
/// reader sees the old file or the whole new one, also after a crash. When `write` or the system
/// fails, the old file is untouched and the new one is removed. Throws IoError, or what `write`
/// throws.
LOCKSTEP_API void write_file_atomically(const std::string& path,
                                        const std::function<void(FileWriter&)>& write);
/// The same for bytes at hand.
LOCKSTEP_API void write_file_atomically(const std::string& path, std::span<const std::byte> bytes);
LOCKSTEP_API void write_file_atomically(const std::string& path, std::string_view text);

/// An open regular file. `op` is the caller's name in errors.
class LOCKSTEP_API FileReader {
 public:
  FileReader(std::string op, std::string path);
  ~FileReader();
  FileReader(const FileReader&) = delete;
  FileReader& operator=(const FileReader&) = delete;

  /// In bytes, when it was opened.
  uint64_t size() const { return size_; }
  const std::string& path() const { return path_; }
  /// Reads exactly `bytes` from `offset` on; a file that has become shorter is an IoError.
  void read(uint64_t offset, void* data, size_t bytes) const;

 private:
  std::string op_, path_;
  int fd_ = -1;
  uint64_t size_ = 0;
};

/// The whole file as text or bytes; more than `limit` bytes is an IoError.
LOCKSTEP_API std::string read_file(const std::string& path, uint64_t limit = uint64_t{1} << 30);

}  // namespace lockstep
