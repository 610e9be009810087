// Losses: cross_entropy with all its options and shapes, and mse_loss.
#include <cmath>

#include <lockstep/tensor/ops/cross_entropy.h>
#include <lockstep/tensor/ops/mse_loss.h>

#include "row.h"

namespace op_driver {
namespace {

const std::pair<const char*, Reduction> kReductions[] = {
    {"mean", Reduction::mean}, {"sum", Reduction::sum}, {"none", Reduction::none}};

/// The loss of one sample of scores.
Real sample_loss(const std::vector<Real>& scores, int64_t label, double smoothing) {
  const Real m = max_of(scores);
  Real s = 0, others = 0;
  for (Real x : scores) s += std::exp(x - m);
  for (Real x : scores) others += (m - x) + std::log(s);
  const Real own = (m - scores[static_cast<size_t>(label)]) + std::log(s);
  if (smoothing == 0) return own;
  return (1 - smoothing) * own + smoothing / static_cast<Real>(scores.size()) * others;
}

Array cross_entropy_reference(const Array& logits, const Array& target, CrossEntropyOptions o) {
  const int classes_dim = logits.shape.dims() == 1 ? 0 : 1;
  Array losses(target.shape);
  Real total = 0, counted = 0;
  for_each_index(target.shape, [&](const Shape& index) {
    const auto label = static_cast<int64_t>(target(index));
    if (label == o.ignore_index) return;
    Shape at = index;
    at.insert(classes_dim, 0);
    std::vector<Real> scores;
    for (; at[classes_dim] < logits.shape[classes_dim]; ++at[classes_dim])
      scores.push_back(logits(at));
    total += losses(index) = sample_loss(scores, label, o.label_smoothing);
    counted += 1;
  });
  if (o.reduction == Reduction::none) return losses;
  return Array({}, o.reduction == Reduction::sum ? total : total / counted);
}

Array mse_reference(const Array& a, const Array& b, Reduction reduction) {
  Array errors = tabulate(a.shape, [&](const Shape& i) { return (a(i) - b(i)) * (a(i) - b(i)); });
  if (reduction == Reduction::none) return errors;
  const Real total = sum_of(errors.v);
  return Array({},
               reduction == Reduction::sum ? total : total / static_cast<Real>(errors.v.size()));
}

}  // namespace

std::vector<Row> loss_rows() {
  std::vector<Row> rows;
  for (const auto& [text, reduction] : kReductions) {
    struct Variant {
      std::string text;
      CrossEntropyOptions options;
    };
    const Variant variants[] = {
        {"", {.reduction = reduction}},
        {", ignoring 1", {.reduction = reduction, .ignore_index = 1}},
        {", smoothed", {.reduction = reduction, .label_smoothing = 0.2}},
        {", uniform target", {.reduction = reduction, .label_smoothing = 1}},
        {", smoothed and ignoring 0",
         {.reduction = reduction, .ignore_index = 0, .label_smoothing = 0.3}}};
    for (const Variant& v : variants) {
      Row row{.name = std::string("cross_entropy, ") + text + v.text,
              .shapes = {{{6, 4}, {6}}, {{2, 4, 3}, {2, 3}}, {{2, 4, 2, 2}, {2, 2, 2}}},
              .call = [o = v.options](const Tensors& x) { return cross_entropy(x[0], x[1], o); },
              .reference = [o = v.options](
                               const Arrays& x) { return cross_entropy_reference(x[0], x[1], o); },
              .operands = {{}, index_below(4)},
              .edges = {{{0, 4}, {0}}},
              .lengths = {{{5, 17}, {5}}, {{40, 67}, {40}}, {{2, 5, 33}, {2, 33}}},
              .large = {{3000, 20}, {3000}}};
      rows.push_back(row);
    }
    rows.push_back(
        {.name = std::string("cross_entropy of one sample, ") + text,
         .shapes = {{{4}, {}}},
         .call = [r = reduction](
                     const Tensors& x) { return cross_entropy(x[0], x[1], {.reduction = r}); },
         .reference =
             [r = reduction](const Arrays& x) {
               return cross_entropy_reference(x[0], x[1], {.reduction = r});
             },
         .operands = {{}, index_below(4)}});
    rows.push_back(
        {.name = std::string("mse_loss, ") + text,
         .shapes = {{{3, 4}, {3, 4}}, {{2, 3, 2, 2}, {2, 3, 2, 2}}},
         .call = [r = reduction](const Tensors& x) { return mse_loss(x[0], x[1], r); },
         .reference = [r = reduction](const Arrays& x) { return mse_reference(x[0], x[1], r); },
         .edges = {{{0, 2}, {0, 2}}, {Shape{}, Shape{}}},
         .lengths = {{{17}, {17}}, {{5, 67}, {5, 67}}},
         .large = {{300, 400}, {300, 400}},
         .huge = {}});
  }
  return rows;
}

}  // namespace op_driver
