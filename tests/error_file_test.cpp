// The file that torchrun reads of a rank that failed.
#include <doctest/doctest.h>

#include <cstdio>
#include <ctime>
#include <nlohmann/json.hpp>
#include <thread>

#include <lockstep/distributed/error_file.h>
#include <lockstep/distributed/group.h>

#include "ranks.h"
#include "temporary_folder.h"

using namespace lockstep;

namespace {

ranks::Ended run(const std::string& test_case, const std::string& error_file) {
  std::map<std::string, std::string> variables;
  if (!error_file.empty()) variables["TORCHELASTIC_ERROR_FILE"] = error_file;
  const std::string self = std::filesystem::read_symlink("/proc/self/exe");
  const int file = ranks::new_file();
  const pid_t pid = ranks::start({self, "--test-case=" + test_case, "--no-skip"}, file, variables);
  ranks::Ended e = ranks::wait_for(pid, ranks::now() + 10 * ranks::kPatience);
  e.output = ranks::read_all(file);
  close(file);
  return e;
}

void check_file(const std::string& path, const std::string& message) {
  const auto file = nlohmann::json::parse(get_file(path));
  CHECK(file["message"]["message"] == message);
  const auto& more = file["message"]["extraInfo"];
  CHECK(more["py_callstack"].get<std::string>().find(message) != std::string::npos);
  const double age =
      std::difftime(std::time(nullptr), std::stol(more["timestamp"].get<std::string>()));
  CHECK(age >= 0);
  CHECK(age < 60 * ranks::kPatience);
}

}  // namespace

TEST_CASE("rank: reports" * doctest::skip()) {
  const DistError error("all_reduce: \"quoted\" \xff and a\nsecond line");
  std::exit(10 + dist::report_failure("train", error));
}

TEST_CASE("report_failure prints, writes and returns 1") {
  const TemporaryFolder folder;
  const auto e = run("rank: reports", folder / "error.json");
  CHECK(e.code == 11);
  CHECK(e.output.find("train: all_reduce: \"quoted\" \xff and a\nsecond line\n") !=
        std::string::npos);
  check_file(folder / "error.json",
             "lockstep::DistError: all_reduce: \"quoted\" \xef\xbf\xbd and a\nsecond line");
  CHECK(folder.entries() == 1);

  CHECK(run("rank: reports", "").code == 11);
  const auto nowhere = run("rank: reports", folder / "no/such/folder.json");
  CHECK(nowhere.code == 11);
  CHECK(nowhere.output.find("TORCHELASTIC_ERROR_FILE: ") != std::string::npos);
}

TEST_CASE("rank: throws in a thread" * doctest::skip()) {
  dist::init();
  std::thread([] { throw std::out_of_range("row 7 of 3"); }).join();
}

TEST_CASE("an exception that nobody catches is recorded, and ends the process as it did") {
  const TemporaryFolder folder;
  const auto e = run("rank: throws in a thread", folder / "error.json");
  CHECK(e.signal == SIGABRT);
  CHECK(e.output.find("what():  row 7 of 3") != std::string::npos);
  check_file(folder / "error.json", "std::out_of_range: row 7 of 3");
  const auto without = run("rank: throws in a thread", "");
  CHECK(without.signal == SIGABRT);
  CHECK(folder.entries() == 1);
}

TEST_CASE("rank: ends without an exception" * doctest::skip()) {
  dist::init();
  std::thread([] { std::terminate(); }).join();
}

TEST_CASE("an end without an exception writes nothing") {
  const TemporaryFolder folder;
  CHECK(run("rank: ends without an exception", folder / "error.json").signal == SIGABRT);
  CHECK(folder.entries() == 0);
}
