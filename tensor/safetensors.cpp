// The header is read by a SAX handler that refuses at the first byte that breaks a rule, so a
// hostile header costs its own length and nothing more; then offsets and sizes are checked against
// each other, and only then are tensors made. Format: github.com/huggingface/safetensors,
// README.md.
#include <lockstep/tensor/safetensors.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <set>
#include <unordered_set>

#include <lockstep/tensor/file.h>
#include <nlohmann/json.hpp>

namespace lockstep {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors data is little-endian");

constexpr uint64_t kHeaderLimit = 100'000'000;          // the reference's
constexpr uint64_t kLargestNumber = uint64_t{1} << 48;  // the published schema's
constexpr size_t kLongestName = 4096;
constexpr size_t kAlignment = 64;

struct Format {
  const char* name;
  DType dtype;
};
constexpr Format kFormats[] = {{"F32", DType::f32},   {"F64", DType::f64},     {"F16", DType::f16},
                               {"BF16", DType::bf16}, {"I64", DType::i64},     {"I32", DType::i32},
                               {"U8", DType::u8},     {"BOOL", DType::boolean}};

const char* format_of(DType dtype) {
  for (const Format& f : kFormats)
    if (f.dtype == dtype) return f.name;
  return "";
}

// A name from a file in a message: short, and without control characters.
std::string in_quotes(std::string_view name) {
  std::string text = "'";
  for (char c : name.substr(0, 80))
    text += static_cast<unsigned char>(c) < 0x20 || c == 0x7f ? '?' : c;
  return text + (name.size() > 80 ? "...'" : "'");
}

struct Entry {
  std::string name, dtype;
  std::vector<uint64_t> shape, offsets;
};

// Collects the header's entries. Depth 1 is the header, 2 an entry or the metadata, 3 an array.
class HeaderReader : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit HeaderReader(const std::string& path) : path_(path) {}

  std::vector<Entry> entries;
  Metadata metadata;

  /// The file breaks the format.
  template <class... Parts>
  [[noreturn]] void refuse(const Parts&... parts) const {
    unsupported(parts..., "; the file is damaged or is not a safetensors file");
  }
  /// The file may be fine, and is not for us.
  template <class... Parts>
  [[noreturn]] void unsupported(const Parts&... parts) const {
    fail<IoError>("load_safetensors: ", path_, ": ", parts...);
  }

  bool start_object(size_t) override {
    if (depth_ == 1) {
      if (!in_metadata_)
        entries.push_back({.name = name_, .dtype = {}, .shape = {}, .offsets = {}});
      keys_.clear();
    } else if (depth_ != 0) {
      refuse("the header nests an object in ", where());
    }
    ++depth_;
    return true;
  }
  bool end_object() override {
    if (--depth_ != 1) return true;
    if (!in_metadata_) {
      for (const char* key : {"dtype", "shape", "data_offsets"})
        if (!keys_.contains(key)) refuse("tensor ", in_quotes(name_), " has no \"", key, "\"");
      if (entries.back().offsets.size() != 2)
        refuse("tensor ", in_quotes(name_), " has ", entries.back().offsets.size(),
               " data_offsets, not 2");
    }
    return true;
  }
  bool start_array(size_t) override {
    if (depth_ != 2 || in_metadata_) refuse("the header has an array in ", where());
    numbers_ = key_ == "shape"          ? &entries.back().shape
               : key_ == "data_offsets" ? &entries.back().offsets
                                        : nullptr;
    ++depth_;
    return true;
  }
  bool end_array() override {
    --depth_;
    return true;
  }
  bool key(std::string& key) override {
    if (key.size() > kLongestName) refuse("the header has a name of ", key.size(), " bytes");
    if (key.find('\0') != std::string::npos)
      refuse("the header has a name with a NUL byte: ", in_quotes(key));
    if (depth_ == 1) {
      if (!names_.insert(key).second)
        refuse("the name ", in_quotes(key), " occurs twice in the header");
      name_ = key;
      in_metadata_ = key == "__metadata__";
    } else {
      if (!keys_.insert(key).second)
        refuse("the key ", in_quotes(key), " occurs twice in ", where());
      key_ = key;
    }
    return true;
  }
  bool string(std::string& value) override {
    if (depth_ == 2 && in_metadata_) {
      metadata[key_] = value;
    } else if (depth_ == 2 && key_ == "dtype") {
      entries.back().dtype = value;
    } else {
      other("a string");
    }
    return true;
  }
  bool number_unsigned(uint64_t value) override {
    if (value > kLargestNumber) refuse("the number ", value, " in ", where(), " is above 2^48");
    if (depth_ == 3 && numbers_) {
      // No tensor has more; stops a header that is one long list of numbers.
      if (numbers_->size() == 64) refuse("a list in ", where(), " has more than 64 numbers");
      numbers_->push_back(value);
    } else {
      other("a number");
    }
    return true;
  }
  bool number_integer(int64_t value) override {
    refuse("the number ", value, " in ", where(), " is negative");
  }
  bool number_float(double, const std::string& text) override {
    refuse("the number ", text.substr(0, 40), " in ", where(), " is not a plain integer");
  }
  bool null() override { return other("null"); }
  bool boolean(bool) override { return other("a boolean"); }
  bool binary(nlohmann::json::binary_t&) override { return other("binary data"); }
  bool parse_error(size_t at, const std::string&, const nlohmann::json::exception&) override {
    refuse("the header is not JSON at its byte ", at);
  }

 private:
  std::string where() const {
    if (depth_ <= 0 || names_.empty()) return "the header";
    return in_metadata_ ? "__metadata__" : str_cat("tensor ", in_quotes(name_));
  }
  // A value that is no part of the format: refused where it matters, passed over in an unknown key.
  bool other(std::string_view what) const {
    const bool known = key_ == "dtype" || key_ == "shape" || key_ == "data_offsets";
    if (depth_ < 2 || in_metadata_ || known)
      refuse("the header has ", what, " in ", where(), " where it must not");
    return true;
  }

  const std::string& path_;
  int depth_ = 0;
  bool in_metadata_ = false;
  std::string name_, key_;
  std::unordered_set<std::string> names_;
  std::set<std::string> keys_;
  std::vector<uint64_t>* numbers_ = nullptr;
};

DType dtype_of_entry(const HeaderReader& header, const Entry& entry) {
  for (const Format& f : kFormats)
    if (entry.dtype == f.name) return f.dtype;
  header.unsupported("tensor ", in_quotes(entry.name), " has dtype ", in_quotes(entry.dtype),
                     ", and only F32, F64, F16, BF16, I64, I32, U8 and BOOL are read; convert it "
                     "where it was made");
}

// The entry's shape, once it is known to fill its bytes exactly.
Shape checked_shape(const HeaderReader& header, const Entry& entry, DType dtype) {
  if (entry.shape.size() > static_cast<size_t>(Shape::kMaxDims))
    header.unsupported("tensor ", in_quotes(entry.name), " has ", entry.shape.size(),
                       " dimensions, and at most ", Shape::kMaxDims,
                       " are read; reshape it where it was made");
  Shape shape;
  // Strides are products too, so sizes beside a 0 must not overflow either.
  int64_t extent = static_cast<int64_t>(size_of(dtype));
  for (uint64_t d : entry.shape) {
    shape.push_back(static_cast<int64_t>(d));
    if (__builtin_mul_overflow(extent, static_cast<int64_t>(std::max<uint64_t>(d, 1)), &extent))
      header.refuse("the sizes of tensor ", in_quotes(entry.name), " overflow: ", shape, "...");
  }
  const uint64_t bytes = entry.offsets[1] - entry.offsets[0];
  const uint64_t needed = static_cast<uint64_t>(shape.numel()) * size_of(dtype);
  if (bytes != needed)
    header.refuse("tensor ", in_quotes(entry.name), " of shape ", shape, " and ", dtype, " needs ",
                  needed, " bytes, and its data_offsets span ", bytes);
  return shape;
}

void check_name(std::string_view name, std::set<std::string_view>& names) {
  LOCKSTEP_CHECK(
      name != "__metadata__", ValueError,
      "save_safetensors: the format keeps the name '__metadata__' for itself; rename the tensor");
  LOCKSTEP_CHECK(name.size() <= kLongestName && name.find('\0') == std::string_view::npos,
                 ValueError, "save_safetensors: a name has at most ", kLongestName,
                 " bytes and no NUL, got ", in_quotes(name), " of ", name.size(), " bytes");
  LOCKSTEP_CHECK(names.insert(name).second, ValueError, "save_safetensors: names must differ, and ",
                 in_quotes(name), " is given twice");
}

std::string make_header(const NamedTensors& tensors, const Metadata& metadata) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  Metadata all = metadata;
  all.emplace("format", "pt");
  header["__metadata__"] = all;
  uint64_t end = 0;
  for (const auto& [name, tensor] : tensors) {
    const uint64_t begin = end;
    end += static_cast<uint64_t>(tensor.numel()) * size_of(tensor.dtype());
    header[name] = {{"dtype", format_of(tensor.dtype())},
                    {"shape", std::vector<int64_t>(tensor.shape().begin(), tensor.shape().end())},
                    {"data_offsets", {begin, end}}};
  }
  std::string text;
  try {
    text = header.dump();
  } catch (const nlohmann::json::exception&) {
    fail<ValueError>("save_safetensors: names and metadata must be UTF-8, and one of them is not");
  }
  const size_t start = sizeof(uint64_t) + text.size();
  text.append((kAlignment - start % kAlignment) % kAlignment, ' ');
  LOCKSTEP_CHECK(text.size() <= kHeaderLimit, ValueError, "save_safetensors: the header has ",
                 text.size(), " bytes, more than the ", kHeaderLimit,
                 " that readers accept; save in several files");
  return text;
}

}  // namespace

const Tensor* Safetensors::find(std::string_view name) const {
  for (const auto& [key, tensor] : tensors)
    if (key == name) return &tensor;
  return nullptr;
}

const Tensor& Safetensors::at(std::string_view name) const {
  if (const Tensor* tensor = find(name)) return *tensor;
  std::string names;
  for (size_t i = 0; i < tensors.size() && i < 10; ++i)
    names += (i ? ", " : "") + in_quotes(tensors[i].first);
  if (tensors.size() > 10) names += ", ...";
  fail<ValueError>("safetensors: no tensor is named ", in_quotes(name), "; the file has ",
                   names.empty() ? "none" : names);
}

void save_safetensors(const std::string& path, const NamedTensors& tensors,
                      const Metadata& metadata) {
  std::set<std::string_view> names;
  for (const auto& [name, tensor] : tensors) {
    check_name(name, names);
    LOCKSTEP_CHECK(tensor.defined(), ValueError, "save_safetensors: tensor ", in_quotes(name),
                   " is undefined");
  }
  NamedTensors sorted = tensors;
  std::stable_sort(sorted.begin(), sorted.end(), [](const auto& a, const auto& b) {
    return size_of(a.second.dtype()) > size_of(b.second.dtype());
  });
  const std::string header = make_header(sorted, metadata);
  write_file_atomically(path, [&](FileWriter& out) {
    const uint64_t length = header.size();
    out.write(&length, sizeof length);
    out.write(header);
    for (const auto& [name, tensor] : sorted) {
      const Tensor dense = tensor.detach().to(Device{}).contiguous();
      if (dense.numel() > 0)
        out.write(dense.data_ptr(), static_cast<size_t>(dense.numel()) * size_of(dense.dtype()));
    }
  });
}

Safetensors load_safetensors(const std::string& path) {
  const FileReader file("load_safetensors", path);
  HeaderReader header(path);
  uint64_t length = 0;
  if (file.size() < sizeof length)
    header.refuse("it has ", file.size(), " bytes, and the header's length alone takes 8");
  file.read(0, &length, sizeof length);
  if (length > kHeaderLimit)
    header.refuse("it claims a header of ", length, " bytes, and the limit is ", kHeaderLimit);
  const uint64_t data = sizeof length + length;
  if (data > file.size())
    header.refuse("it claims a header of ", length, " bytes and has only ",
                  file.size() - sizeof length, " after the length");

  std::string text(length, '\0');
  file.read(sizeof length, text.data(), text.size());
  text.erase(text.find_last_not_of(' ') + 1);  // the padding
  if (text.empty() || text.front() != '{' || text.back() != '}')
    header.refuse("its header is not one JSON object from '{' to '}'");
  nlohmann::json::sax_parse(text, &header);

  std::stable_sort(header.entries.begin(), header.entries.end(),
                   [](const Entry& a, const Entry& b) { return a.offsets < b.offsets; });
  uint64_t end = 0;
  for (const Entry& entry : header.entries) {
    if (entry.offsets[0] != end || entry.offsets[1] < end)
      header.refuse("tensor ", in_quotes(entry.name), " spans bytes ", entry.offsets[0], " to ",
                    entry.offsets[1], ", and must begin at ", end, " where the one before it ends");
    end = entry.offsets[1];
  }
  if (data + end != file.size())
    header.refuse("its tensors end at byte ", data + end, " and it has ", file.size(), " bytes");

  Safetensors result;
  for (const Entry& entry : header.entries) {
    const DType dtype = dtype_of_entry(header, entry);
    Tensor tensor = empty(checked_shape(header, entry, dtype), {.dtype = dtype});
    const size_t bytes = entry.offsets[1] - entry.offsets[0];
    if (bytes > 0) file.read(data + entry.offsets[0], tensor.data_ptr(), bytes);
    if (dtype == DType::boolean) {
      const auto* p = static_cast<const unsigned char*>(tensor.data_ptr());
      if (std::any_of(p, p + bytes, [](unsigned char b) { return b > 1; }))
        header.refuse("tensor ", in_quotes(entry.name),
                      " is BOOL and has a byte other than 0 and 1");
    }
    result.tensors.emplace_back(entry.name, std::move(tensor));
  }
  result.metadata = std::move(header.metadata);
  return result;
}

}  // namespace lockstep
