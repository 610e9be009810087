// IDX and MNIST files: the real ones, small ones made here, and every way to damage them.
#include <doctest/doctest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <fstream>
#include <numeric>

#include <lockstep/data/idx.h>
#include <lockstep/data/mnist.h>

#include "temporary_folder.h"
#include "texts.h"

using namespace lockstep;
using namespace std::string_literals;

namespace {

std::string data_folder() { return std::string(LOCKSTEP_TEST_DATA) + "/../data/mnist"; }

std::string little_endian(uint64_t value, int bytes) {
  std::string s;
  for (int i = 0; i < bytes; ++i) s += static_cast<char>(value >> (8 * i));
  return s;
}

// RFC 1952 around one stored block of RFC 1951; MNIST's own files have compressed ones.
std::string gzip(const std::string& text) {
  uint32_t crc = 0xFFFFFFFF;
  for (unsigned char c : text) {
    crc ^= c;
    for (int k = 0; k < 8; ++k) crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320 : 0);
  }
  const uint64_t n = text.size();
  return "\x1f\x8b\x08\0\0\0\0\0\0\xff\x01"s + little_endian(n, 2) + little_endian(~n, 2) + text +
         little_endian(~crc, 4) + little_endian(n, 4);
}

std::string big_endian(uint64_t value, int bytes) {
  std::string s;
  for (int i = bytes; i-- > 0;) s += static_cast<char>(value >> (8 * i));
  return s;
}
std::string idx(int type, const std::vector<uint32_t>& sizes, const std::string& values) {
  std::string s = "\0\0"s + static_cast<char>(type) + static_cast<char>(sizes.size());
  for (uint32_t n : sizes) s += big_endian(n, 4);
  return s + values;
}

// The message of the IoError, which must name the file.
std::string error_of(const std::string& bytes) {
  TemporaryFolder folder;
  const std::string path = folder / "x-ubyte";
  put_file(path, bytes);
  try {
    data::read_idx(path);
  } catch (const IoError& e) {
    CHECK(std::string(e.what()).find("read_idx: " + path) == 0);
    return e.what();
  }
  return "no IoError";
}
#define CHECK_ERROR(bytes, part)               \
  do {                                         \
    const std::string text = error_of(bytes);  \
    CHECK_MESSAGE(contains(text, part), text); \
  } while (false)

Tensor parse(const std::string& bytes) {
  TemporaryFolder folder;
  put_file(folder / "x", bytes);
  return data::read_idx(folder / "x");
}

}  // namespace

TEST_CASE("read_idx: each type, plain and gzipped") {
  const std::string u8 = idx(0x08, {2, 3}, "\x00\x01\x02\xff\x7f\x80"s);
  const std::string i32 = idx(0x0C, {2}, big_endian(0xFFFFFFFE, 4) + big_endian(0x01020304, 4));
  const std::string f32 = idx(0x0D, {1}, big_endian(0xC0200000, 4));             // -2.5
  const std::string f64 = idx(0x0E, {1, 1}, big_endian(0x3FF8000000000000, 8));  // 1.5
  for (const auto& wrap :
       {+[](const std::string& s) { return s; }, +[](const std::string& s) { return gzip(s); }}) {
    Tensor t = parse(wrap(u8));
    CHECK(t.dtype() == DType::u8);
    CHECK(t.shape() == Shape{2, 3});
    CHECK(t.to_vector<int>() == std::vector<int>{0, 1, 2, 255, 127, 128});
    CHECK(parse(wrap(i32)).to_vector<int>() == std::vector<int>{-2, 0x01020304});
    CHECK(parse(wrap(f32)).to_vector<double>() == std::vector<double>{-2.5});
    CHECK(parse(wrap(f64)).to_vector<double>() == std::vector<double>{1.5});
    CHECK(parse(wrap(idx(0x08, {0, 28, 28}, ""))).shape() == Shape{0, 28, 28});
  }
}

TEST_CASE("read_idx: gzip members and the zeros after them, as gunzip reads them") {
  const std::string u8 = idx(0x08, {2, 3}, "\x00\x01\x02\xff\x7f\x80"s);
  const auto last = [](const std::string& bytes) { return parse(bytes).to_vector<int>()[5]; };
  CHECK(last(gzip(u8.substr(0, 7)) + gzip(u8.substr(7))) == 128);
  CHECK(last(gzip(u8) + gzip("")) == 128);
  for (size_t n : {1, 2, 18, 512, 200'000}) {  // more than the reader's buffer
    const std::string zeros(n, '\0');
    CHECK(last(gzip(u8) + zeros) == 128);
    CHECK(last(gzip(u8.substr(0, 7)) + zeros + gzip(u8.substr(7)) + zeros) == 128);
    CHECK_ERROR(gzip(u8) + zeros + "more", "zlib found an error");
    CHECK_ERROR(gzip(u8) + zeros + gzip("x"), "found more");
    CHECK_ERROR(gzip(u8.substr(0, 8)) + zeros, "expected 2 sizes, and it ends after 1");
    CHECK_ERROR(gzip(u8) + zeros + gzip("x").substr(0, 12), "the gzip data breaks off");
  }
  std::string bad_second = gzip(u8.substr(0, 7)) + gzip(u8.substr(7));
  bad_second[bad_second.size() - 6] ^= 1;  // in the CRC
  CHECK_ERROR(bad_second, "incorrect data check");
  CHECK_ERROR(u8 + std::string(8, '\0'), "found more");  // padding is gzip's alone
}

TEST_CASE("read_idx says what is wrong with a file") {
  CHECK_ERROR("", "expected an IDX header of at least 8 bytes, found 0");
  CHECK_ERROR("\x89PNG\r\n", "expected IDX magic 0, 0, type, dimensions; found 137, 80");
  CHECK_ERROR(idx(0x0A, {1}, "a"), "expected IDX type 8 (u8), 9 (i8), 11 (i16), 12 (i32), 13 (f32) "
                                   "or 14 (f64), found 10");
  CHECK_ERROR(idx(0x08, {}, ""), "magic");
  CHECK_ERROR(idx(0x08, std::vector<uint32_t>(9, 1), "a"), "at most 8 dimensions, found 9");
  CHECK_ERROR(idx(0x08, {2, 3}, "").substr(0, 9), "expected 2 sizes, and it ends after 1");
  CHECK_ERROR(idx(0x08, {2, 3}, "12345"), "expected 6 bytes of values for shape [2, 3], found 5");
  CHECK_ERROR(idx(0x08, {2, 3}, "1234567"),
              "expected 6 bytes of values for shape [2, 3], found more");
  CHECK_ERROR(gzip(idx(0x08, {2, 3}, "1234567")), "found more");
  const uint32_t most = 0xFFFFFFFF;
  CHECK_ERROR(idx(0x08, {most, most, most}, "1"), "the sizes overflow");
  CHECK_ERROR(idx(0x08, {0, most, most, most}, ""), "the sizes overflow");
  CHECK_ERROR(idx(0x0E, {most, 0x7FFFFFFF}, "1"), "the sizes overflow");

  const std::string good = gzip(idx(0x08, {2, 3}, "123456"));
  CHECK_ERROR(good.substr(0, good.size() - 3), "the gzip data breaks off");
  CHECK_ERROR(good + "more", "zlib found an error");
  std::string wrong_sum = good;
  wrong_sum[good.size() - 6] ^= 1;  // in the CRC
  CHECK_ERROR(wrong_sum, "incorrect data check");

  std::string text;
  try {
    data::read_idx("/nowhere/x");
  } catch (const IoError& e) {
    text = e.what();
  }
  CHECK_MESSAGE(contains(text, "read_idx: cannot open /nowhere/x: No such file or directory"),
                text);
}

TEST_CASE("read_idx: a header that lies about sizes costs no memory") {
  // 2^62 bytes: whoever believed it would meet bad_alloc, not an IoError
  const std::vector<uint32_t> sizes{1u << 31, 1u << 31};
  CHECK_ERROR(
      idx(0x08, sizes, "abc"),
      "expected 4611686018427387904 bytes of values for shape [2147483648, 2147483648], found 3");
  CHECK_ERROR(gzip(idx(0x08, sizes, "abc")), "found 3");
}

TEST_CASE("read_idx: a file cut or changed at any byte is an IoError or an array, never worse") {
  for (const std::string& good :
       {idx(0x0C, {2, 2}, std::string(16, 'v')), gzip(idx(0x0C, {2, 2}, std::string(16, 'v')))}) {
    REQUIRE(parse(good).numel() == 4);
    for (size_t n = 0; n < good.size(); ++n) CHECK(error_of(good.substr(0, n)) != "no IoError");
    for (size_t i = 0; i < good.size(); ++i)
      for (int flip : {0x01, 0x80, 0xFF}) {
        std::string bad = good;
        bad[i] = static_cast<char>(bad[i] ^ flip);
        try {
          TemporaryFolder folder;
          put_file(folder / "x", bad);
          const Tensor t = data::read_idx(folder / "x");
          CHECK(t.numel() <= 16);
        } catch (const IoError&) {
        }
      }
  }
}

TEST_CASE("read_idx takes memory as content arrives, and says so when there is no more") {
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  TemporaryFolder folder;
  const std::string path = folder / "x";
  put_file(path, idx(0x08, {1u << 15, 1u << 15}, ""));
  REQUIRE(::truncate(path.c_str(), 12 + (off_t{1} << 30)) == 0);  // a file of zeros, on no disk
  const pid_t child = ::fork();
  if (child == 0) {
    rlimit limit{};
    ::getrlimit(RLIMIT_AS, &limit);
    long pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    limit.rlim_cur = static_cast<rlim_t>(pages) * 4096 + (200u << 20);
    ::setrlimit(RLIMIT_AS, &limit);
    const std::string text = ::error_of<OutOfMemory>([&] { data::read_idx(path); });
    ::_exit(contains(text, path) && contains(text, "of 1073741824 bytes of values") ? 0 : 1);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(status == 0);
#endif
}

TEST_CASE("Mnist: the test split") {
  data::Mnist test{data_folder(), data::Split::test};
  REQUIRE(test.size() == 10'000);
  CHECK(test.images().shape() == Shape{10'000, 1, 28, 28});
  // Counted with Python's gzip module.
  const auto* pixels = test.images().data<uint8_t>();
  CHECK(std::accumulate(pixels, pixels + test.images().numel(), int64_t{0}) == 264'923'200);
  const auto* labels = test.labels().data<int64_t>();
  CHECK(std::vector<int64_t>(labels, labels + 10) ==
        std::vector<int64_t>{7, 2, 1, 0, 4, 1, 4, 9, 5, 9});

  const std::vector<int64_t> indices{3, 0, 9'999};
  auto [x, y] = test.get(indices, {});
  CHECK(x.shape() == Shape{3, 1, 28, 28});
  CHECK(x.dtype() == DType::f32);
  CHECK(x.is_contiguous());
  CHECK(y.to_vector<int64_t>() == std::vector<int64_t>{0, 7, labels[9'999]});
  const uint8_t* third = pixels + 3 * 784;
  for (int i = 0; i < 784; ++i)
    REQUIRE(x.data<float>()[i] ==
            doctest::Approx((third[i] / 255.0 - 0.1307) / 0.3081).epsilon(1e-6));

  data::Mnist raw{data_folder(), data::Split::test, {.raw = true}};
  auto [r, ry] = raw.get(indices, {});
  CHECK(r.dtype() == DType::u8);
  CHECK(std::equal(r.data<uint8_t>(), r.data<uint8_t>() + 784, third));

  const std::vector<int64_t> beyond{10'000};
  CHECK_THROWS_AS(test.get(beyond, {}), IndexError);
}

TEST_CASE("Mnist: the training split has the published mean and deviation") {
  data::Mnist train{data_folder(), data::Split::train};
  REQUIRE(train.size() == 60'000);
  const auto* pixels = train.images().data<uint8_t>();
  double sum = 0, squares = 0;
  for (int64_t i = 0; i < train.images().numel(); ++i) {
    sum += pixels[i];
    squares += static_cast<double>(pixels[i]) * pixels[i];
  }
  const double n = static_cast<double>(train.images().numel()), mean = sum / n;
  CHECK(mean / 255 == doctest::Approx(0.1307).epsilon(0.0005));
  CHECK(std::sqrt(squares / n - mean * mean) / 255 == doctest::Approx(0.3081).epsilon(0.0005));
}

TEST_CASE("Mnist: files that do not make a dataset") {
  TemporaryFolder folder;
  const auto error = [&] {
    try {
      data::Mnist{folder.path().string(), data::Split::train};
    } catch (const IoError& e) {
      return std::string(e.what());
    }
    return "no IoError"s;
  };
  CHECK(contains(error(), "found neither"));
  put_file(folder / "train-images-idx3-ubyte", idx(0x08, {2, 1, 2}, "abcd"));
  CHECK(contains(error(), "train-labels-idx1-ubyte"));
  put_file(folder / "train-labels-idx1-ubyte", idx(0x08, {3}, "\1\2\3"));
  CHECK(contains(error(), "has 2 images and"));
  put_file(folder / "train-labels-idx1-ubyte", idx(0x08, {2}, "\1\x0a"));
  CHECK_MESSAGE(contains(error(), "labels are 0 to 9, and sample 1 has 10"), error());
  put_file(folder / "train-labels-idx1-ubyte", idx(0x08, {2, 1}, "\1\2"));
  CHECK(contains(error(), "expected u8 labels [N], found u8 [2, 1]"));
  put_file(folder / "train-labels-idx1-ubyte", idx(0x08, {2}, "\1\2"));
  CHECK(error() == "no IoError");
}
