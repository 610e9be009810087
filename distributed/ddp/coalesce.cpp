#include <lockstep/distributed/ddp/coalesce.h>

#include <algorithm>
#include <cstring>
#include <string_view>

#include <lockstep/distributed/hash.h>
#include <lockstep/distributed/overlap.h>
#include <lockstep/tensor/node.h>

namespace lockstep::dist {
namespace {

/// The elements that t has in memory: a dimension along which it repeats them has size 1.
Tensor distinct(const Tensor& t) {
  Tensor d = t.detach();
  for (int i = 0; i < t.dim(); ++i)
    if (t.strides()[i] == 0 && t.shape()[i] > 1) d = d.narrow(i, 0, 1);
  return d;
}

size_t bytes_of(const Tensor& t) { return static_cast<size_t>(t.numel()) * size_of(t.dtype()); }

/// A contiguous tensor of t's shape over packed bytes.
Tensor part(const Tensor& bytes, size_t offset, const Tensor& t) {
  return from_blob(bytes.data<uint8_t>() + offset, t.shape(),
                   {.dtype = t.dtype(), .device = bytes.device()});
}

/// Whether t holds these values, to the bit. Values are contiguous.
bool holds(const Tensor& t, const Tensor& values) {
  const Tensor mine = t.to(values.device()).contiguous();
  return std::memcmp(mine.data_ptr(), values.data_ptr(), bytes_of(values)) == 0;
}

/// Fresh memory for tensors that may overlap, in which they lie as they lie now.
void move_together(const std::vector<Tensor>& tensors) {
  constexpr uintptr_t kLine = 64;
  uintptr_t begin = UINTPTR_MAX, end = 0;
  for (const Tensor& t : tensors) {
    const auto first = reinterpret_cast<uintptr_t>(t.data_ptr());
    size_t last = 0;  // its element with the highest address
    for (int d = 0; d < t.dim(); ++d)
      last += static_cast<size_t>((t.shape()[d] - 1) * t.strides()[d]);
    begin = std::min(begin, first / kLine * kLine);
    end = std::max(end, first + (last + 1) * size_of(t.dtype()));
  }
  const Ref<Storage> fresh = Storage::allocate(end - begin, tensors[0].device());
  for (const Tensor& t : tensors) {
    const auto first = reinterpret_cast<uintptr_t>(t.data_ptr());
    t.body().storage = fresh;
    t.body().offset = static_cast<int64_t>((first - begin) / size_of(t.dtype()));
  }
  for (const Tensor& t : tensors)
    if (Ref<TensorBody>& base = t.body().base; base && base->storage.get() != fresh.get())
      base = nullptr;
}

/// The strides that matter for where elements lie: those of dimensions of size 1 do not.
Shape canonical_strides(const Tensor& t) {
  Shape strides = t.strides();
  for (int d = 0; d < t.dim(); ++d)
    if (t.shape()[d] <= 1 || t.numel() == 0) strides[d] = 1;
  return strides;
}

/// For each tensor with which other one it shares memory, and where; "" for most.
std::vector<std::string> sharing(const NamedTensors& all) {
  std::vector<Tensor> tensors;
  for (const auto& entry : all) tensors.push_back(distinct(entry.second));
  std::vector<std::string> texts(all.size());
  for (const std::vector<size_t>& chain : overlapping(tensors)) {
    const size_t first = *std::min_element(chain.begin(), chain.end());
    for (const size_t i : chain)
      if (i != first)
        texts[i] = str_cat(" at byte ",
                           static_cast<const std::byte*>(tensors[i].data_ptr()) -
                               static_cast<const std::byte*>(tensors[first].data_ptr()),
                           " of ", all[first].first);
  }
  return texts;
}

/// A line for the options that decide what ranks communicate, and one for each parameter and buffer.
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
  NamedTensors all = parameters;
  all.insert(all.end(), buffers.begin(), buffers.end());
  const std::vector<std::string> shared = sharing(all);
  for (size_t i = 0; i < all.size(); ++i) {
    const auto& [name, t] = all[i];
    const bool left_alone = std::find(ignored.begin(), ignored.end(), name) != ignored.end();
    const std::string_view kind = i >= parameters.size() ? "buffer"
                                  : t.requires_grad()    ? "trainable parameter"
                                                         : "frozen parameter";
    text += str_cat(name, ": ", left_alone ? "ignored " : "", kind, ' ', t.dtype(), ' ', t.shape(),
                    " strides ", canonical_strides(t), shared[i]);
    if (t.grad_dtype() != t.dtype()) text += str_cat(", gradient ", t.grad_dtype());
    text += '\n';
  }
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
  for (const auto& [name, t] : tensors) total += bytes_of(distinct(t));
  Tensor bytes = empty({static_cast<int64_t>(total)}, {.dtype = DType::u8});
  for (const auto& [name, t] : tensors) {
    const Tensor from = distinct(t);
    if (t.numel() > 0) part(bytes, offset, from).copy_(from);
    offset += bytes_of(from);
  }
  return bytes;
}

void unpack(const Tensor& bytes, const NamedTensors& tensors) {
  NoGradGuard guard;
  size_t offset = 0;
  for (const auto& [name, t] : tensors) {
    Tensor to = distinct(t);
    if (t.numel() > 0) to.copy_(part(bytes, offset, to));
    offset += bytes_of(to);
  }
}

void unpack_fresh(const Tensor& bytes, const NamedTensors& tensors) {
  NoGradGuard guard;
  std::vector<Tensor> now, values;
  size_t offset = 0;
  for (const auto& [name, t] : tensors) {
    now.push_back(distinct(t));
    values.push_back(t.numel() > 0 ? part(bytes, offset, now.back()) : Tensor());
    offset += bytes_of(now.back());
  }
  for (const std::vector<size_t>& chain : overlapping(now)) {
    if (std::all_of(chain.begin(), chain.end(), [&](size_t i) { return holds(now[i], values[i]); }))
      continue;
    std::vector<Tensor> moved;
    for (const size_t i : chain) moved.push_back(tensors[i].second);
    move_together(moved);
    for (const size_t i : chain) distinct(tensors[i].second).copy_(values[i]);
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
