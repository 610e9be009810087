#include <lockstep/tensor/state_reader.h>

#include <limits>

namespace lockstep {

Tensor integer_entry(int64_t value) { return tensor<int64_t>({value}, Shape{}); }

StateReader::StateReader(std::string owner, const NamedTensors& state) : owner_(std::move(owner)) {
  for (const auto& [name, value] : state)
    LOCKSTEP_CHECK(remaining_.emplace(name, value).second, ValueError, owner_, ": the state has '",
                   name, "' twice");
}

Tensor StateReader::tensor(const std::string& name) {
  auto entry = remaining_.extract(name);
  LOCKSTEP_CHECK(!entry.empty(), ValueError, owner_, ": the state has no entry '", name, "'");
  return entry.mapped();
}

int64_t StateReader::integer(const std::string& name, int64_t least) {
  const Tensor t = tensor(name);
  LOCKSTEP_CHECK(t.numel() == 1 && t.dtype() == DType::i64, ValueError, owner_, ": entry '", name,
                 "' must be one element of i64, and is ", t.dtype(), " ", t.shape());
  const auto value = t.item<int64_t>();
  LOCKSTEP_CHECK(value >= least, ValueError, owner_, ": entry '", name, "' must be at least ",
                 least, ", and is ", value);
  return value;
}
int64_t StateReader::integer(const std::string& name) {
  return integer(name, std::numeric_limits<int64_t>::min());
}

double StateReader::number(const std::string& name) {
  const Tensor t = tensor(name);
  LOCKSTEP_CHECK(t.numel() == 1 && is_floating(t.dtype()), ValueError, owner_, ": entry '", name,
                 "' must be one element of a floating dtype, and is ", t.dtype(), " ", t.shape());
  return t.item<double>();
}

void StateReader::finish() const {
  if (remaining_.empty()) return;
  Misfits misfits;
  for (auto& [name, t] : remaining_) misfits.unexpected.push_back(name);
  fail<ValueError>(owner_, ": the state does not fit", misfits.text());
}

namespace {
std::string list(const char* title, const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names)
    text += (text.empty() ? str_cat("\n  ", title, ": ") : ", ") + name;
  return text;
}
}  // namespace

std::string Misfits::text() const {
  return list("missing", missing) + list("unexpected", unexpected) +
         list("of another shape", misshapen) + list("wrong", wrong);
}

}  // namespace lockstep
