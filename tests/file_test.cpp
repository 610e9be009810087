// write_file_atomically: the old file or the whole new one, whatever goes wrong; and errors that
// help.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <lockstep/tensor/file.h>

#include "temporary_folder.h"
#include "texts.h"

using namespace lockstep;

namespace {

// A file size limit stands in for a full disk: writes fail half way.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) {
    handler_ = ::signal(SIGXFSZ, SIG_IGN);
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

}  // namespace

TEST_CASE("a file is written whole, and replaces the one before") {
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

TEST_CASE("while it is written the old file stands") {
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

TEST_CASE("a writer that throws leaves the old file and nothing else") {
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
  CHECK(get_file(path) == "old");
  CHECK(folder.entries() == 1);
}

TEST_CASE("a file that cannot grow is removed, and the error says what to do") {
  TemporaryFolder folder;
  const std::string path = folder / "a";
  write_file_atomically(path, "old");
  std::string text;
  {
    FileSizeLimit limit(100'000);
    text = error_of<IoError>([&] { write_file_atomically(path, std::string(200'000, 'x')); });
  }
  CHECK_MESSAGE(contains(text, path), text);
  CHECK_MESSAGE(contains(text, "File too large"), text);
  CHECK_MESSAGE(contains(text, "ulimit -f"), text);
  CHECK(get_file(path) == "old");
  CHECK(folder.entries() == 1);
}

TEST_CASE("a full device is reported as such") {
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

TEST_CASE("places where no file can be") {
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
  CHECK(std::filesystem::is_fifo(folder / "pipe"));
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
