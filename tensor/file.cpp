// Reading and writing through POSIX descriptors, and the hints of I/O errors. The atomic replacement
// is in atomic_file.cpp.
#include <lockstep/tensor/file.h>

#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <ctime>
#include <utility>

#include <lockstep/tensor/file_error.h>
#include <lockstep/tensor/system_text.h>

namespace lockstep {
namespace detail {

std::string folder_of(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

namespace {

std::string limit_of(int resource) {
  rlimit limit{};
  if (::getrlimit(static_cast<decltype(RLIMIT_FSIZE)>(resource), &limit) != 0 ||
      limit.rlim_cur == RLIM_INFINITY)
    return "";
  return str_cat(" of ", static_cast<uint64_t>(limit.rlim_cur));
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
    case EFBIG: {
      const std::string limit = limit_of(RLIMIT_FSIZE);
      return str_cat("the file would pass the size limit", limit, limit.empty() ? "" : " bytes",
                     ": raise it with ulimit -f, or choose another file system");
    }
    case EACCES:
    case EPERM:
      return "check the permissions of the file and its folder";
    case EROFS:
      return "the file system is read-only: choose another folder";
    case EISDIR:
      return "this is a folder: add a file name";
    case EBUSY:
      return "the file is a mount point and cannot be replaced: mount its folder instead";
    case ELOOP:
      return "its symbolic links form a circle: remove them";
    case ENAMETOOLONG:
      return "a name has at most 255 bytes and a path 4095: shorten it";
    case EMFILE:
      return str_cat("the process has reached its limit", limit_of(RLIMIT_NOFILE),
                     " open files: raise it with ulimit -n");
    case ENFILE:
      return "the system has reached its limit of open files: raise fs.file-max";
    case ENOMEM:
      return "the system is out of memory";
    case ESTALE:
      return "the network file system has lost the file: try again";
    default:
      return "check the disk and try again";
  }
}

}  // namespace

void fail_file(std::string_view op, std::string_view what, const std::string& path, int error) {
  fail<IoError>(op, ": cannot ", what, " ", path, ": ", system_text(error), "; ",
                hint(error, path));
}

int above_standard(int fd) {
  if (fd < 0 || fd > 2) return fd;
  const int other = ::fcntl(fd, F_DUPFD_CLOEXEC, 3);
  const int error = errno;
  ::close(fd);
  errno = error;
  return other;
}

void check_path(std::string_view op, const std::string& path) {
  LOCKSTEP_CHECK(!path.empty(), IoError, op, ": the path is empty; give the name of a file");
  LOCKSTEP_CHECK(path.find('\0') == std::string::npos, IoError, op,
                 ": the path has a NUL byte after ", path.c_str(),
                 ", where the system would end it; remove it");
}

}  // namespace detail

namespace {

using detail::fail_file;

constexpr size_t kBuffer = size_t{1} << 16;
constexpr size_t kLargestCall = size_t{1} << 30;  // Linux moves at most 2 GiB a call

// A write beyond RLIMIT_FSIZE sends SIGXFSZ to the writing thread, which ends the process unless
// ignored. Blocked and taken back here, only the error EFBIG is left.
class SizeSignalBlocked {
 public:
  SizeSignalBlocked() {
    sigemptyset(&size_);
    sigaddset(&size_, SIGXFSZ);
    sigset_t pending;
    sigpending(&pending);
    was_pending_ = sigismember(&pending, SIGXFSZ) == 1;
    pthread_sigmask(SIG_BLOCK, &size_, &before_);
  }
  ~SizeSignalBlocked() {
    const timespec now{};
    while (!was_pending_ && sigtimedwait(&size_, nullptr, &now) < 0 && errno == EINTR) continue;
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  SizeSignalBlocked(const SizeSignalBlocked&) = delete;
  SizeSignalBlocked& operator=(const SizeSignalBlocked&) = delete;

 private:
  sigset_t size_, before_;
  bool was_pending_;
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
  int error = 0;
  {
    const SizeSignalBlocked blocked;
    while (bytes > 0 && error == 0) {
      const ssize_t n = ::write(fd_, data, std::min(bytes, kLargestCall));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) {
        error = errno;
      } else {
        data += n;
        bytes -= static_cast<size_t>(n);
      }
    }
  }
  if (error != 0) fail_file(op_, "write", path_, error);
}

FileReader::FileReader(std::string op, std::string path)
    : op_(std::move(op)), path_(std::move(path)) {
  detail::check_path(op_, path_);
  // O_NONBLOCK: a pipe without a writer must not hang the open.
  fd_ = detail::above_standard(::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (fd_ < 0) fail_file(op_, "open", path_, errno);
  struct stat status;
  const bool known = ::fstat(fd_, &status) == 0;
  const int error = errno;
  if (known && S_ISREG(status.st_mode)) {
    size_ = static_cast<uint64_t>(status.st_size);
    return;
  }
  ::close(fd_);
  if (!known) fail_file(op_, "open", path_, error);
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
    if (n < 0) fail_file(op_, "read", path_, errno);
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
