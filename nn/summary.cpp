#include <lockstep/nn/summary.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include <lockstep/nn/entries.h>
#include <lockstep/tensor/node.h>

namespace lockstep::nn {

namespace {

struct Shapes final : CallObserver {
  std::unordered_map<const Module*, Shape> outputs;
  void enter(Module&) override {}
  void leave(Module& m, const Tensor* y) override {
    if (y) outputs[&m] = y->shape();
  }
};

/// 1199882 as 1,199,882.
std::string with_commas(int64_t n) {
  std::string digits = std::to_string(n);
  for (ptrdiff_t i = static_cast<ptrdiff_t>(digits.size()) - 3; i > 0; i -= 3)
    digits.insert(static_cast<size_t>(i), 1, ',');
  return digits;
}

}  // namespace

Summary summary(Module& module, const Tensor& input) {
  Shapes shapes;
  {
    const EvalGuard eval(module);
    const NoGradGuard guard;
    module(input);
  }
  Summary s;
  std::unordered_set<const void*> seen;
  detail::for_each_module(
      module, [&](const std::string& path, Module& m, const detail::Entries& entries) {
        Summary::Row row;
        row.path = path;
        row.type = m.module_type().name;
        if (const std::string brief = m.brief(); !brief.empty()) row.type += str_cat(" ", brief);
        row.depth = path.empty() ? 0 : 1;
        for (char c : path) row.depth += c == '.';
        if (const auto it = shapes.outputs.find(&m); it != shapes.outputs.end()) {
          row.called = true;
          row.output = it->second;
        }
        for (auto& [name, p] : entries.parameters) {
          if (!p->defined() || !seen.insert(p->ref().get()).second) continue;
          row.parameters += p->numel();
          s.trainable += p->requires_grad() ? p->numel() : 0;
          s.bytes += p->numel() * static_cast<int64_t>(size_of(p->dtype()));
        }
        s.parameters += row.parameters;
        s.rows.push_back(std::move(row));
      });
  return s;
}

std::string Summary::to_string() const {
  std::vector<std::array<std::string, 3>> cells{{"Layer", "Output", "Parameters"}};
  for (const Row& r : rows) {
    const std::string indent(2 * static_cast<size_t>(r.depth), ' ');
    cells.push_back({r.path.empty() ? r.type : str_cat(indent, r.path, " (", r.type, ")"),
                     r.called ? str_cat(r.output) : "-",
                     r.parameters ? with_commas(r.parameters) : "-"});
  }
  std::array<size_t, 3> width{};
  for (auto& line : cells)
    for (size_t c = 0; c < 3; ++c) width[c] = std::max(width[c], line[c].size());
  std::string text;
  for (size_t i = 0; i < cells.size(); ++i) {
    auto& [layer, output, count] = cells[i];
    layer.resize(width[0], ' ');
    output.resize(width[1], ' ');
    text +=
        str_cat(layer, "  ", output, "  ", std::string(width[2] - count.size(), ' '), count, "\n");
    if (i == 0) text += std::string(width[0] + width[1] + width[2] + 4, '-') + "\n";
  }
  return text + str_cat("Parameters: ", with_commas(parameters), " (", with_commas(trainable),
                        " trainable), ", with_commas((bytes + 1023) / 1024), " KiB\n");
}

}  // namespace lockstep::nn
