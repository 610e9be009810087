#include <lockstep/distributed/ddp/coalesce.h>

#include <algorithm>
#include <cstring>
#include <string_view>

#include <lockstep/distributed/hash.h>
#include <lockstep/tensor/node.h>

namespace lockstep::dist {
namespace {

size_t bytes_of(const Tensor& t) { return static_cast<size_t>(t.numel()) * size_of(t.dtype()); }

/// A contiguous tensor of t's shape over packed bytes.
Tensor part(const Tensor& bytes, size_t offset, const Tensor& t) {
  return from_blob(bytes.data<uint8_t>() + offset, t.shape(),
                   {.dtype = t.dtype(), .device = bytes.device()});
}

/// The strides that matter for where elements lie: those of dimensions of size 1 do not.
Shape canonical_strides(const Tensor& t) {
  Shape strides = t.strides();
  for (int d = 0; d < t.dim(); ++d)
    if (t.shape()[d] <= 1 || t.numel() == 0) strides[d] = 1;
  return strides;
}

/// A line for each parameter and buffer, and one for the options that decide what ranks communicate.
std::string describe(const NamedTensors& parameters, const NamedTensors& buffers,
                     const DistributedDataParallelOptions& o) {
  const std::vector<std::string>& ignored = o.ignored;
  std::string text =
      str_cat("options: bucket_cap_mb ", o.bucket_cap_mb, ", first_bucket_mb ", o.first_bucket_mb,
              ", find_unused_parameters ", o.find_unused_parameters, ", broadcast_buffers ",
              o.broadcast_buffers, ", static_graph ", o.static_graph,
              o.comm_hook ? ", a comm_hook" : ", no comm_hook", ", ignored");
  for (const std::string& name : ignored) text += str_cat(' ', name);
  text += '\n';
  auto add = [&](const auto& entry, std::string_view kind) {
    const Tensor& t = entry.second;
    const bool left_alone = std::find(ignored.begin(), ignored.end(), entry.first) != ignored.end();
    text += str_cat(entry.first, ": ", left_alone ? "ignored " : "", kind, ' ', t.dtype(), ' ',
                    t.shape(), " strides ", canonical_strides(t), '\n');
  };
  for (const auto& p : parameters)
    add(p, p.second.requires_grad() ? "trainable parameter" : "frozen parameter");
  for (const auto& b : buffers) add(b, "buffer");
  return text;
}

/// The next line, without its end, which is taken off the text.
std::string_view next_line(std::string_view& text) {
  const std::string_view line = text.substr(0, text.find('\n'));
  text.remove_prefix(std::min(text.size(), line.size() + 1));
  return line;
}

}  // namespace

Tensor pack(const NamedTensors& tensors) {
  size_t total = 0, offset = 0;
  for (const auto& [name, t] : tensors) total += bytes_of(t);
  Tensor bytes = empty({static_cast<int64_t>(total)}, {.dtype = DType::u8});
  for (const auto& [name, t] : tensors) {
    if (t.numel() > 0) part(bytes, offset, t).copy_(t.detach());
    offset += bytes_of(t);
  }
  return bytes;
}

void unpack(const Tensor& bytes, const NamedTensors& tensors) {
  NoGradGuard guard;
  size_t offset = 0;
  for (const auto& [name, t] : tensors) {
    if (t.numel() > 0) Tensor(t).copy_(part(bytes, offset, t));
    offset += bytes_of(t);
  }
}

void unpack_fresh(const Tensor& bytes, const NamedTensors& tensors) {
  size_t offset = 0;
  for (const auto& [name, t] : tensors) {
    Tensor fresh = empty_like(t);
    if (t.numel() > 0) fresh.copy_(part(bytes, offset, t));
    TensorBody &to = t.body(), &from = fresh.body();
    to.storage = from.storage;
    to.offset = 0;
    to.strides = from.strides;
    offset += bytes_of(t);
  }
}

void verify_same_module(ProcessGroup& group, const NamedTensors& parameters,
                        const NamedTensors& buffers,
                        const DistributedDataParallelOptions& options) {
  const std::string mine = describe(parameters, buffers, options);
  const auto counts = [](const NamedTensors& list) { return static_cast<int64_t>(list.size()); };
  const Tensor facts =
      tensor<int64_t>({static_cast<int64_t>(hash_of(mine)), static_cast<int64_t>(mine.size()),
                       counts(parameters), counts(buffers)});
  Tensor all = empty({group.size(), 4}, {.dtype = DType::i64});
  group.all_gather(all, facts, {.label = "DDP's comparison of modules"})->wait();
  int odd = 0;
  int64_t longest = 0;
  const int64_t* f = all.data<int64_t>();
  for (int r = 0; r < group.size(); ++r) {
    if (odd == 0 && (f[r * 4] != f[0] || f[r * 4 + 1] != f[1])) odd = r;
    longest = std::max(longest, f[r * 4 + 1]);
  }
  if (odd == 0) return;

  Tensor text = zeros({longest}, {.dtype = DType::u8}),
         texts = empty({group.size(), longest}, {.dtype = DType::u8});
  std::memcpy(text.data<uint8_t>(), mine.data(), mine.size());
  group.all_gather(texts, text, {.label = "DDP's comparison of modules"})->wait();
  auto of_rank = [&](int r) {
    return std::string_view(reinterpret_cast<const char*>(texts.data<uint8_t>()) + r * longest,
                            static_cast<size_t>(f[r * 4 + 1]));
  };
  group.destroy();  // so that no rank's exception ends the others' look at the texts
  std::string_view first = of_rank(0), other = of_rank(odd), ours, theirs;
  do {
    ours = next_line(first);
    theirs = next_line(other);
  } while (ours == theirs);
  const auto entry = [](std::string_view line) {
    return line.empty() ? std::string("nothing more") : str_cat('"', line, '"');
  };
  fail<DistError>("DistributedDataParallel: the module differs between ranks: rank 0 has ", f[2],
                  " parameters and ", f[3], " buffers, rank ", odd, " has ", f[odd * 4 + 2],
                  " and ", f[odd * 4 + 3], "; the first difference is ", entry(ours),
                  " on rank 0, ", entry(theirs), " on rank ", odd,
                  "; build the same module, and wrap it with the same options, on every rank");
}

}  // namespace lockstep::dist
