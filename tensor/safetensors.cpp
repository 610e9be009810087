// Writing, and loading what the header (safetensors_header.h) says, tensor by tensor.
#include <lockstep/tensor/safetensors.h>

#include <algorithm>
#include <bit>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include <lockstep/tensor/error_context.h>
#include <lockstep/tensor/file.h>
#include <lockstep/tensor/safetensors_header.h>

namespace lockstep {
namespace {

using detail::quoted_name;
using detail::TensorEntry;

static_assert(std::endian::native == std::endian::little, "safetensors data is little-endian");

constexpr size_t kAlignment = 64;
constexpr std::string_view kTied = "tied:";  // metadata: "tied:NAME" -> the name that was written

/// Whether the entry's shape fills its bytes exactly; IoError if not.
Shape checked_shape(const FileReader& file, const TensorEntry& entry, DType dtype) {
  Shape shape;
  // Strides are products too, so sizes beside a 0 must not overflow either.
  int64_t extent = static_cast<int64_t>(size_of(dtype));
  for (uint64_t d : entry.shape) {
    shape.push_back(static_cast<int64_t>(d));
    if (__builtin_mul_overflow(extent, static_cast<int64_t>(std::max<uint64_t>(d, 1)), &extent))
      detail::refuse_safetensors(file, str_cat("the sizes of tensor ", quoted_name(entry.name),
                                               " overflow: ", shape, "..."));
  }
  const uint64_t needed = static_cast<uint64_t>(shape.numel()) * size_of(dtype);
  if (entry.bytes() != needed)
    detail::refuse_safetensors(
        file, str_cat("tensor ", quoted_name(entry.name), " of shape ", shape, " and ", dtype,
                      " needs ", needed, " bytes, and its data_offsets span ", entry.bytes()));
  return shape;
}

/// Reads the entry's tensor, or notes why it is unsupported.
void load_entry(const FileReader& file, uint64_t data, const TensorEntry& entry,
                Safetensors& result) {
  const auto format =
      std::find_if(std::begin(detail::dtype_rows), std::end(detail::dtype_rows),
                   [&](const detail::DTypeRow& row) { return entry.dtype == row.file_name; });
  if (format == std::end(detail::dtype_rows)) {
    std::string known;
    for (const detail::DTypeRow& row : detail::dtype_rows)
      known += str_cat(known.empty() ? "" : ", ", row.file_name);
    result.unsupported.push_back({entry.name, str_cat("has dtype ", quoted_name(entry.dtype),
                                                      ", and only ", known, " are read")});
    return;
  }
  if (entry.shape.size() > static_cast<size_t>(Shape::kMaxDims)) {
    result.unsupported.push_back(
        {entry.name, str_cat("has ", entry.shape.size(), " dimensions, and at most ",
                             Shape::kMaxDims, " are read")});
    return;
  }
  const Shape shape = checked_shape(file, entry, format->dtype);
  Tensor tensor;
  try {
    tensor = empty(shape, {.dtype = format->dtype});
  } catch (...) {
    detail::rethrow_with_context(
        str_cat("in load_safetensors of ", file.path(), ", tensor ", quoted_name(entry.name)));
  }
  const size_t bytes = entry.bytes();
  if (bytes > 0) file.read(data + entry.offsets[0], tensor.data_ptr(), bytes);
  if (format->dtype == DType::boolean) {
    const auto* p = static_cast<const unsigned char*>(tensor.data_ptr());
    if (std::any_of(p, p + bytes, [](unsigned char b) { return b > 1; }))
      detail::refuse_safetensors(file, str_cat("tensor ", quoted_name(entry.name),
                                               " is BOOL and has a byte other than 0 and 1"));
  }
  result.tensors.emplace_back(entry.name, std::move(tensor));
}

/// Gives tensors that were written once under another name their own again.
void restore_tied(Safetensors& file) {
  std::map<std::string_view, Tensor> by_name;
  for (const auto& [name, tensor] : file.tensors) by_name.emplace(name, tensor);
  NamedTensors tied;
  std::erase_if(file.metadata, [&](const auto& item) {
    const auto& [key, kept] = item;
    const auto tensor = by_name.find(kept);
    if (!key.starts_with(kTied) || tensor == by_name.end() ||
        by_name.contains(std::string_view(key).substr(kTied.size())))
      return false;
    tied.emplace_back(key.substr(kTied.size()), tensor->second);
    return true;
  });
  file.tensors.insert(file.tensors.end(), tied.begin(), tied.end());
}

void check_name(std::string_view name, std::set<std::string_view>& names) {
  LOCKSTEP_CHECK(
      name != "__metadata__", ValueError,
      "save_safetensors: the format keeps the name '__metadata__' for itself; rename the tensor");
  LOCKSTEP_CHECK(
      name.size() <= detail::kLongestTensorName && name.find('\0') == std::string_view::npos,
      ValueError, "save_safetensors: a name has at most ", detail::kLongestTensorName,
      " bytes and no NUL, got ", quoted_name(name), " of ", name.size(), " bytes");
  LOCKSTEP_CHECK(names.insert(name).second, ValueError, "save_safetensors: names must differ, and ",
                 quoted_name(name), " is given twice");
}

/// The tensors to write, the widest elements first; the others of each group of equal ones go into
/// the metadata.
NamedTensors without_tied(const NamedTensors& tensors, Metadata& metadata) {
  NamedTensors kept;
  std::map<std::string, std::string> by_memory;
  for (const auto& [name, t] : tensors) {
    if (t.numel() > 0) {
      const std::string memory =
          str_cat(reinterpret_cast<uintptr_t>(t.data_ptr()), t.device(), t.dtype(), t.shape(),
                  t.is_contiguous() ? std::string() : str_cat(t.strides()));
      const auto [first, is_new] = by_memory.emplace(memory, name);
      if (!is_new && metadata.emplace(str_cat(kTied, name), first->second).second) continue;
    }
    kept.emplace_back(name, t);
  }
  std::stable_sort(kept.begin(), kept.end(), [](const auto& a, const auto& b) {
    return size_of(a.second.dtype()) > size_of(b.second.dtype());
  });
  return kept;
}

/// Strings alone are given to the library: its lists and objects need memory to be freed.
std::string to_json(const std::string& text) {
  try {
    return nlohmann::json(text).dump();
  } catch (const nlohmann::json::exception&) {
    fail<ValueError>("save_safetensors: names and metadata must be UTF-8, and one of them is not");
  }
}

std::string make_header(const NamedTensors& tensors, const Metadata& metadata) {
  std::string text = "{\"__metadata__\":{";
  for (const auto& [key, value] : metadata)
    text += str_cat(text.back() == '{' ? "" : ",", to_json(key), ":", to_json(value));
  text += '}';
  uint64_t end = 0;
  for (const auto& [name, tensor] : tensors) {
    const uint64_t begin = end;
    end += static_cast<uint64_t>(tensor.numel()) * size_of(tensor.dtype());
    std::string shape;
    for (int64_t n : tensor.shape()) shape += str_cat(shape.empty() ? "" : ",", n);
    text += str_cat(",", to_json(name), ":{\"dtype\":\"", detail::row_of(tensor.dtype()).file_name,
                    "\",\"shape\":[", shape, "],\"data_offsets\":[", begin, ",", end, "]}");
  }
  text += '}';
  const size_t start = sizeof(uint64_t) + text.size();
  text.append((kAlignment - start % kAlignment) % kAlignment, ' ');
  LOCKSTEP_CHECK(text.size() <= detail::kSafetensorsHeaderLimit, ValueError,
                 "save_safetensors: the header has ", text.size(), " bytes, more than the ",
                 detail::kSafetensorsHeaderLimit, " that readers accept; save in several files");
  return text;
}

}  // namespace

const Tensor* Safetensors::find(std::string_view name) const {
  for (const auto& [key, tensor] : tensors)
    if (key == name) return &tensor;
  for (const Unsupported& u : unsupported)
    LOCKSTEP_CHECK(u.name != name, ValueError, "safetensors: tensor ", quoted_name(name), " ",
                   u.reason, "; convert it where it was made");
  return nullptr;
}

const Tensor& Safetensors::at(std::string_view name) const {
  if (const Tensor* tensor = find(name)) return *tensor;
  std::string names;
  for (size_t i = 0; i < tensors.size() && i < 10; ++i)
    names += (i ? ", " : "") + quoted_name(tensors[i].first);
  if (tensors.size() > 10) names += ", ...";
  fail<ValueError>("safetensors: no tensor is named ", quoted_name(name), "; the file has ",
                   names.empty() ? "none" : names);
}

void save_safetensors(const std::string& path, const NamedTensors& tensors,
                      const Metadata& metadata) {
  std::set<std::string_view> names;
  for (const auto& [name, tensor] : tensors) {
    check_name(name, names);
    LOCKSTEP_CHECK(tensor.defined(), ValueError, "save_safetensors: tensor ", quoted_name(name),
                   " is undefined");
  }
  for (const auto& [key, value] : metadata)  // it would come back as a tensor
    LOCKSTEP_CHECK(!key.starts_with(kTied) || !names.contains(value), ValueError,
                   "save_safetensors: metadata ", quoted_name(key), ": ", quoted_name(value),
                   " would be read as another name of that tensor; choose a key without '", kTied, "'");
  Metadata all = metadata;
  all.emplace("format", "pt");
  const NamedTensors kept = without_tied(tensors, all);
  const std::string header = make_header(kept, all);
  write_file_atomically(path, [&](FileWriter& out) {
    const uint64_t length = header.size();
    out.write(&length, sizeof length);
    out.write(header);
    for (const auto& [name, tensor] : kept) {
      const Tensor dense = tensor.detach().to(Device{}).contiguous();
      if (dense.numel() > 0)
        out.write(dense.data_ptr(), static_cast<size_t>(dense.numel()) * size_of(dense.dtype()));
    }
  });
}

Safetensors load_safetensors(const std::string& path) {
  const FileReader file("load_safetensors", path);
  detail::SafetensorsHeader header = detail::read_safetensors_header(file);
  Safetensors result;
  for (const TensorEntry& entry : header.entries) load_entry(file, header.data, entry, result);
  result.metadata = std::move(header.metadata);
  restore_tied(result);
  return result;
}

}  // namespace lockstep
