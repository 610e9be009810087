// safetensors: named tensors in one file, as Hugging Face defined it: 8 bytes of header length, a
// JSON header (name -> dtype, shape, place), then the bytes. No code runs on loading, and a
// malicious file can only cause an error. Reads what Python's safetensors writes, and the other
// way round.
//
//   save_safetensors("net.safetensors", {{"fc1.weight", w}, {"fc1.bias", b}});
//   for (auto& [name, tensor] : load_safetensors("net.safetensors").tensors) ...
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <lockstep/tensor/tensor.h>

namespace lockstep {

using NamedTensors = std::vector<std::pair<std::string, Tensor>>;
using Metadata = std::map<std::string, std::string>;

struct Safetensors {
  NamedTensors tensors;  // in the order of their bytes in the file; contiguous, on the CPU
  Metadata metadata;

  /// A tensor of the file that has no form here: its dtype is none of ours (F8_E4M3, I16, C64, ...)
  /// or it has more than Shape::kMaxDims dimensions.
  struct Unsupported {
    std::string name, reason;
  };
  std::vector<Unsupported> unsupported;

  /// The tensor of that name; null if the file has none, ValueError if it is unsupported.
  LOCKSTEP_API const Tensor* find(std::string_view name) const;
  /// The tensor of that name; ValueError with the names there are when it is missing, and with the
  /// reason if it is unsupported.
  LOCKSTEP_API const Tensor& at(std::string_view name) const;
};

/// Writes the file atomically (see file.h). Any dtype, strided, empty and 0-d tensors, and any
/// device. Tensors that are the same memory in the same form, such as tied parameters, are written
/// once: the metadata entry "tied:NAME" names the tensor that holds NAME's values, and
/// load_safetensors gives both (Python's load_model finds them by itself). Wider element types come
/// first, so that each tensor is aligned; otherwise the order is kept. "format": "pt" joins the
/// metadata unless it names a format, since other readers insist on one. Throws ValueError for a
/// name that is used twice, "__metadata__", longer than 4096 bytes, with a NUL or not UTF-8, and for
/// an undefined tensor; IoError when the file cannot be written.
LOCKSTEP_API void save_safetensors(const std::string& path, const NamedTensors& tensors,
                                   const Metadata& metadata = {});

/// Reads the file. f16 and bf16 tensors are kept as such; tensors that were saved once share memory
/// again. Throws IoError, naming the file, the rule and what was found, for anything that is not
/// exactly a safetensors file: nothing is allocated before sizes and offsets are known to agree with
/// each other and with the file's length. Stricter than the reference: a name must not occur twice,
/// and nothing but spaces may follow the header's JSON.
LOCKSTEP_API Safetensors load_safetensors(const std::string& path);

}  // namespace lockstep
