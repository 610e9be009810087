// safetensors: round trips, a file that Python's package wrote, and hostile files.
#include <doctest/doctest.h>

#include <cmath>
#include <cstring>

#include <lockstep/tensor/node.h>
#include <lockstep/tensor/safetensors.h>

#include "temporary_folder.h"
#include "texts.h"

using namespace lockstep;
using namespace std::string_literals;

namespace {

std::string golden(const std::string& name) {
  return std::string(LOCKSTEP_TEST_DATA) + "/golden/" + name;
}

std::string with_length(const std::string& header, const std::string& data) {
  const uint64_t n = header.size();
  std::string s(sizeof n, '\0');
  std::memcpy(s.data(), &n, sizeof n);
  return s + header + data;
}

// Loads these bytes; the message of the IoError, or "" when they load.
std::string error_of(const std::string& bytes) {
  TemporaryFolder folder;
  const std::string path = folder / "x.safetensors";
  put_file(path, bytes);
  try {
    const Safetensors file = load_safetensors(path);
    for (const auto& [name, tensor] : file.tensors) CHECK(tensor.is_contiguous());
    return "";
  } catch (const IoError& e) {
    CHECK(std::string(e.what()).find("load_safetensors: " + path) == 0);
    return e.what();
  }
}
std::string error_of(const std::string& header, const std::string& data) {
  return error_of(with_length(header, data));
}
#define CHECK_ERROR(part, ...)                      \
  do {                                              \
    const std::string text = error_of(__VA_ARGS__); \
    CHECK_MESSAGE(contains(text, part), text);      \
  } while (false)

// An entry of a header.
std::string entry(const std::string& name, const std::string& dtype, const std::string& shape,
                  const std::string& offsets) {
  return "\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape +
         ",\"data_offsets\":" + offsets + "}";
}

Tensor f16_tensor(const std::vector<uint16_t>& bits, DType dtype) {
  Tensor t = empty({static_cast<int64_t>(bits.size())}, {.dtype = dtype});
  std::memcpy(t.data_ptr(), bits.data(), bits.size() * 2);
  return t;
}

}  // namespace

TEST_CASE("save_safetensors and load_safetensors: names, order, dtypes, shapes, bytes, metadata") {
  TemporaryFolder folder;
  const std::string path = folder / "net.safetensors";
  const NamedTensors saved = {
      {"fc.weight", tensor<float>({1.5f, -2, NAN, 4, 5, 6}, {2, 3})},
      {"flag", tensor<bool>({true, false}, {2})},
      {"big", tensor<int64_t>({int64_t{1} << 60}, {1})},
      {"half", f16_tensor({0x3C00, 0x4000}, DType::f16)},
      {"fc.bias", tensor<float>({7, 8}, {2})},
      {"scalar", scalar(2.5, {.dtype = DType::f64})},
      {"empty", zeros({0, 4})},
      {"odd name: \"\\\n\xC3\xA4", tensor<uint8_t>({9}, {1})},
      {"int", tensor<int32_t>({-1}, {1, 1, 1, 1, 1, 1, 1, 1})},
      {"brain", f16_tensor({0x3F80}, DType::bf16)},
  };
  save_safetensors(path, saved, {{"epoch", "3"}});
  const Safetensors loaded = load_safetensors(path);
  CHECK(loaded.metadata == Metadata{{"epoch", "3"}, {"format", "pt"}});
  REQUIRE(loaded.tensors.size() == saved.size());
  for (const auto& [name, tensor] : saved) {
    const std::string& label = name;  // clang 14 captures no structured binding
    CAPTURE(label);
    const Tensor& back = loaded.at(name);
    CHECK(back.dtype() == tensor.dtype());
    CHECK(back.shape() == tensor.shape());
    CHECK(std::memcmp(back.data_ptr(), tensor.data_ptr(),
                      static_cast<size_t>(tensor.numel()) * size_of(tensor.dtype())) == 0);
  }
  // Wide elements first, so that all are aligned; otherwise as given.
  std::string order;
  for (const auto& [name, tensor] : loaded.tensors) order += name.substr(0, 3) + " ";
  CHECK(order == "big sca fc. fc. emp int hal bra fla odd ");
  CHECK(loaded.tensors[2].first == "fc.weight");

  const std::string bytes = get_file(path);
  uint64_t header = 0;
  std::memcpy(&header, bytes.data(), sizeof header);
  CHECK((8 + header) % 64 == 0);
  CHECK(bytes[8] == '{');
}

TEST_CASE("save_safetensors: strided tensors and tensors with gradients are saved by value") {
  TemporaryFolder folder;
  const Tensor t = tensor<float>({1, 2, 3, 4, 5, 6}, {2, 3}).requires_grad_();
  save_safetensors(folder / "a", {{"t", t.t()}, {"column", t.detach().select(1, 1)}, {"twice", t}});
  const Safetensors file = load_safetensors(folder / "a");
  CHECK(file.at("t").shape() == Shape{3, 2});
  CHECK(file.at("t").to_vector<int>() == std::vector<int>{1, 4, 2, 5, 3, 6});
  CHECK(file.at("column").to_vector<int>() == std::vector<int>{2, 5});
  CHECK(file.at("twice").to_vector<int>() == std::vector<int>{1, 2, 3, 4, 5, 6});
  CHECK(!file.at("twice").requires_grad());

  const Tensor half = f16_tensor({1, 2, 3, 4, 5, 6}, DType::f16).view({2, 3});
  save_safetensors(folder / "b", {{"half", half.t()}});
  const Safetensors second = load_safetensors(folder / "b");
  const auto* bits = static_cast<const uint16_t*>(second.at("half").data_ptr());
  CHECK(std::vector<uint16_t>(bits, bits + 6) == std::vector<uint16_t>{1, 4, 2, 5, 3, 6});
}

TEST_CASE("save_safetensors: a file of no tensors, and a format of one's own") {
  TemporaryFolder folder;
  save_safetensors(folder / "a", {}, {{"format", "mine"}});
  CHECK(load_safetensors(folder / "a").tensors.empty());
  CHECK(load_safetensors(folder / "a").metadata == Metadata{{"format", "mine"}});
  CHECK(error_of("{}", "") == "");
}

TEST_CASE("save_safetensors: what must not be saved") {
  TemporaryFolder folder;
  const Tensor t = zeros({1});
  const auto save = [&](const NamedTensors& tensors, const Metadata& metadata = {}) {
    save_safetensors(folder / "a", tensors, metadata);
  };
  CHECK_THROWS_AS(save({{"a", t}, {"b", t}, {"a", t}}), ValueError);
  CHECK_THROWS_AS(save({{"__metadata__", t}}), ValueError);
  CHECK_THROWS_AS(save({{"a", Tensor()}}), ValueError);
  CHECK_THROWS_AS(save({{"a\0b"s, t}}), ValueError);
  CHECK_THROWS_AS(save({{std::string(5000, 'a'), t}}), ValueError);
  CHECK_THROWS_AS(save({{"\xFF", t}}), ValueError);
  CHECK_THROWS_AS(save({{"a", t}}, {{"k", "\xFF"}}), ValueError);
  CHECK(folder.entries() == 0);
  CHECK_THROWS_AS(load_safetensors(folder / "a"), IoError);
}

TEST_CASE("save_safetensors and load_safetensors: integers keep every bit") {
  TemporaryFolder folder;
  std::vector<int64_t> values{INT64_MIN, INT64_MAX, INT64_MIN + 1, INT64_MAX - 1, -1, 0};
  for (int shift = 52; shift < 63; ++shift) values.push_back((int64_t{1} << shift) + 1);
  save_safetensors(folder / "a",
                   {{"t", tensor(values)}, {"scalar", tensor<int64_t>({INT64_MAX}, Shape{})}},
                   {{"n", "9223372036854775807"}});
  const Safetensors file = load_safetensors(folder / "a");
  CHECK(file.at("t").to_vector<int64_t>() == values);
  CHECK(file.at("scalar").item<int64_t>() == INT64_MAX);
  CHECK(file.at("scalar").dim() == 0);
  CHECK(file.metadata.at("n") == "9223372036854775807");
}

TEST_CASE("save_safetensors and load_safetensors: names and metadata of any text") {
  TemporaryFolder folder;
  const std::vector<std::string> texts{"",
                                       " ",
                                       "\"\\/\b\f\n\r\t\x01\x1f\x7f",
                                       "\xC3\xA4",
                                       "\xE2\x82\xAC",
                                       "\xF0\x9F\x98\x80",
                                       "\xEF\xBF\xBF",
                                       "tied:a",
                                       "../a",
                                       "dtype",
                                       std::string(4096, 'x')};
  NamedTensors tensors;
  Metadata metadata;
  for (const std::string& text : texts) {
    tensors.emplace_back(text, full({2}, static_cast<double>(tensors.size())));
    metadata[text] = "!" + text;
    metadata[text + "key"] = "\0 of any length" + text + std::string(5000, 'v');
  }
  const Tensor shared = full({3}, 7);  // tied, with a name of the greatest length
  tensors.emplace_back("y", shared);
  tensors.emplace_back(std::string(4096, 'z'), shared);
  metadata["a\0b"s] = "c\0d"s;
  save_safetensors(folder / "a", tensors, metadata);
  const Safetensors file = load_safetensors(folder / "a");
  REQUIRE(file.tensors.size() == tensors.size());
  for (const auto& [name, t] : tensors)
    CHECK(file.at(name).to_vector<float>() == t.to_vector<float>());
  metadata["format"] = "pt";
  CHECK(file.metadata == metadata);
}

TEST_CASE("save_safetensors: many tensors cost their number, not its square") {
  TemporaryFolder folder;
  NamedTensors tensors;
  const Tensor all = arange(0, 100'000);
  for (int64_t i = 0; i < 100'000; ++i)
    tensors.emplace_back("layer." + std::to_string(i), all.narrow(0, i, 1));
  save_safetensors(folder / "a", tensors);  // minutes, if each name is compared with all before
  const Safetensors file = load_safetensors(folder / "a");
  REQUIRE(file.tensors.size() == tensors.size());
  for (size_t i = 0; i < tensors.size(); i += 997)
    CHECK(file.tensors[i].second.item<int64_t>() == static_cast<int64_t>(i));
}

TEST_CASE("Safetensors::at: a missing name lists what is there") {
  Safetensors file;
  file.tensors = {{"fc.weight", zeros({1})}, {"fc.bias", zeros({1})}};
  CHECK(file.find("nothing") == nullptr);
  CHECK_THROWS_WITH_AS(
      file.at("fc.wieght"),
      "safetensors: no tensor is named 'fc.wieght'; the file has 'fc.weight', 'fc.bias'",
      ValueError);
}

TEST_CASE("load_safetensors: a file from Python's safetensors") {
  const Safetensors file = load_safetensors(golden("python.safetensors"));
  CHECK(file.metadata == Metadata{{"format", "pt"}, {"made by", "safetensors"}});
  CHECK(file.tensors.size() == 11);
  CHECK(file.at("weight").shape() == Shape{2, 3});
  CHECK(file.at("weight").to_vector<float>() ==
        std::vector<float>{-1, -0.75f, -0.5f, -0.25f, 0, 0.25f});
  CHECK(file.at("double").to_vector<double>() == std::vector<double>{0.1, -1e300, INFINITY});
  CHECK(file.at("long").shape() == Shape{2, 1});
  CHECK(file.at("long").to_vector<int64_t>() == std::vector<int64_t>{-(int64_t{1} << 62), 7});
  CHECK(file.at("int").to_vector<int32_t>() == std::vector<int32_t>{-5, 2147483647});
  CHECK(file.at("byte").to_vector<int>() == std::vector<int>{0, 255, 3});
  CHECK(file.at("flag").to_vector<bool>() == std::vector<bool>{true, false, true});
  CHECK(file.at("scalar").dim() == 0);
  CHECK(file.at("scalar").item<float>() == 2.5f);
  CHECK(file.at("empty").shape() == Shape{0, 4});
  CHECK(file.at("n\xC3\xA4me \"quoted\"").item<int>() == 9);
  CHECK(file.at("half").dtype() == DType::f16);
  CHECK(file.at("brain").dtype() == DType::bf16);
  const auto bits = [](const Tensor& t) {
    std::vector<uint16_t> v(static_cast<size_t>(t.numel()));
    std::memcpy(v.data(), t.data_ptr(), v.size() * 2);
    return v;
  };
  CHECK(bits(file.at("half")) == std::vector<uint16_t>{0x3C00, 0xC100});
  CHECK(bits(file.at("brain")) == std::vector<uint16_t>{0x3F80, 0xC000});
}

TEST_CASE("load_safetensors: headers that break a rule") {
  const std::string a = entry("a", "U8", "[2]", "[0,2]");
  REQUIRE(error_of("{" + a + "}", "xy") == "");
  REQUIRE(error_of("{" + a + "}   ", "xy") == "");

  CHECK_ERROR("it has 0 bytes", "");
  CHECK_ERROR("it has 7 bytes", "1234567");
  CHECK_ERROR("claims a header of 18446744073709551615 bytes, and the limit is",
              std::string(8, '\xFF') + "{}");
  CHECK_ERROR("claims a header of 100000001 bytes", "\x01\xE1\xF5\x05\0\0\0\0{}"s);
  CHECK_ERROR("claims a header of 3 bytes and has only 2", "\x03\0\0\0\0\0\0\0{}"s);
  CHECK_ERROR("not one JSON object", "", "");
  CHECK_ERROR("not one JSON object", "[]", "");
  CHECK_ERROR("not one JSON object", " {}", "");
  CHECK_ERROR("not one JSON object", "\xEF\xBB\xBF{}", "");
  CHECK_ERROR("not one JSON object", "{}\n", "");
  CHECK_ERROR("not one JSON object", "{}\0"s, "");
  CHECK_ERROR("not JSON at its byte", "{}{}", "");
  CHECK_ERROR("not JSON at its byte", "{" + a + ",}", "xy");
  CHECK_ERROR("not JSON at its byte", "{\"\xFF\":{}}", "");

  CHECK_ERROR("the name 'a' occurs twice", "{" + a + "," + a + "}", "xy");
  CHECK_ERROR("the key 'dtype' occurs twice in tensor 'a'", R"({"a":{"dtype":"U8","dtype":"U8"}})",
              "");
  CHECK_ERROR("the name '__metadata__' occurs twice",
              R"({"__metadata__":{"a":"b"},"__metadata__":{"c":"d"}})", "");
  CHECK_ERROR("the key 'a' occurs twice in __metadata__", R"({"__metadata__":{"a":"b","a":"c"}})",
              "");
  CHECK_ERROR("a name with a NUL byte", R"({"a\u0000b":{}})", "");
  CHECK_ERROR("not JSON at its byte", R"({"\ud800":{}})", "");  // half of a character
  CHECK_ERROR("a name of 4097 bytes", "{\"" + std::string(4097, 'a') + "\":{}}", "");

  CHECK_ERROR("tensor 'a' has no \"dtype\"", R"({"a":{}})", "");
  CHECK_ERROR("tensor 'a' has no \"data_offsets\"", R"({"a":{"dtype":"U8","shape":[]}})", "");
  CHECK_ERROR("has 1 data_offsets, not 2", "{" + entry("a", "U8", "[2]", "[2]") + "}", "xy");
  CHECK_ERROR("has 3 data_offsets, not 2", "{" + entry("a", "U8", "[2]", "[0,1,2]") + "}", "xy");
  CHECK_ERROR("-2 in tensor 'a' is negative", "{" + entry("a", "U8", "[-2]", "[0,2]") + "}", "xy");
  CHECK_ERROR("2.0 in tensor 'a' is not a plain integer",
              "{" + entry("a", "U8", "[2.0]", "[0,2]") + "}", "xy");
  CHECK_ERROR("2e0 in tensor 'a' is not a plain integer",
              "{" + entry("a", "U8", "[2e0]", "[0,2]") + "}", "xy");
  CHECK_ERROR("is above 2^48", "{" + entry("a", "U8", "[281474976710657]", "[0,2]") + "}", "xy");
  CHECK_ERROR("is not a plain integer",
              "{" + entry("a", "U8", "[99999999999999999999]", "[0,2]") + "}", "xy");
  CHECK_ERROR("the number 9223372036854775809 in tensor 'a' is above 2^48",
              "{" + entry("a", "U8", "[2]", "[0,9223372036854775809]") + "}", "xy");
  CHECK_ERROR("the number 18446744073709551615 in tensor 'a' is above 2^48",
              "{" + entry("a", "U8", "[2]", "[0,18446744073709551615]") + "}", "xy");
  CHECK_ERROR("a string in tensor 'a'", "{" + entry("a", "U8", "\"2\"", "[0,2]") + "}", "xy");
  CHECK_ERROR("null in tensor 'a'", "{" + entry("a", "U8", "null", "[0,2]") + "}", "xy");
  CHECK_ERROR("a number in tensor 'a'", R"({"a":{"dtype":8}})", "");
  CHECK_ERROR("an array in tensor 'a'", "{" + entry("a", "U8", "[[2]]", "[0,2]") + "}", "xy");
  CHECK_ERROR("nests an object", R"({"a":{"dtype":{}}})", "");
  CHECK_ERROR("a number in __metadata__", R"({"__metadata__":{"a":1}})", "");
  CHECK_ERROR("an array in __metadata__", R"({"__metadata__":{"a":[]}})", "");
  CHECK_ERROR("where it must not", R"({"a":1})", "");
  CHECK_ERROR("where it must not", R"({"__metadata__":"x"})", "");
  CHECK_ERROR("array", R"({"a":[]})", "");
  CHECK_ERROR(
      "has more than 64 numbers",
      "{\"a\":{\"shape\":[1" +
          [] {
            std::string s;
            for (int i = 0; i < 64; ++i) s += ",1";
            return s;
          }() +
          "]}}",
      "");

  CHECK_ERROR("a byte other than 0 and 1", "{" + entry("a", "BOOL", "[2]", "[0,2]") + "}",
              "\x01\x02");

  // keys of later versions are ignored, whatever they hold
  for (const char* value :
       {"1", "-1", "2.5e300", "true", "null", "\"x\"", "[1,-1,true,2.5]", "99999999999999999999"}) {
    CAPTURE(value);
    CHECK(error_of("{\"a\":{\"new\":" + std::string(value) +
                       ",\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]}}",
                   "xy") == "");
  }
}

TEST_CASE(
    "load_safetensors: a tensor of an unsupported form is an error only where it is asked for") {
  TemporaryFolder folder;
  std::string header = entry("good", "U8", "[2]", "[0,2]");
  size_t end = 2;
  const std::vector<std::string> dtypes{"F8_E4M3", "F8_E5M2", "I4",  "I128", "U16",
                                        "U32",     "U64",     "C64", "F4",  "NEW"};
  for (const std::string& dtype : dtypes) {
    header += "," + entry(dtype, dtype, "[1]",
                          "[" + std::to_string(end) + "," + std::to_string(end + 2) + "]");
    end += 2;
  }
  header += "," + entry("nine", "U8", "[1,1,1,1,1,1,1,1,2]",
                        "[" + std::to_string(end) + "," + std::to_string(end + 2) + "]");
  put_file(folder / "a", with_length("{" + header + "}", "xy" + std::string(end, 'z')));
  const Safetensors file = load_safetensors(folder / "a");
  REQUIRE(file.tensors.size() == 1);
  CHECK(file.at("good").to_vector<int>() == std::vector<int>{'x', 'y'});
  CHECK(file.unsupported.size() == dtypes.size() + 1);
  for (const std::string& dtype : dtypes)
    for (const std::string& text : {::error_of<ValueError>([&] { file.at(dtype); }),
                                    ::error_of<ValueError>([&] { file.find(dtype); })})
      CHECK_MESSAGE(contains(text, "tensor '" + dtype + "' has dtype '" + dtype + "'"), text);
  CHECK(contains(::error_of<ValueError>([&] { file.at("nine"); }), "has 9 dimensions"));
  CHECK(file.find("none") == nullptr);
  // its place in the file is checked like any other's
  CHECK_ERROR("must begin at 2",
              "{" + entry("a", "F8_E4M3", "[2]", "[0,2]") + "," + entry("b", "F8_E4M3", "[2]", "[3,5]") + "}",
              "vwxyz");
  CHECK_ERROR("its tensors end at", "{" + entry("a", "F8_E4M3", "[2]", "[0,2]") + "}", "xyz");
}

TEST_CASE("load_safetensors says what else a file is") {
  const std::string rest(100, '\1');
  CHECK_ERROR("x.safetensors\", weights_only=True).items()}", "PK\3\4\0\0\x08\x08"s + rest);
  TemporaryFolder folder;
  for (const std::string name : {"net.pt", "a.npz"}) {
    put_file(folder / name, "PK\3\4\0\0\x08\x08"s + rest);
    const std::string text = ::error_of<IoError>([&] { load_safetensors(folder / name); });
    const bool torch = name == "net.pt";
    CHECK_MESSAGE(contains(text, (torch ? "torch.load(\"" : "numpy.load(\"") + (folder / name)),
                  text);
    CHECK_MESSAGE(
        contains(text, ", \"" + (folder / (torch ? "net" : "a")) + ".safetensors\"), with"), text);
  }
  CHECK_ERROR("it is a GGUF file; convert it with", "GGUF\3\0\0\0"s + rest);
  CHECK_ERROR("a zip archive, as torch.save writes", "PK\3\4\0\0\0\0"s + rest);
  CHECK_ERROR("a Python pickle", "\x80\x02\x8a\nl\xfc\x9c\x46"s + rest);
  CHECK_ERROR("a NumPy array", "\x93NUMPY\1\0"s + rest);
  CHECK_ERROR("an HDF5 file", "\x89HDF\r\n\x1a\n"s + rest);
  CHECK_ERROR("git lfs pull", "version https://git-lfs.github.com/spec/v1\n");
  CHECK_ERROR("a web page", "<!DOCTYPE html><html>");
  CHECK_ERROR("the index of a model in several files", "{\n  \"metadata\": {}}");
  // a file that is cut off may begin with the same bytes
  CHECK_ERROR("claims a header of 123 bytes and has only 2", "{\0\0\0\0\0\0\0{}"s);
  CHECK_ERROR("claims a header of 640 bytes and has only 2", "\x80\2\0\0\0\0\0\0{}"s);
}

TEST_CASE("save_safetensors writes tied tensors once; load_safetensors ties them again") {
  TemporaryFolder folder;
  const Tensor t = arange(0, 6, 1, {.dtype = DType::f32}).view({2, 3});
  const NamedTensors tied{{"a", t},          {"b", t.detach()},     {"row", t[0]},
                          {"t", t.t()},      {"flat", t.view({6})}, {"c", t.view({2, 3})},
                          {"e", zeros({0})}, {"f", zeros({0})}};
  save_safetensors(folder / "a", tied, {{"tied:x", "text of the user"}});
  const Safetensors file = load_safetensors(folder / "a");
  CHECK(file.tensors.size() == tied.size());
  for (const auto& [name, tensor] : tied) {
    CHECK(file.at(name).shape() == tensor.shape());
    CHECK(file.at(name).to_vector<float>() == tensor.to_vector<float>());
  }
  for (const char* name : {"b", "c"})
    CHECK(file.at(name).data_ptr() == file.at("a").data_ptr());
  for (const char* name : {"row", "t", "flat"})
    CHECK(file.at(name).data_ptr() != file.at("a").data_ptr());
  CHECK(file.metadata == Metadata{{"format", "pt"}, {"tied:x", "text of the user"}});
  save_safetensors(folder / "b", {{"a", t}, {"b", t}}, {{"tied:b", "of the user"}});
  CHECK(load_safetensors(folder / "b").at("b").to_vector<int>() == t.to_vector<int>());
  CHECK(load_safetensors(folder / "b").metadata.at("tied:b") == "of the user");
}

TEST_CASE("save_safetensors: what cannot be written leaves file, folder and tensors as they were") {
  TemporaryFolder folder;
  const Tensor t = ones({2, 3});
  save_safetensors(folder / "a", {{"t", t}});
  const std::string before = get_file(folder / "a");
  CHECK_THROWS_AS(save_safetensors(folder / "a", {{"t", t.t()}, {"u", Tensor()}}), ValueError);
  CHECK_THROWS_AS(save_safetensors(folder / "no/a", {{"t", t.t()}}), IoError);
  CHECK(get_file(folder / "a") == before);
  CHECK(folder.entries() == 1);
  CHECK(t.to_vector<int>() == std::vector<int>(6, 1));
}

TEST_CASE("load_safetensors: offsets and sizes that do not agree") {
  const auto two = [](const std::string& first, const std::string& second) {
    return "{" + entry("a", "U8", "[2]", first) + "," + entry("b", "U8", "[2]", second) + "}";
  };
  REQUIRE(error_of(two("[0,2]", "[2,4]"), "wxyz") == "");
  REQUIRE(error_of(two("[2,4]", "[0,2]"), "wxyz") == "");
  CHECK_ERROR("tensor 'b' spans bytes 1 to 3, and must begin at 2", two("[0,2]", "[1,3]"),
              "wxy");  // overlap
  CHECK_ERROR("tensor 'b' spans bytes 3 to 5, and must begin at 2", two("[0,2]", "[3,5]"),
              "vwxyz");  // hole
  CHECK_ERROR("tensor 'a' spans bytes 1 to 3, and must begin at 0",
              "{" + entry("a", "U8", "[2]", "[1,3]") + "}", "xyz");
  CHECK_ERROR("spans bytes 2 to 0", "{" + entry("a", "U8", "[2]", "[2,0]") + "}", "xy");
  CHECK_ERROR("needs 3 bytes, and its data_offsets span 2",
              "{" + entry("a", "U8", "[3]", "[0,2]") + "}", "xy");
  CHECK_ERROR("needs 8 bytes, and its data_offsets span 2",
              "{" + entry("a", "F32", "[2]", "[0,2]") + "}", "xy");
  CHECK_ERROR("its tensors end at byte 63 and it has 64 bytes",
              "{" + entry("a", "U8", "[2]", "[0,2]") + "}", "xyz");
  CHECK_ERROR("its tensors end at byte", "{" + entry("a", "U8", "[2]", "[0,2]") + "}", "x");
  CHECK_ERROR("its tensors end at byte",
              "{" + entry("a", "U8", "[281474976710656]", "[0,281474976710656]") + "}", "x");
  CHECK_ERROR("overflow", "{" + entry("a", "U8", "[16777216,16777216,16777216]", "[0,0]") + "}",
              "");
  CHECK_ERROR("overflow", "{" + entry("a", "U8", "[0,16777216,16777216,16777216]", "[0,0]") + "}",
              "");
  CHECK_ERROR("overflow", "{" + entry("a", "F64", "[4194304,4194304,262144]", "[0,0]") + "}", "");
  // an empty tensor may stand where another begins
  CHECK(error_of(
            "{" + entry("b", "U8", "[2]", "[0,2]") + "," + entry("a", "F32", "[0]", "[0,0]") + "}",
            "xy") == "");
}

TEST_CASE(
    "load_safetensors: a file cut or changed at any byte fails cleanly or still makes sense") {
  const std::string good = get_file(golden("python.safetensors"));
  REQUIRE(error_of(good) == "");
  for (size_t n = 0; n < good.size(); ++n) CHECK(error_of(good.substr(0, n)) != "");
  CHECK(error_of(good + "x") != "");
  for (size_t i = 0; i < good.size(); ++i)
    for (int flip : {0x01, 0x10, 0x80, 0xFF}) {
      std::string bad = good;
      bad[i] = static_cast<char>(bad[i] ^ flip);
      error_of(bad);  // anything but an IoError fails the test by leaving it
    }
}

TEST_CASE("load_safetensors: deep nesting and a long header cost no more than their length") {
  CHECK_ERROR("array", "{\"a\":" + std::string(1'000'000, '[') + "}", "");
  std::string many = "{";
  for (int i = 0; i < 20'000; ++i)
    many += (i ? "," : "") + entry("t" + std::to_string(i), "U8", "[0]", "[0,0]");
  CHECK(error_of(many + "}", "") == "");
}

TEST_CASE("save_safetensors: metadata that would be read as a tensor's other name is refused") {
  const TemporaryFolder folder;
  const std::string path = folder / "a.safetensors";
  CHECK_THROWS_AS(save_safetensors(path, {{"a", ones({2})}}, {{"tied:z", "a"}}), ValueError);
  save_safetensors(path, {{"a", ones({2})}}, {{"tied:z", "nobody"}});
  CHECK(load_safetensors(path).metadata.at("tied:z") == "nobody");
}
