// Atomic writing and checked reading of files. write_file_atomically writes a temporary file in the
// target's folder, syncs it and renames it over the target, so a reader sees the old content or the
// new one and never a part, whoever saves at the same time, also after a crash. Every failure is an
// IoError that names the path, what the system said and a remedy.
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

/// Buffered writing to an open descriptor, which it does not own. `op` and `path` are for errors. A
/// file size limit (ulimit -f) is an IoError, also where SIGXFSZ is not ignored.
class LOCKSTEP_API FileWriter {
 public:
  FileWriter(int fd, std::string path, std::string op = "write_file_atomically")
      : fd_(fd), path_(std::move(path)), op_(std::move(op)) {}
  FileWriter(const FileWriter&) = delete;
  FileWriter& operator=(const FileWriter&) = delete;

  void write(const void* data, size_t bytes);
  void write(std::string_view text) { write(text.data(), text.size()); }
  /// Bytes given to write() so far.
  uint64_t written() const { return written_; }
  /// Writes what is buffered to the descriptor. The destructor does not.
  void flush();

 private:
  void write_through(const char* data, size_t bytes);

  int fd_;
  std::string path_, op_;
  uint64_t written_ = 0;
  std::vector<char> buffer_;
};

/// Replaces the content of `path` by what `write` writes. A symbolic link stays and the file it
/// points to is replaced; permissions are kept, owner and group where the process may set them (if
/// it may not, a group that is not kept loses its permissions). Other hard links keep the old
/// content. The file must be writable by the process, as must its folder.
///
/// The temporary file is called ".lockstep-HOST-RANDOM.tmp". If `write` or the system fails it is
/// removed, and the target is as before. A process that is killed leaves it behind; the next save
/// into that folder, by any process, removes it (after a day if the process ran on another host).
/// Throws IoError, or what `write` throws.
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
