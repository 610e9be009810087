// The header is read by a SAX handler that refuses at the first byte that breaks a rule, so a
// hostile header costs its own length and nothing more; then offsets are checked against each other
// and the file's length. Format: github.com/huggingface/safetensors, README.md.
#include <lockstep/tensor/safetensors_header.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <unordered_set>

namespace lockstep::detail {

std::string quoted_name(std::string_view name) {
  std::string text = "'";
  size_t end = std::min<size_t>(name.size(), 80);
  while (end > 0 && end < name.size() && (name[end] & 0xC0) == 0x80) --end;  // whole characters
  for (char c : name.substr(0, end))
    text += static_cast<unsigned char>(c) < 0x20 || c == 0x7f ? '?' : c;
  return text + (end < name.size() ? "...'" : "'");
}

void refuse_safetensors(const FileReader& file, std::string_view what) {
  fail<IoError>("load_safetensors: ", file.path(), ": ", what,
                "; the file is damaged or is not a safetensors file");
}

namespace {

constexpr uint64_t kLargestNumber = uint64_t{1} << 48;  // the published schema's

// Collects the header's entries, and refuses at the first byte that breaks a rule. Depth 1 is the
// header, 2 an entry or the metadata, 3 an array.
class HeaderReader : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit HeaderReader(const FileReader& file) : file_(file) {}

  std::vector<TensorEntry> entries;
  Metadata metadata;

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
        if (!keys_.contains(key)) refuse("tensor ", quoted_name(name_), " has no \"", key, "\"");
      if (entries.back().offsets.size() != 2)
        refuse("tensor ", quoted_name(name_), " has ", entries.back().offsets.size(),
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
    if (depth_ == 1) {
      if (key.size() > kLongestTensorName)
        refuse("the header has a name of ", key.size(), " bytes");
      if (key.find('\0') != std::string::npos)
        refuse("the header has a name with a NUL byte: ", quoted_name(key));
      if (!names_.insert(key).second)
        refuse("the name ", quoted_name(key), " occurs twice in the header");
      name_ = key;
      in_metadata_ = key == "__metadata__";
    } else {
      if (!keys_.insert(key).second)
        refuse("the key ", quoted_name(key), " occurs twice in ", where());
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
    if (depth_ != 3 || !numbers_) return other("a number");
    if (value > kLargestNumber) refuse("the number ", value, " in ", where(), " is above 2^48");
    // No tensor has more; stops a header that is one long list of numbers.
    if (numbers_->size() == 64) refuse("a list in ", where(), " has more than 64 numbers");
    numbers_->push_back(value);
    return true;
  }
  bool number_integer(int64_t value) override {
    if (depth_ != 3 || !numbers_) return other("a number");
    refuse("the number ", value, " in ", where(), " is negative");
  }
  bool number_float(double, const std::string& text) override {
    if (depth_ != 3 || !numbers_) return other("a number");
    refuse("the number ", text.substr(0, 40), " in ", where(), " is not a plain integer");
  }
  bool null() override { return other("null"); }
  bool boolean(bool) override { return other("a boolean"); }
  bool binary(nlohmann::json::binary_t&) override { return other("binary data"); }
  bool parse_error(size_t at, const std::string&, const nlohmann::json::exception&) override {
    refuse("the header is not JSON at its byte ", at);
  }

 private:
  template <class... Parts>
  [[noreturn]] void refuse(const Parts&... parts) const {
    refuse_safetensors(file_, str_cat(parts...));
  }
  std::string where() const {
    if (depth_ <= 0 || names_.empty()) return "the header";
    return in_metadata_ ? "__metadata__" : str_cat("tensor ", quoted_name(name_));
  }
  // A value that the format does not have there: ignored in an unknown key, else refused.
  bool other(std::string_view what) const {
    const bool known = key_ == "dtype" || key_ == "shape" || key_ == "data_offsets";
    if (depth_ < 2 || in_metadata_ || known)
      refuse("the header has ", what, " in ", where(), " where it must not");
    return true;
  }

  const FileReader& file_;
  int depth_ = 0;
  bool in_metadata_ = false;
  std::string name_, key_;
  std::unordered_set<std::string> names_;
  std::set<std::string> keys_;
  std::vector<uint64_t>* numbers_ = nullptr;
};

// What else is often given in place of a safetensors file, by its first bytes. `python` turns it
// into the tensors to save; null where there is no single call.
struct Foreign {
  std::string_view begin, what;
  const char* python = nullptr;
  const char* module = nullptr;  // of safetensors, whose save_file takes them
};
constexpr const char *kFromTorch =
                         "{k: v.clone().contiguous() for k, v in torch.load(FILE, "
                         "weights_only=True).items()}",
                     *kFromArchive = "dict(numpy.load(FILE))";
constexpr Foreign kForeign[] = {
    {"PK\3\4", "it is a zip archive, as torch.save writes (.pt, .pth)", kFromTorch, "torch"},
    {"\x80", "it is a Python pickle, as older versions of torch.save write", kFromTorch, "torch"},
    {"\x93NUMPY", "it is a NumPy array (.npy)", "{\"array\": numpy.load(FILE)}", "numpy"},
    {"\x89HDF", "it is an HDF5 file; convert it with the library that wrote it"},
    {"GGUF", "it is a GGUF file; convert it with the library that wrote it"},
    {"version https://git-lfs", "it is a pointer of Git LFS, not the file: run git lfs pull"},
    {"<", "it is a web page: the download failed; get the file itself"},
    {"{", "it is JSON; if it is the index of a model in several files, load those that it names"},
};
constexpr Foreign kArchive{"PK\3\4", "it is an archive of NumPy arrays (.npz)", kFromArchive,
                           "numpy"};

[[noreturn]] void fail_foreign(const FileReader& file, const Foreign& foreign) {
  std::string hint;
  if (foreign.python) {
    const std::string& path = file.path();
    std::string tensors = foreign.python;
    tensors.replace(tensors.find("FILE"), 4, str_cat('"', path, '"'));
    hint = str_cat("; convert it in Python: save_file(", tensors, ", \"",
                   std::filesystem::path(path).replace_extension(".safetensors").string(),
                   "\"), with save_file from safetensors.", foreign.module);
  }
  fail<IoError>("load_safetensors: ", file.path(), ": ", foreign.what, hint);
}

/// IoError that names the format if the first bytes are a known one's.
void refuse_foreign(const FileReader& file) {
  char bytes[32];
  const std::string_view begin(bytes, std::min<uint64_t>(sizeof bytes, file.size()));
  file.read(0, bytes, begin.size());
  // The length of a header that was cut off may begin with any byte; its upper four are 0.
  const bool is_length = begin.size() < 8 || begin.substr(4, 4) == std::string_view("\0\0\0\0", 4);
  for (const Foreign& f : kForeign)
    if (begin.starts_with(f.begin) && (f.begin.size() >= 4 || !is_length))
      fail_foreign(file, f.begin == kArchive.begin && file.path().ends_with(".npz") ? kArchive : f);
}

/// The JSON, without its padding.
std::string header_text(const FileReader& file) {
  const auto refuse = [&](const auto&... parts) {
    refuse_foreign(file);
    refuse_safetensors(file, str_cat(parts...));
  };
  uint64_t length = 0;
  if (file.size() < sizeof length)
    refuse("it has ", file.size(), " bytes, and the header's length alone takes 8");
  file.read(0, &length, sizeof length);
  if (length > kSafetensorsHeaderLimit)
    refuse("it claims a header of ", length, " bytes, and the limit is ", kSafetensorsHeaderLimit);
  if (length > file.size() - sizeof length)
    refuse("it claims a header of ", length, " bytes and has only ", file.size() - sizeof length,
           " after the length");
  char first = 0;
  if (length > 0) file.read(sizeof length, &first, 1);
  if (first != '{') refuse("its header is not one JSON object from '{' to '}'");
  std::string text(length, '\0');
  file.read(sizeof length, text.data(), text.size());
  return text;
}

}  // namespace

SafetensorsHeader read_safetensors_header(const FileReader& file) {
  const auto refuse = [&](const auto&... parts) { refuse_safetensors(file, str_cat(parts...)); };
  std::string text = header_text(file);
  SafetensorsHeader header;
  header.data = sizeof(uint64_t) + text.size();
  text.erase(text.find_last_not_of(' ') + 1);  // the padding
  if (text.back() != '}') refuse("its header is not one JSON object from '{' to '}'");
  HeaderReader reader(file);
  nlohmann::json::sax_parse(text, &reader);

  header.metadata = std::move(reader.metadata);
  header.entries = std::move(reader.entries);
  std::stable_sort(
      header.entries.begin(), header.entries.end(),
      [](const TensorEntry& a, const TensorEntry& b) { return a.offsets < b.offsets; });
  uint64_t end = 0;
  for (const TensorEntry& entry : header.entries) {
    if (entry.offsets[0] != end || entry.offsets[1] < end)
      refuse("tensor ", quoted_name(entry.name), " spans bytes ", entry.offsets[0], " to ",
             entry.offsets[1], ", and must begin at ", end, " where the one before it ends");
    end = entry.offsets[1];
  }
  if (header.data + end != file.size())
    refuse("its tensors end at byte ", header.data + end, " and it has ", file.size(), " bytes");
  return header;
}

}  // namespace lockstep::detail
