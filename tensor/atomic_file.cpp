// write_file_atomically. The temporary file is locked (flock) while its writer runs, which is how
// other writers in the folder know whether to remove it. Everything goes through the descriptor of
// the folder, so the names have no length but their own and renaming the folder does not matter.
#include <dirent.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <memory>
#include <optional>

#include <lockstep/tensor/file.h>
#include <lockstep/tensor/file_error.h>

namespace lockstep {
namespace {

constexpr std::string_view kOp = "write_file_atomically";
constexpr std::string_view kPrefix = ".lockstep-", kSuffix = ".tmp";
constexpr size_t kHostTag = 8, kDigits = 16;
constexpr size_t kNameSize = kPrefix.size() + kHostTag + 1 + kDigits + kSuffix.size();
constexpr time_t kDay = 24 * 60 * 60;

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

/// kHostTag characters that differ between running kernels; containers of one host share them.
const std::string& host_tag() {
  static const std::string tag = [] {
    char text[kHostTag];
    const Descriptor file(::open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC));
    if (::read(file.get(), text, sizeof text) != sizeof text) return std::string(kHostTag, '0');
    return std::string(text, sizeof text);
  }();
  return tag;
}

std::string new_name() {
  uint64_t random = 0;
  while (::getrandom(&random, sizeof random, 0) != sizeof random) continue;
  char digits[kDigits + 1];
  std::snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(random));
  return str_cat(kPrefix, host_tag(), "-", digits, kSuffix);
}

/// Whether the folder of a link is one of /proc, where a link names an open descriptor.
bool in_proc(const std::string& link) {
  struct statfs system;
  return ::statfs(detail::folder_of(link).c_str(), &system) == 0 &&
         system.f_type == PROC_SUPER_MAGIC;
}

/// The path that writing to `path` would reach: symbolic links are followed, dangling ones too.
std::string resolved(const std::string& path) {
  std::string target = path;
  for (int links = 0;; ++links) {
    std::error_code no_link;
    const std::filesystem::path next = std::filesystem::read_symlink(target, no_link);
    if (no_link) return target;
    if (links == 40) detail::fail_file(kOp, "write", path, ELOOP);
    // A rename would give the file to others under its name, and leave the descriptor the old one.
    LOCKSTEP_CHECK(!in_proc(target), IoError, kOp, ": cannot write ", path, ": ", target,
                   " stands for an open file; give the name of the file itself");
    target = (std::filesystem::path(target).parent_path() / next).string();
  }
}

/// The folder of the target: where temporary files are made, synced and cleaned up.
class Folder {
 public:
  explicit Folder(const std::string& target, const std::string& path)
      : fd_(open(detail::folder_of(target))) {
    if (fd_.get() >= 0) return;
    const int error = errno;
    if (target == path) detail::fail_file(kOp, "open the folder of", path, error);
    detail::fail_file(kOp, str_cat("follow the link ", path, " to"), target, error);
  }
  int fd() const { return fd_.get(); }

  /// fsync, where the file system has it; a folder that may not be read cannot be synced.
  bool sync() const {
    const Descriptor readable(::openat(fd(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    return readable.get() < 0 || ::fsync(readable.get()) == 0 || errno == EINVAL ||
           errno == ENOTSUP;
  }

  /// Removes temporary files whose writers have ended: those that are not locked. On a network
  /// file system locks of other hosts may be invisible, so their files must be a day old as well.
  void remove_leftovers() const {
    const int list = ::openat(fd(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (list < 0) return;
    const std::unique_ptr<DIR, int (*)(DIR*)> names(::fdopendir(list), ::closedir);
    if (!names) {
      ::close(list);
      return;
    }
    while (const dirent* entry = ::readdir(names.get())) {
      const std::string_view name = entry->d_name;
      if (!name.starts_with(kPrefix) || !name.ends_with(kSuffix) || name.size() != kNameSize)
        continue;
      const Descriptor file(
          ::openat(fd(), entry->d_name, O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
      struct stat status;
      if (file.get() < 0 || ::fstat(file.get(), &status) != 0 || !S_ISREG(status.st_mode)) continue;
      const bool ours = name.substr(kPrefix.size()).starts_with(host_tag());
      if (!ours && std::time(nullptr) - status.st_mtime < kDay) continue;
      if (::flock(file.get(), LOCK_EX | LOCK_NB) == 0) ::unlinkat(fd(), entry->d_name, 0);
    }
  }

 private:
  static int open(const std::string& name) {
    int fd = ::open(name.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    // A folder may be writable and not readable.
    if (fd < 0 && errno == EACCES) fd = ::open(name.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC);
    return detail::above_standard(fd);
  }
  Descriptor fd_;
};

/// The new content until it is published: a locked file that is removed unless renamed.
class Temporary {
 public:
  /// `old` is the target's status, null if there is no such file.
  Temporary(const Folder& folder, const std::string& path, const std::optional<struct stat>& old)
      : folder_(folder), path_(path) {
    // Until owner and group are set no other user may read it.
    const mode_t mode = old ? old->st_mode & 0700 : 0666;
    while (!create(mode)) continue;
    if (old) keep_permissions(*old);
  }
  ~Temporary() {
    if (!published_) ::unlinkat(folder_.fd(), name_.c_str(), 0);
    ::close(fd_);  // releases the lock
  }
  Temporary(const Temporary&) = delete;
  Temporary& operator=(const Temporary&) = delete;

  int fd() const { return fd_; }

  void publish(const std::string& target) {
    if (::fsync(fd_) != 0 && errno != EINVAL && errno != ENOTSUP)
      detail::fail_file(kOp, "write", path_, errno);
    // Some network file systems report a full disk only when a descriptor is closed. The file stays
    // open, and so locked, until it has its name.
    const int second = ::dup(fd_);
    if (second < 0 || ::close(second) != 0) detail::fail_file(kOp, "write", path_, errno);
    if (::renameat(folder_.fd(), name_.c_str(), folder_.fd(), target.c_str()) != 0)
      detail::fail_file(kOp, "rename the finished file to", path_, errno);
    published_ = true;
    if (!folder_.sync()) detail::fail_file(kOp, "sync the folder of", path_, errno);
  }

 private:
  /// False if the file was taken for a leftover before it was locked.
  bool create(mode_t mode) {
    name_ = new_name();
    const int fd = ::openat(folder_.fd(), name_.c_str(),
                            O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, mode | 0600);
    if (fd < 0 && errno == EEXIST) return false;
    if (fd < 0) detail::fail_file(kOp, "create", path_, errno);
    fd_ = detail::above_standard(fd);
    if (fd_ < 0) {
      const int error = errno;
      ::unlinkat(folder_.fd(), name_.c_str(), 0);
      detail::fail_file(kOp, "create", path_, error);
    }
    struct stat status {};
    const bool taken = ::flock(fd_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
    if (!taken && (::fstat(fd_, &status) != 0 || status.st_nlink > 0)) return true;
    ::unlinkat(folder_.fd(), name_.c_str(), 0);
    ::close(fd_);
    return false;
  }

  void keep_permissions(const struct stat& old) {
    mode_t mode = old.st_mode & 0777;
    if (::fchown(fd_, old.st_uid, old.st_gid) != 0 &&
        ::fchown(fd_, static_cast<uid_t>(-1), old.st_gid) != 0) {
      struct stat status {};
      if (::fstat(fd_, &status) != 0 || status.st_gid != old.st_gid) mode &= ~mode_t{070};
    }
    // Where the file system has no permissions this fails, and they are the same as before.
    ::fchmod(fd_, mode);
  }

  const Folder& folder_;
  const std::string& path_;
  std::string name_;
  int fd_ = -1;
  bool published_ = false;
};

/// The status of the file to replace; null if there is none. IoError unless it may be replaced.
std::optional<struct stat> status_of(const std::string& path) {
  struct stat status;
  if (::stat(path.c_str(), &status) != 0) {
    if (errno != ENOENT) detail::fail_file(kOp, "write", path, errno);
    return std::nullopt;
  }
  // Renaming over a device or a pipe would destroy it.
  LOCKSTEP_CHECK(S_ISREG(status.st_mode), IoError, kOp, ": cannot write ", path,
                 ": it exists and is ", S_ISDIR(status.st_mode) ? "a folder" : "not a regular file",
                 "; choose another name");
  // A rename would replace a file that is write-protected.
  if (::faccessat(AT_FDCWD, path.c_str(), W_OK, AT_EACCESS) != 0)
    detail::fail_file(kOp, "write", path, errno);
  return status;
}

}  // namespace

void write_file_atomically(const std::string& path, const std::function<void(FileWriter&)>& write) {
  detail::check_path(kOp, path);
  const std::optional<struct stat> old = status_of(path);
  const std::string target = resolved(path);
  const std::string name = target.substr(target.rfind('/') + 1);
  if (name.empty()) detail::fail_file(kOp, "write", path, EISDIR);
  if (name.size() > NAME_MAX) detail::fail_file(kOp, "write", path, ENAMETOOLONG);
  const Folder folder(target, path);
  folder.remove_leftovers();
  Temporary temporary(folder, path, old);
  FileWriter writer(temporary.fd(), path);
  write(writer);
  writer.flush();
  temporary.publish(name);
}

void write_file_atomically(const std::string& path, std::span<const std::byte> bytes) {
  write_file_atomically(path, [&](FileWriter& out) { out.write(bytes.data(), bytes.size()); });
}

void write_file_atomically(const std::string& path, std::string_view text) {
  write_file_atomically(path, [&](FileWriter& out) { out.write(text); });
}

}  // namespace lockstep
