// POSIX files: write, fsync, rename, fsync of the folder; and what errno means for whoever reads
// the message.
#include <lockstep/tensor/file.h>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

namespace lockstep {
namespace {

constexpr size_t kBuffer = size_t{1} << 16;
constexpr size_t kLargestCall = size_t{1} << 30;  // Linux moves at most 2 GiB a call

std::string folder_of(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

std::string hint(int error, const std::string& path) {
  switch (error) {
    case ENOENT:
    case ENOTDIR:
      return str_cat("check the path, and that the folder ", folder_of(path), " exists");
    case ENOSPC:
      return "the disk is full: free some space or choose another folder";
    case EDQUOT:
      return "your disk quota is used up: free some space or choose another folder";
    case EFBIG:
      return "the file would pass the size limit: raise it with ulimit -f, or choose another file "
             "system";
    case EACCES:
    case EPERM:
      return "check the permissions of the file and its folder";
    case EROFS:
      return "the file system is read-only: choose another folder";
    case EISDIR:
      return "this is a folder: add a file name";
    case EMFILE:
    case ENFILE:
      return "too many files are open: raise the limit with ulimit -n";
    default:
      return "check the disk and try again";
  }
}

[[noreturn]] void fail_with(std::string_view op, std::string_view what, const std::string& path,
                            int error) {
  fail<IoError>(op, ": cannot ", what, " ", path, ": ", std::strerror(error), "; ",
                hint(error, path));
}

// fsync, where the file system knows it.
bool sync(int fd) { return ::fsync(fd) == 0 || errno == EINVAL || errno == ENOTSUP; }

// The unfinished file: closed and removed unless published.
class Temporary {
 public:
  explicit Temporary(const std::string& target) : target_(target) {
    static std::atomic<unsigned> count{0};
    name_ = str_cat(target, ".tmp-", ::getpid(), "-", count.fetch_add(1));
    fd_ = ::open(name_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd_ < 0) fail_with("write_file_atomically", "create", target, errno);
  }
  ~Temporary() {
    if (fd_ >= 0) ::close(fd_);
    if (!published_) ::unlink(name_.c_str());
  }
  Temporary(const Temporary&) = delete;
  Temporary& operator=(const Temporary&) = delete;

  int fd() const { return fd_; }

  void publish() {
    if (!sync(fd_)) fail_with("write_file_atomically", "write", target_, errno);
    // Some network file systems report a full disk only here.
    if (::close(std::exchange(fd_, -1)) != 0)
      fail_with("write_file_atomically", "write", target_, errno);
    if (::rename(name_.c_str(), target_.c_str()) != 0)
      fail_with("write_file_atomically", "rename the finished file to", target_, errno);
    published_ = true;
    const std::string folder = folder_of(target_);
    const int directory = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (directory < 0) return;  // a folder may be writable and not readable
    const bool synced = sync(directory);
    const int error = errno;
    ::close(directory);
    if (!synced) fail_with("write_file_atomically", "sync the folder of", target_, error);
  }

 private:
  const std::string& target_;
  std::string name_;
  int fd_ = -1;
  bool published_ = false;
};

}  // namespace

void FileWriter::write(const void* data, size_t bytes) {
  const char* p = static_cast<const char*>(data);
  if (buffer_.size() + bytes > kBuffer) flush();
  if (bytes >= kBuffer) {
    write_through(p, bytes);
  } else {
    buffer_.insert(buffer_.end(), p, p + bytes);
  }
  written_ += bytes;
}

void FileWriter::flush() {
  write_through(buffer_.data(), buffer_.size());
  buffer_.clear();
}

void FileWriter::write_through(const char* data, size_t bytes) {
  while (bytes > 0) {
    const ssize_t n = ::write(fd_, data, std::min(bytes, kLargestCall));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail_with("write_file_atomically", "write", path_, errno);
    data += n;
    bytes -= static_cast<size_t>(n);
  }
}

void write_file_atomically(const std::string& path, const std::function<void(FileWriter&)>& write) {
  struct stat status;
  // Renaming over a device or a pipe would destroy it.
  if (::stat(path.c_str(), &status) == 0 && !S_ISREG(status.st_mode)) {
    fail<IoError>("write_file_atomically: cannot write ", path, ": it exists and is ",
                  S_ISDIR(status.st_mode) ? "a folder" : "not a regular file",
                  "; choose another name");
  }
  Temporary temporary(path);
  FileWriter writer(temporary.fd(), path);
  write(writer);
  writer.flush();
  temporary.publish();
}

void write_file_atomically(const std::string& path, std::span<const std::byte> bytes) {
  write_file_atomically(path, [&](FileWriter& out) { out.write(bytes.data(), bytes.size()); });
}

void write_file_atomically(const std::string& path, std::string_view text) {
  write_file_atomically(path, [&](FileWriter& out) { out.write(text); });
}

FileReader::FileReader(std::string op, std::string path)
    : op_(std::move(op)), path_(std::move(path)) {
  // O_NONBLOCK: a pipe without a writer must not hang the open.
  fd_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd_ < 0) fail_with(op_, "open", path_, errno);
  struct stat status;
  const bool known = ::fstat(fd_, &status) == 0;
  const int error = errno;
  if (known && S_ISREG(status.st_mode)) {
    size_ = static_cast<uint64_t>(status.st_size);
    return;
  }
  ::close(fd_);
  if (!known) fail_with(op_, "open", path_, error);
  fail<IoError>(op_, ": cannot read ", path_, ": it is ",
                S_ISDIR(status.st_mode) ? "a folder" : "not a regular file",
                "; give the path of a file");
}

FileReader::~FileReader() { ::close(fd_); }

void FileReader::read(uint64_t offset, void* data, size_t bytes) const {
  char* p = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t n = ::pread(fd_, p, std::min(bytes, kLargestCall), static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail_with(op_, "read", path_, errno);
    if (n == 0) {
      fail<IoError>(
          op_, ": ", path_, " ends at byte ", offset, ", where ", bytes,
          " more were expected; the file is truncated or changed while it was read: get it again");
    }
    p += n;
    offset += static_cast<uint64_t>(n);
    bytes -= static_cast<size_t>(n);
  }
}

std::string read_file(const std::string& path, uint64_t limit) {
  FileReader file("read_file", path);
  LOCKSTEP_CHECK(file.size() <= limit, IoError, "read_file: ", path, " has ", file.size(),
                 " bytes, more than the limit of ", limit, "; is this the right file?");
  std::string text(file.size(), '\0');
  file.read(0, text.data(), text.size());
  return text;
}

}  // namespace lockstep
