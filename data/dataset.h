// Dataset: the requirements of a loader. A dataset has size() and get in one of two forms:
//
//   Batch  get(std::span<const int64_t> indices) const;   // a whole batch at once: the fast form
//   Sample get(int64_t index) const;                      // one sample; collate.h makes the batch
//
// either also with a second parameter, const RandomSource& random, for augmentation that any number
// of workers and ranks repeats. get is called from several threads at once. A Batch is any movable
// type; one of tensors (array, tuple, struct) unpacks as `auto [x, y]`.
#pragma once

#include <algorithm>
#include <concepts>
#include <span>
#include <utility>
#include <vector>

#include <lockstep/data/collate.h>
#include <lockstep/data/random_source.h>
#include <lockstep/tensor/error_context.h>

namespace lockstep::data {
namespace detail {

// d.get(index or indices), with or without the source of randomness.
template <class D, class I>
concept GetsWith = requires(const D& d, I i, const RandomSource& r) {
  d.get(i, r);
}
|| requires(const D& d, I i) { d.get(i); };
template <class D, class I>
requires GetsWith<D, I>
auto get(const D& dataset, I i, const RandomSource& random) {
  if constexpr (requires { dataset.get(i, random); })
    return dataset.get(i, random);
  else
    return dataset.get(i);
}

/// Keys this thread's default generator by a sample, and sets it back: rand() inside a dataset is
/// keyed as well. Scopes nest where a dataset fetches from another one, by the same samples. What
/// the outer one draws after that, for a transform say, comes from a stream of its own, so that no
/// layer repeats the numbers of another.
class GeneratorScope {
 public:
  GeneratorScope() : before_(default_generator()), outer_(std::exchange(innermost_, this)) {}
  ~GeneratorScope() {
    Generator& generator = default_generator();
    if (outer_)
      before_.state().stream = std::max(before_.state().stream, generator.state().stream + 1);
    generator = before_;
    innermost_ = outer_;
  }
  GeneratorScope(const GeneratorScope&) = delete;
  GeneratorScope& operator=(const GeneratorScope&) = delete;
  void set(const RandomSource& random, int64_t sample) {
    const RandomKey key = random.key(sample, Purpose::generator);
    default_generator() = {.seed = key.seed, .offset = key.offset, .stream = 0};
  }

 private:
  static inline thread_local GeneratorScope* innermost_ = nullptr;
  Generator before_;
  GeneratorScope* outer_;
};

}  // namespace detail

template <class D>
concept BatchDataset = detail::GetsWith<D, std::span<const int64_t>>;

template <class D>
concept Dataset = requires(const D& d) {
  { d.size() } -> std::convertible_to<int64_t>;
}
&&(BatchDataset<D> || detail::GetsWith<D, int64_t>);

/// The batch of these samples. The default generator is keyed by the sample meanwhile, or by the
/// first of the batch for datasets that make whole batches.
template <Dataset D>
auto fetch(const D& dataset, std::span<const int64_t> indices, const RandomSource& random) {
  detail::GeneratorScope generator;
  if constexpr (BatchDataset<D>) {
    generator.set(random, indices.empty() ? 0 : indices[0]);
    return detail::get(dataset, indices, random);
  } else {
    std::vector<decltype(detail::get(dataset, int64_t{}, random))> samples;
    samples.reserve(indices.size());
    for (int64_t index : indices) {
      generator.set(random, index);
      try {
        samples.push_back(detail::get(dataset, index, random));
      } catch (...) {
        lockstep::detail::rethrow_with_context(str_cat("in get of sample ", index));
      }
    }
    return collate(samples);
  }
}

/// The type of a dataset's batches.
template <Dataset D>
using BatchOf = decltype(fetch(std::declval<const D&>(), {}, std::declval<const RandomSource&>()));

/// A dataset with f applied to its batches, on the loader's workers: f(batch), or f(batch, indices,
/// random) where it depends on the samples. random_shift.h has an example.
template <Dataset D, class F>
class Mapped {
 public:
  Mapped(D dataset, F f) : dataset_(std::move(dataset)), f_(std::move(f)) {}
  int64_t size() const { return dataset_.size(); }
  auto get(std::span<const int64_t> indices, const RandomSource& random) const {
    if constexpr (std::is_invocable_v<const F&, BatchOf<D>, std::span<const int64_t>,
                                      const RandomSource&>)
      return f_(fetch(dataset_, indices, random), indices, random);
    else
      return f_(fetch(dataset_, indices, random));
  }

 private:
  D dataset_;
  F f_;
};

/// map(train, [](auto batch) { ...; return batch; })
template <Dataset D, class F>
Mapped<D, F> map(D dataset, F f) {
  return {std::move(dataset), std::move(f)};
}

}  // namespace lockstep::data
