// Segment by memfd_create and mmap, and the look at what memory is left.
#include <lockstep/distributed/shm/segment.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <fstream>
#include <string>

#include <lockstep/distributed/limits.h>
#include <lockstep/tensor/error.h>

namespace lockstep::dist {

namespace {

[[noreturn]] void out_of_memory(size_t bytes, const char* what, int error) {
  fail<OutOfMemory>("shared memory: ", what, " ", bytes, " bytes: ", error_text(error), "; ",
                    memory_left(), " bytes are left; use smaller buckets or fewer ranks per host");
}

// The number after `key` in a file of "key value" lines; `fallback` where there is none.
uint64_t number_in(const std::string& path, const std::string& key, uint64_t fallback) {
  std::ifstream file(path);
  std::string word;
  uint64_t value;
  if (key.empty()) return file >> value ? value : fallback;
  while (file >> word)
    if (word == key && file >> value) return value;
  return fallback;
}

struct GroupFiles {
  const char *limit, *usage, *cache;  // names of a control group's memory files, versions 2 and 1
};
constexpr GroupFiles kVersion2{"memory.max", "memory.current", "inactive_file"};
constexpr GroupFiles kVersion1{"memory.limit_in_bytes", "memory.usage_in_bytes",
                               "total_inactive_file"};

// What the control group at root/path and its parents leave.
uint64_t group_left(const std::string& root, std::string path, const GroupFiles& files) {
  uint64_t left = UINT64_MAX;
  for (;;) {
    const std::string folder = root + path + "/";
    const uint64_t limit = number_in(folder + files.limit, "", UINT64_MAX);  // "max" is no number
    if (limit != UINT64_MAX) {
      const uint64_t usage = number_in(folder + files.usage, "", 0);
      const uint64_t cache = std::min(usage, number_in(folder + "memory.stat", files.cache, 0));
      left = std::min(left, limit - std::min(limit, usage - cache));
    }
    if (path.empty() || path == "/") return left;
    path.resize(path.rfind('/'));
  }
}

}  // namespace

size_t memory_left() {
  const uint64_t available = number_in("/proc/meminfo", "MemAvailable:", UINT64_MAX >> 10);
  uint64_t left = available << 10;
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {  // "0::/path" or "5:memory:/path"
    const size_t a = line.find(':'), b = line.find(':', a + 1);
    if (b == std::string::npos) continue;
    const std::string controllers = line.substr(a + 1, b - a - 1), path = line.substr(b + 1);
    if (controllers.empty()) left = std::min(left, group_left("/sys/fs/cgroup", path, kVersion2));
    if (controllers == "memory")
      left = std::min(left, group_left("/sys/fs/cgroup/memory", path, kVersion1));
  }
  return left;
}

std::shared_ptr<Segment> Segment::plain(size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) out_of_memory(bytes, "cannot allocate", errno);
  return std::shared_ptr<Segment>(new Segment(static_cast<std::byte*>(p), bytes));
}

Fd Segment::make_file(size_t bytes) {
  // Reserving more than a control group allows would have the kernel kill somebody instead of
  // failing.
  if (bytes > memory_left()) out_of_memory(bytes, "cannot reserve", ENOMEM);
  const std::string limit = file_size_limit_text(bytes);
  LOCKSTEP_CHECK(limit.empty(), OutOfMemory, "shared memory: cannot reserve ", bytes,
                 " bytes: ", limit);
  Fd file(memfd_create("lockstep", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!file) out_of_memory(bytes, "cannot create a memory file of", errno);
  int error;
  while ((error = posix_fallocate(file.get(), 0, static_cast<off_t>(bytes))) == EINTR) {
  }
  if (error != 0) out_of_memory(bytes, "cannot reserve", error);
  fcntl(file.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
  return file;
}

std::shared_ptr<Segment> Segment::map(int file, size_t bytes) {
  struct stat about {};
  const int seals = fcntl(file, F_GET_SEALS);  // negative for a file that cannot be sealed
  const bool sound = fstat(file, &about) == 0 && about.st_size == static_cast<off_t>(bytes) &&
                     seals >= 0 && (seals & F_SEAL_SHRINK) != 0;
  LOCKSTEP_CHECK(sound, DistError, "shared memory: was given a file that is not one of ", bytes,
                 " bytes");
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (p == MAP_FAILED) out_of_memory(bytes, "cannot map", errno);
  madvise(p, bytes, MADV_DONTFORK);
  return std::shared_ptr<Segment>(new Segment(static_cast<std::byte*>(p), bytes));
}

Segment::Segment(std::byte* data, size_t bytes) : data_(data), bytes_(bytes) {}
Segment::~Segment() {
  if (is_here()) munmap(data_, bytes_);
}

}  // namespace lockstep::dist
