// write_file_atomically: the old content or the new one, whatever goes wrong and whoever else saves;
// links, permissions and leftovers; errors that name the cause.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <functional>
#include <memory>
#include <thread>
#include <utility>

#include <lockstep/tensor/file.h>

#include "temporary_folder.h"
#include "texts.h"

using namespace lockstep;
namespace fs = std::filesystem;

namespace {

// A file size limit stands in for a full disk: writes fail half way.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes, void (*on_signal)(int)) {
    handler_ = ::signal(SIGXFSZ, on_signal);
    ::getrlimit(RLIMIT_FSIZE, &before_);
    rlimit limit = before_;
    limit.rlim_cur = bytes;
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    ::signal(SIGXFSZ, handler_);
  }

 private:
  rlimit before_;
  void (*handler_)(int);
};

// A process of the test's own that runs f; killed and reaped at the end of the scope.
class Child {
 public:
  explicit Child(const std::function<void()>& f) : pid_(::fork()) {
    if (pid_ != 0) return;
    try {
      ::alarm(60);
      f();
      ::_exit(0);
    } catch (...) {
      ::_exit(1);
    }
  }
  ~Child() {
    if (pid_ > 0) kill();
  }
  void kill() {
    ::kill(pid_, SIGKILL);
    wait();
  }
  /// True if f returned.
  bool wait() {
    int status = 0;
    ::waitpid(std::exchange(pid_, -1), &status, 0);
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
  }

 private:
  pid_t pid_;
};

// A save of `text` in a process of its own that stops before the file is whole.
class HalfSave {
 public:
  HalfSave(const std::string& path, const std::string& text) {
    REQUIRE(::pipe(written_) == 0);
    REQUIRE(::pipe(go_on_) == 0);
    child_ = std::make_unique<Child>([&] {
      write_file_atomically(path, [&](FileWriter& out) {
        out.write(text.substr(0, text.size() / 2));
        out.flush();
        char c = 0;
        if (::write(written_[1], &c, 1) != 1 || ::read(go_on_[0], &c, 1) != 1) ::_exit(2);
        out.write(text.substr(text.size() / 2));
      });
    });
    char c;
    REQUIRE(::read(written_[0], &c, 1) == 1);
  }
  ~HalfSave() {
    for (int fd : {written_[0], written_[1], go_on_[0], go_on_[1]}) ::close(fd);
  }
  void kill() { child_->kill(); }
  bool finish() { return ::write(go_on_[1], "", 1) == 1 && child_->wait(); }

 private:
  int written_[2], go_on_[2];
  std::unique_ptr<Child> child_;
};

unsigned mode_of(const std::string& path) {
  return static_cast<unsigned>(fs::status(path).permissions()) & 07777;
}

}  // namespace

TEST_CASE("write_file_atomically writes a file whole, and replaces the one before") {
  TemporaryFolder folder;
  const std::string path = folder / "a";
  write_file_atomically(path, "old");
  CHECK(get_file(path) == "old");
  std::string large(300'000, 'x');
  for (size_t i = 0; i < large.size(); ++i) large[i] = static_cast<char>(i * 7 % 251);
  write_file_atomically(path, [&](FileWriter& out) {
    out.write("head");  // small pieces are gathered, the large one is not, and the order holds
    out.write(large);
    for (int i = 0; i < 70'000; ++i) out.write(std::string_view("t"));
    CHECK(out.written() == 4 + large.size() + 70'000);
  });
  CHECK(get_file(path) == "head" + large + std::string(70'000, 't'));
  CHECK(folder.entries() == 1);
  write_file_atomically(path, std::span<const std::byte>());
  CHECK(get_file(path).empty());
}

TEST_CASE("write_file_atomically: until it returns the old content stands") {
  TemporaryFolder folder;
  const std::string path = folder / "a";
  write_file_atomically(path, "old");
  write_file_atomically(path, [&](FileWriter& out) {
    out.write("new");
    out.flush();
    CHECK(get_file(path) == "old");
    CHECK(folder.entries() == 2);
  });
  CHECK(get_file(path) == "new");
}

TEST_CASE("write_file_atomically: a writer that throws leaves the old file and nothing else") {
  TemporaryFolder folder;
  const std::string path = folder / "a";
  write_file_atomically(path, "old");
  CHECK_THROWS_AS(write_file_atomically(path,
                                        [](FileWriter& out) {
                                          out.write("half");
                                          out.flush();
                                          throw std::logic_error("stop");
                                        }),
                  std::logic_error);
  CHECK_THROWS_AS(write_file_atomically(path, [](FileWriter&) { throw 1; }), int);
  CHECK(get_file(path) == "old");
  CHECK(folder.entries() == 1);
}

TEST_CASE("write_file_atomically under ulimit -f: an error that names it, and nothing is left") {
  TemporaryFolder folder;
  const std::string path = folder / "a";
  write_file_atomically(path, "old");
  for (const auto on_signal : {SIG_DFL, SIG_IGN}) {  // the default ends the process
    std::string text;
    {
      FileSizeLimit limit(100'000, on_signal);
      text = error_of<IoError>([&] { write_file_atomically(path, std::string(200'000, 'x')); });
    }
    CHECK_MESSAGE(contains(text, path), text);
    CHECK_MESSAGE(contains(text, "File too large"), text);
    CHECK_MESSAGE(contains(text, "limit of 100000 bytes: raise it with ulimit -f"), text);
    CHECK(get_file(path) == "old");
    CHECK(folder.entries() == 1);
    sigset_t mask;
    ::pthread_sigmask(SIG_BLOCK, nullptr, &mask);
    CHECK(::sigismember(&mask, SIGXFSZ) == 0);
  }
}

TEST_CASE("FileWriter on a full device says so") {
  const int fd = ::open("/dev/full", O_WRONLY);
  if (fd < 0) return;  // not on this system
  const std::string text = error_of<IoError>([&] {
    FileWriter out(fd, "checkpoint");
    out.write("x");
    out.flush();
  });
  ::close(fd);
  CHECK_MESSAGE(
      contains(text, "checkpoint: No space left on device; the disk is full: free some space"),
      text);
}

TEST_CASE("write_file_atomically where no file can be") {
  TemporaryFolder folder;
  std::string text = error_of<IoError>([&] { write_file_atomically(folder / "missing/a", "x"); });
  CHECK_MESSAGE(contains(text, "missing exists"), text);
  CHECK_MESSAGE(contains(text, "No such file or directory"), text);

  text = error_of<IoError>([&] { write_file_atomically(folder.path().string(), "x"); });
  CHECK_MESSAGE(contains(text, "is a folder"), text);

  // A pipe or a device must not be replaced by a file.
  ::mkfifo((folder / "pipe").c_str(), 0600);
  text = error_of<IoError>([&] { write_file_atomically(folder / "pipe", "x"); });
  CHECK_MESSAGE(contains(text, "not a regular file"), text);
  CHECK(fs::is_fifo(folder / "pipe"));

  const auto error = [&](const std::string& path) {
    return error_of<IoError>([&] { write_file_atomically(path, "x"); });
  };
  CHECK(contains(error(""), "the path is empty"));
  CHECK(contains(error(std::string("a\0b", 3)), "NUL byte after a"));
  CHECK(contains(error(folder / "new/"), "add a file name"));
  CHECK(contains(error(folder / std::string(256, 'a')), "at most 255 bytes"));
  CHECK(contains(error(folder / "pipe/a"), "Not a directory"));
  fs::create_symlink("b", folder / "a");
  fs::create_symlink("a", folder / "b");
  CHECK(contains(error(folder / "a"), "symbolic links form a circle"));
  fs::create_symlink("missing/x", folder / "c");
  CHECK_MESSAGE(contains(error(folder / "c"), "cannot follow the link " + (folder / "c") + " to " +
                                                  (folder / "missing/x") +
                                                  ": No such file or directory; check the path, "
                                                  "and that the folder " +
                                                  (folder / "missing") + " exists"),
                error(folder / "c"));
  CHECK(folder.entries() == 4);  // pipe, a, b, c
}

TEST_CASE("write_file_atomically: a process that may open no more files is told so") {
  TemporaryFolder folder;
  rlimit before;
  ::getrlimit(RLIMIT_NOFILE, &before);
  rlimit limit = before;
  limit.rlim_cur = 0;
  ::setrlimit(RLIMIT_NOFILE, &limit);
  const std::string text = error_of<IoError>([&] { write_file_atomically(folder / "a", "x"); });
  ::setrlimit(RLIMIT_NOFILE, &before);
  CHECK_MESSAGE(contains(text, "limit of 0 open files: raise it with ulimit -n"), text);
  CHECK(folder.entries() == 0);
}

TEST_CASE("write_file_atomically writes through symbolic links") {
  TemporaryFolder folder;
  fs::create_directory(folder / "store");
  put_file(folder / "store/run7", "1");
  fs::create_symlink("store/run7", folder / "latest");
  fs::create_symlink(folder / "latest", folder / "store/again");  // absolute, and a link to a link
  write_file_atomically(folder / "latest", "2");
  CHECK(fs::is_symlink(folder / "latest"));
  CHECK(get_file(folder / "store/run7") == "2");
  write_file_atomically(folder / "store/again", "3");
  CHECK(fs::read_symlink(folder / "latest") == "store/run7");
  CHECK(fs::is_symlink(folder / "store/again"));
  CHECK(get_file(folder / "store/run7") == "3");
  // a link whose target is not there yet
  fs::create_symlink("store/run8", folder / "next");
  write_file_atomically(folder / "next", "4");
  CHECK(fs::is_symlink(folder / "next"));
  CHECK(get_file(folder / "store/run8") == "4");
  CHECK(folder.entries() == 3);
}

TEST_CASE("write_file_atomically in a folder behind a link, and in one that cannot be listed") {
  TemporaryFolder folder;
  fs::create_directories(folder / "store/deep");
  fs::create_symlink("store/deep", folder / "runs");
  write_file_atomically(folder / "runs/a", "1");
  write_file_atomically(folder / "runs/a", "2");
  CHECK(get_file(folder / "store/deep/a") == "2");
  CHECK(fs::is_symlink(folder / "runs"));
  CHECK(folder.entries() == 2);

  if (::geteuid() != 0) return;
  fs::permissions(folder.path(), fs::perms(0777));
  fs::create_directory(folder / "drop");
  fs::create_directory(folder / "closed");
  put_file(folder / "closed/a", "old");
  REQUIRE(::chmod((folder / "drop").c_str(), 0733) == 0);
  REQUIRE(::chmod((folder / "closed").c_str(), 0755) == 0);
  REQUIRE(::chmod((folder / "closed/a").c_str(), 0666) == 0);
  REQUIRE(::seteuid(65534) == 0);
  write_file_atomically(folder / "drop/a", "x");
  const std::string text =
      error_of<IoError>([&] { write_file_atomically(folder / "closed/a", "new"); });
  REQUIRE(::seteuid(0) == 0);
  CHECK(get_file(folder / "drop/a") == "x");
  CHECK_MESSAGE(
      contains(text, "Permission denied; check the permissions of the file and its folder"), text);
  CHECK(get_file(folder / "closed/a") == "old");
}

TEST_CASE("write_file_atomically replaces no open file by its descriptor's name") {
  TemporaryFolder folder;
  const int fd = ::open((folder / "log").c_str(), O_WRONLY | O_CREAT, 0666);
  fs::create_symlink("/dev/fd/" + std::to_string(fd), folder / "link");
  for (const std::string& path :
       {"/dev/fd/" + std::to_string(fd), "/proc/self/fd/" + std::to_string(fd), folder / "link"}) {
    const std::string text = error_of<IoError>([&] { write_file_atomically(path, "x"); });
    CHECK_MESSAGE(contains(text, "stands for an open file"), text);
  }
  ::close(fd);
  int ends[2];
  REQUIRE(::pipe(ends) == 0);
  CHECK(contains(
      error_of<IoError>([&] { write_file_atomically("/dev/fd/" + std::to_string(ends[1]), "x"); }),
      "not a regular file"));
  ::close(ends[0]);
  ::close(ends[1]);
  CHECK(folder.entries() == 2);
  CHECK(get_file(folder / "log").empty());
}

TEST_CASE("write_file_atomically and FileReader keep clear of closed standard descriptors") {
  TemporaryFolder folder;
  write_file_atomically(folder / "b", "bbb");
  Child child([&] {
    for (int fd : {0, 1, 2}) ::close(fd);
    write_file_atomically(folder / "a", [&](FileWriter& out) {
      const FileReader reader("test", folder / "b");
      for (int fd : {0, 1, 2})
        if (::write(fd, "printed", 7) >= 0 || ::fcntl(fd, F_GETFD) >= 0) ::_exit(2);
      char text[3];
      reader.read(0, text, 3);
      out.write(text, 3);
    });
  });
  CHECK(child.wait());
  CHECK(get_file(folder / "a") == "bbb");
  CHECK(folder.entries() == 2);
}

TEST_CASE("write_file_atomically on a full disk says so and leaves nothing") {
  TemporaryFolder folder;
  Child child([&] {
    // a file system of 64 KiB, which this process alone sees
    if (::unshare(CLONE_NEWNS) != 0 ||
        ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        ::mount("none", folder.path().c_str(), "tmpfs", 0, "size=64k") != 0)
      ::_exit(0);  // needs root
    const std::string path = folder / "a";
    write_file_atomically(path, "old");
    const std::string text =
        error_of<IoError>([&] { write_file_atomically(path, std::string(200'000, 'x')); });
    const bool right =
        contains(text, "No space left on device; the disk is full: free some space") &&
        get_file(path) == "old" && folder.entries() == 1;
    write_file_atomically(path, std::string(30'000, 'y'));
    ::_exit(right && get_file(path) == std::string(30'000, 'y') ? 0 : 2);
  });
  CHECK(child.wait());
}

TEST_CASE("write_file_atomically keeps permissions; a new file follows the umask") {
  TemporaryFolder folder;
  const mode_t umask = ::umask(027);
  write_file_atomically(folder / "new", "x");
  ::umask(umask);
  CHECK(mode_of(folder / "new") == 0640);
  for (unsigned mode : {0600u, 0644u, 0666u, 0755u, 0640u}) {
    fs::permissions(folder / "new", fs::perms(mode));
    write_file_atomically(folder / "new", [&](FileWriter& out) {
      out.write("x");
      out.flush();
      for (const auto& entry : fs::directory_iterator(folder.path()))  // never more readable
        CHECK((mode_of(entry.path().string()) & ~mode) == 0);
    });
    CHECK(mode_of(folder / "new") == mode);
  }
}

TEST_CASE(
    "write_file_atomically: a file that may not be written is not replaced; owners are kept") {
  if (::geteuid() != 0) return;
  TemporaryFolder folder;
  fs::permissions(folder.path(), fs::perms(0777));
  const std::string path = folder / "a";
  put_file(path, "old");
  REQUIRE(::chown(path.c_str(), 1234, 4321) == 0);
  REQUIRE(::chmod(path.c_str(), 0660) == 0);
  write_file_atomically(path, "new");
  struct stat status;
  REQUIRE(::stat(path.c_str(), &status) == 0);
  CHECK(status.st_uid == 1234);
  CHECK(status.st_gid == 4321);
  CHECK((status.st_mode & 0777) == 0660);

  // Somebody else, who may write the file and is in none of its groups.
  REQUIRE(::chmod(path.c_str(), 0646) == 0);
  REQUIRE(::seteuid(65534) == 0);
  write_file_atomically(path, "his");
  std::string text = "written";
  REQUIRE(::chmod(path.c_str(), 0444) == 0);
  text = error_of<IoError>([&] { write_file_atomically(path, "more"); });
  REQUIRE(::seteuid(0) == 0);
  CHECK_MESSAGE(contains(text, "Permission denied; check the permissions"), text);
  CHECK(get_file(path) == "his");
  CHECK(folder.entries() == 1);
}

TEST_CASE("write_file_atomically takes names of any legal length") {
  TemporaryFolder folder;
  for (size_t n : {1, 240, 250, 255}) {
    const std::string path = folder / std::string(n, 'a');
    write_file_atomically(path, "x");
    CHECK(get_file(path) == "x");
  }
  // the longest path, in folders of 200 bytes
  std::string path = folder.path().string();
  while (path.size() + 201 < 4095) path += "/" + std::string(200, 'd');
  fs::create_directories(path);
  path += "/" + std::string(4095 - path.size() - 1, 'a');
  REQUIRE(path.size() == 4095);
  write_file_atomically(path, "x");
  CHECK(get_file(path) == "x");
}

TEST_CASE("write_file_atomically removes what a killed save left, and no live save's file") {
  TemporaryFolder folder;
  const std::string path = folder / "a", text(100'000, 'n');
  write_file_atomically(path, "old");
  for (int i = 0; i < 3; ++i) {
    HalfSave killed(path, text);
    CHECK(folder.entries() == 2);
    killed.kill();
    CHECK(folder.entries() == 2);
    CHECK(get_file(path) == "old");
  }
  HalfSave alive(path, text);
  CHECK(folder.entries() == 2);  // the three are gone
  write_file_atomically(folder / "b", "x");
  write_file_atomically(path, "newer");
  CHECK(folder.entries() == 3);
  CHECK(alive.finish());
  CHECK(get_file(path) == text);
  CHECK(folder.entries() == 2);
}

TEST_CASE(
    "write_file_atomically killed at any moment leaves a whole file, and one file in the end") {
  TemporaryFolder folder;
  const std::string path = folder / "a";
  const auto text = [](char c) { return std::string(300'000 + c, c); };
  write_file_atomically(path, text('a'));
  for (int i = 0; i < 12; ++i) {
    Child saver([&] {
      for (char c = 'b';; c = c == 'z' ? 'b' : static_cast<char>(c + 1))
        write_file_atomically(path, text(c));
    });
    ::usleep(static_cast<useconds_t>(1000 + 1700 * i));
    saver.kill();
    const std::string now = get_file(path);
    REQUIRE(!now.empty());
    REQUIRE(now == text(now[0]));
    CHECK(folder.entries() <= 2);
  }
  write_file_atomically(path, "x");
  CHECK(folder.entries() == 1);
}

TEST_CASE("write_file_atomically leaves other hosts' unfinished files for a day") {
  TemporaryFolder folder;
  const std::string young = folder / ".lockstep-00000000-0123456789abcdef.tmp",
                    old = folder / ".lockstep-00000000-0123456789abcde0.tmp",
                    foreign = folder / ".lockstep-notes.tmp";
  for (const std::string& path : {young, old, foreign}) put_file(path, "x");
  const timespec days_ago[2] = {{::time(nullptr) - 200'000, 0}, {::time(nullptr) - 200'000, 0}};
  ::utimensat(AT_FDCWD, old.c_str(), days_ago, 0);
  ::utimensat(AT_FDCWD, foreign.c_str(), days_ago, 0);
  write_file_atomically(folder / "a", "x");
  CHECK(fs::exists(young));
  CHECK(!fs::exists(old));
  CHECK(fs::exists(foreign));
}

TEST_CASE("write_file_atomically by several processes: a reader sees one save, whole") {
  TemporaryFolder folder;
  const std::string path = folder / "a";
  write_file_atomically(path, std::string(50'000, 'a'));
  std::vector<std::unique_ptr<Child>> savers;
  for (char c : {'b', 'c', 'd'})
    savers.push_back(std::make_unique<Child>([&, c] {
      for (int i = 0; i < 60; ++i) write_file_atomically(path, std::string(50'000 + c, c));
    }));
  for (int i = 0; i < 300; ++i) {
    const std::string text = read_file(path);
    REQUIRE(text == std::string(text[0] == 'a' ? 50'000 : 50'000 + text[0], text[0]));
  }
  for (auto& saver : savers) CHECK(saver->wait());
  CHECK(folder.entries() == 1);
}

TEST_CASE("write_file_atomically by several threads: each save is whole, and nothing is left") {
  TemporaryFolder folder;
  const std::string path = folder / "a";
  write_file_atomically(path, std::string(50'000, 'a'));
  std::vector<std::thread> savers;
  std::atomic<int> done{0};
  for (char c : {'b', 'c', 'd'})
    savers.emplace_back([&, c] {
      for (int i = 0; i < 30; ++i) write_file_atomically(path, std::string(50'000 + c, c));
      ++done;
    });
  do {
    const std::string text = read_file(path);
    CHECK(text == std::string(text[0] == 'a' ? 50'000 : 50'000 + text[0], text[0]));
  } while (done < 3);
  for (std::thread& saver : savers) saver.join();
  CHECK(folder.entries() == 1);
}

TEST_CASE("FileReader reads what is there and says what is not") {
  TemporaryFolder folder;
  put_file(folder / "a", "0123456789");
  FileReader file("test", folder / "a");
  CHECK(file.size() == 10);
  char text[4];
  file.read(6, text, 4);
  CHECK(std::string(text, 4) == "6789");
  CHECK_MESSAGE(contains(error_of<IoError>([&] { file.read(7, text, 4); }), "ends at byte 10"), "");
  CHECK(
      contains(error_of<IoError>([&] { FileReader("test", folder / "b"); }), "test: cannot open"));
  CHECK(contains(error_of<IoError>([&] { FileReader("test", folder.path().string()); }),
                 "is a folder"));
  ::mkfifo((folder / "pipe").c_str(), 0600);
  CHECK(contains(error_of<IoError>([&] { FileReader("test", folder / "pipe"); }),
                 "not a regular file"));

  CHECK(read_file(folder / "a") == "0123456789");
  CHECK(
      contains(error_of<IoError>([&] { read_file(folder / "a", 9); }), "more than the limit of 9"));
}
