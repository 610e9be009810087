// Stacking copies bytes, so it serves every dtype; errors name the sample that differs.
#include <lockstep/data/collate.h>

#include <cstring>

namespace lockstep::data {

Tensor stack_samples(const std::vector<Tensor>& samples) {
  LOCKSTEP_CHECK(!samples.empty(), ValueError, "collate: needs at least one sample");
  for (size_t i = 0; i < samples.size(); ++i)
    LOCKSTEP_CHECK(samples[i].defined(), ValueError, "collate: sample ", i,
                   " of the batch is an undefined tensor");
  const Tensor& first = samples[0];
  Shape shape = first.shape();
  shape.insert(0, static_cast<int64_t>(samples.size()));
  Tensor batch = empty(shape, {.dtype = first.dtype()});  // [B, ...sample]
  const size_t bytes = static_cast<size_t>(first.numel()) * size_of(first.dtype());
  char* out = static_cast<char*>(batch.data_ptr());
  for (size_t i = 0; i < samples.size(); ++i) {
    const Tensor& s = samples[i];
    LOCKSTEP_CHECK(s.shape() == first.shape(), ShapeError,
                   "collate: samples of a batch have one shape: sample 0 is ", first.shape(),
                   ", sample ", i, " is ", s.shape(),
                   "; pad or crop them, or make whole batches in get(std::span<const int64_t>)");
    LOCKSTEP_CHECK(s.dtype() == first.dtype(), DTypeError,
                   "collate: samples of a batch have one dtype: sample 0 is ", first.dtype(),
                   ", sample ", i, " is ", s.dtype());
    LOCKSTEP_CHECK(s.device().is_cpu(), DeviceError, "collate: samples lie on the CPU, sample ", i,
                   " is on ", s.device(), "; move the batch to its device in the training loop");
    const Tensor dense = s.detach().contiguous();
    if (bytes > 0) std::memcpy(out + i * bytes, dense.data_ptr(), bytes);
  }
  return batch;
}

}  // namespace lockstep::data
