// Agreement over collectives of tensors.
#include <lockstep/distributed/checkpoints/agreement.h>

#include <cstring>

#include <lockstep/distributed/failure_note.h>

namespace lockstep::dist {
namespace {

enum class Kind : char { none, io, value, other };

/// The root's numbers or text on every rank: their count, then themselves.
template <class T>
void broadcast_values(const Group& group, std::vector<T>& values, int root, const char* label) {
  const Tensor count = tensor<int64_t>({static_cast<int64_t>(values.size())});
  group.broadcast(count, root, {.label = label});
  values.resize(static_cast<size_t>(count.item<int64_t>()));
  if (values.empty()) return;
  const Tensor all = tensor(values);
  group.broadcast(all, root, {.label = label});
  values = all.template to_vector<T>();
}

}  // namespace

void all_or_none(const Group& group, const std::function<void()>& f) {
  std::exception_ptr error;
  Kind kind = Kind::none;
  std::string text;
  try {
    f();
  } catch (const std::exception& e) {
    error = std::current_exception();
    kind = dynamic_cast<const IoError*>(&e)      ? Kind::io
           : dynamic_cast<const ValueError*>(&e) ? Kind::value
                                                 : Kind::other;
    text = e.what();
  } catch (...) {
    error = std::current_exception();
    kind = Kind::other;
    text = "an exception that is no std::exception";
  }
  const Tensor first = tensor<int64_t>({error ? group.rank() : group.size()});
  group.all_reduce(first, ReduceOp::min, {.label = "whether all ranks succeeded"});
  const auto root = static_cast<int>(first.item<int64_t>());
  if (root == group.size()) return;
  std::vector<uint8_t> message(text.begin(), text.end());
  message.push_back(static_cast<uint8_t>(kind));
  broadcast_values(group, message, root, "the error of a rank");
  if (error) std::rethrow_exception(error);
  note_failed_peer();
  kind = static_cast<Kind>(message.back());
  message.pop_back();
  text = str_cat(std::string_view(reinterpret_cast<const char*>(message.data()), message.size()),
                 "\n  on rank ", root);
  if (kind == Kind::io) throw IoError(text);
  if (kind == Kind::value) throw ValueError(text);
  throw DistError(text);
}

NamedTensors broadcast_named(const Group& group, NamedTensors tensors, int root) {
  std::vector<int64_t> forms;  // of each: length of the name, dtype, dimensions, sizes
  std::vector<uint8_t> names;
  if (group.rank() == root) {
    for (auto& [name, t] : tensors) {
      t = t.detach().to(Device{});
      for (int64_t v : {static_cast<int64_t>(name.size()), static_cast<int64_t>(t.dtype()),
                        static_cast<int64_t>(t.dim())})
        forms.push_back(v);
      forms.insert(forms.end(), t.shape().begin(), t.shape().end());
      names.insert(names.end(), name.begin(), name.end());
    }
  }
  broadcast_values(group, forms, root, "the forms of a state's tensors");
  broadcast_values(group, names, root, "the names of a state's tensors");
  if (group.rank() != root) tensors.clear();
  all_or_none(group, [&] {  // a rank may have no memory for them
    if (group.rank() == root) return;
    const auto* name = reinterpret_cast<const char*>(names.data());
    for (size_t at = 0; at < forms.size();) {
      const auto length = static_cast<size_t>(forms[at]);
      const auto dtype = static_cast<DType>(forms[at + 1]);
      const int64_t dims = forms[at + 2];
      at += 3;
      Shape shape;
      for (int64_t d = 0; d < dims; ++d) shape.push_back(forms[at++]);
      tensors.emplace_back(std::string(name, length), empty(shape, {.dtype = dtype}));
      name += length;
    }
  });
  for (const auto& [name, t] : tensors) group.broadcast(t, root, {.label = name});
  return tensors;
}

}  // namespace lockstep::dist
