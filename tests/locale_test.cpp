// No text of the library depends on the locale of the program: with a decimal comma, as a host
// program may have set for C (setlocale) or for C++ (std::locale::global), everything is written and
// read as in the locale "C".
#include <doctest/doctest.h>
#include <netdb.h>

#include <clocale>
#include <cmath>
#include <cstdlib>
#include <locale>
#include <sstream>

#include <lockstep/distributed/environment.h>
#include <lockstep/lockstep.h>
#include <lockstep/tensor/system_text.h>

#include "../apps/loss_log.h"
#include "temporary_folder.h"
#include "texts.h"

using namespace lockstep;

namespace {

/// Writes LC_NUMERIC of a locale "comma" as glibc reads it from $LOCPATH: the magic number of the
/// category, offsets of six values, and these: "," as decimal point, "." between thousands.
void put_locale(const TemporaryFolder& folder) {
  std::filesystem::create_directory(folder / "comma");
  const auto word = [](uint32_t n) { return std::string(reinterpret_cast<const char*>(&n), 4); };
  std::string file = word(0x20031115 ^ LC_NUMERIC) + word(6);
  for (uint32_t offset : {32, 34, 36, 40, 44, 48}) file += word(offset);
  file += std::string(",\0.\0\3\3\0\0", 8) + word(',') + word('.') + std::string("UTF-8\0", 6);
  put_file(folder / "comma/LC_NUMERIC", file);
}

/// The locale "comma" for C; `works` is false where the C library is not glibc.
class CLocale {
 public:
  CLocale() {
    put_locale(folder_);
    ::setenv("LOCPATH", folder_.path().c_str(), 1);
    works = std::setlocale(LC_NUMERIC, "comma") != nullptr;
    ::unsetenv("LOCPATH");
  }
  ~CLocale() { std::setlocale(LC_NUMERIC, "C"); }
  bool works;

 private:
  TemporaryFolder folder_;
};

/// The same for C++ streams.
class CppLocale {
 public:
  CppLocale() : before_(std::locale::global(std::locale(std::locale(), new Comma))) {}
  ~CppLocale() { std::locale::global(before_); }

 private:
  struct Comma : std::numpunct<char> {
    char do_decimal_point() const override { return ','; }
    char do_thousands_sep() const override { return '.'; }
    std::string do_grouping() const override { return "\3"; }
    std::string do_truename() const override { return "wahr"; }
  };
  std::locale before_;
};

/// Whatever the library writes, and reads again, in one text.
std::string all_texts() {
  const TemporaryFolder folder;
  std::ostringstream all;
  all << tensor<float>({0.5f, 1.25f, 2, 1e-7f, 1234567, NAN, -INFINITY}) << '\n'
      << tensor<double>({1.0 / 3}) << arange(1000000, 1000003) << tensor<bool>({true}) << '\n'
      << str_cat(0.5, ' ', 1234567.25f, ' ', 1e300, ' ', 1234567, ' ', true) << '\n';
  nn::Sequential net{nn::Linear{1500, 1000}, nn::ReLU{}, nn::Dropout{0.25}};
  all << net << '\n' << nn::summary(net, zeros({1, 1500})) << '\n';
  all << error_of([&] { optim::SGD(net.parameters(), {.lr = -0.5}); }) << '\n'
      << error_of([] { nn::Dropout{1.5}; }) << '\n'
      << error_of([] {
           linear(zeros({2000, 3000}), zeros({4000, 5000}));
         })
      << '\n'
      << system_text(2) << ' ' << resolver_text(EAI_NONAME) << '\n'
      << data::detail::short_number(12345) << data::detail::clock_text(3723) << '\n'
      << data::detail::bar_line("e", 0.5, "x", 40, false) << '\n';

  all << str_cat(dist::join_timeout_seconds([](const char*) { return "2.5"; }), '\n');
  all << error_of([] { dist::join_timeout_seconds([](const char*) { return "2,5"; }); }) << '\n';

  {
    LossLog log(folder / "log", dist::Group(), 0);
    log.step(999, 0.1);
    log.step(123456, 2.0 / 3);
    log.step(123457, 1e-9);
  }
  LossLog(folder / "log", dist::Group(), 123456).step(123457, NAN);
  all << get_file(folder / "log");

  double value = 1.0 / 3;
  int64_t large = 1234567890123;
  const dist::Checkpoint run{dist::Group(), {{"net", net}, {"value", value}, {"large", large}}};
  dist::save_checkpoint(folder / "run", run);
  value = 0;
  large = 0;
  dist::load_checkpoint(folder / "run", run);
  all << str_cat(value, ' ', large) << '\n' << get_file(folder / "run").substr(8, 500);
  return all.str();
}

/// Of a progress bar that ends, without its times.
std::string progress_text() {
  const TemporaryFolder folder;
  std::FILE* out = std::fopen((folder / "log").c_str(), "w");
  data::Progress progress{"epoch", 2, {.out = out, .line_seconds = 0}};
  progress.step(1000, 0.25);
  progress.step(1000, 0.25);
  progress.finish();
  std::fclose(out);
  return get_file(folder / "log");
}

void check_texts(const std::string& expected) {
  CHECK(all_texts() == expected);
  const std::string progress = progress_text();
  CHECK_MESSAGE(contains(progress, "epoch  50%  loss 0.2500  "), progress);
  CHECK_MESSAGE(contains(progress, "loss 0.2500  2000 samples in 0."), progress);
  CHECK(!contains(progress, ","));
}

}  // namespace

TEST_CASE("locale: texts are the same with a decimal comma in C, in C++ and in both") {
  manual_seed(1);
  const std::string expected = all_texts();
  CHECK_MESSAGE(contains(expected, "tensor([0.5, 1.25, 2, 1e-07, 1.2346e+06, nan, -inf]"),
                expected);
  CHECK(contains(expected, "999 0.1\n123456 0.6666666666666666\n123457 nan\n"));
  {
    manual_seed(1);
    const CppLocale cpp;
    std::ostringstream text;
    text << 1234.5;
    REQUIRE(text.str() == "1.234,5");
    check_texts(expected);
  }
  CLocale c;
  if (!c.works) return;
  char text[32];
  std::snprintf(text, sizeof text, "%.1f", 0.5);
  REQUIRE(std::string(text) == "0,5");
  manual_seed(1);
  check_texts(expected);
  const CppLocale cpp;
  manual_seed(1);
  check_texts(expected);
}

TEST_CASE("rank: under a decimal comma" * doctest::skip()) {
  const TemporaryFolder folder;
  const CLocale c;
  const CppLocale cpp;
  auto group = dist::init({.backend = std::getenv("BACKEND")});
  const Tensor t = full({3}, 0.5);
  group.all_reduce(t);
  CHECK(t.to_vector<double>() == std::vector<double>(3, 1.0));
  CHECK(dist::mean(group.rank() + 0.25, group) == 0.75);
}

TEST_CASE("init: variables and messages between ranks do not depend on the locale") {
#if defined(LOCKSTEP_HAS_GLOO)
  const std::vector<std::string> backends{"shm", "gloo"};
#else
  const std::vector<std::string> backends{"shm"};
#endif
  for (const std::string& backend : backends) {
    const auto ended = ranks::run_ranks(
        2, "rank: under a decimal comma",
        {.deadline = 60, .variables = {{"LOCKSTEP_JOIN_TIMEOUT", "20.5"}, {"BACKEND", backend}}});
    CHECK(ranks::failures(ended) == "");
  }
}
