// Rows are copied as bytes, so every dtype is served.
#include <lockstep/data/tensor_dataset.h>

#include <cstring>

namespace lockstep::data {

Tensor gather_rows(const Tensor& source, std::span<const int64_t> indices) {
  LOCKSTEP_CHECK(source.dim() >= 1, ShapeError, "gather_rows: a 0-d tensor has no rows");
  Shape shape = source.shape();
  const int64_t rows = shape[0];
  shape[0] = static_cast<int64_t>(indices.size());
  Tensor batch = empty(shape, {.dtype = source.dtype()});
  const Tensor dense = source.contiguous();
  const int64_t bytes =
      (rows ? dense.numel() / rows : 0) * static_cast<int64_t>(size_of(dense.dtype()));
  const char* in = static_cast<const char*>(dense.data_ptr());
  char* out = static_cast<char*>(batch.data_ptr());
  for (int64_t index : indices) {
    LOCKSTEP_CHECK(index >= 0 && index < rows, IndexError, "dataset: sample ", index,
                   " is out of range for ", rows, " samples");
    if (bytes > 0) std::memcpy(out, in + index * bytes, static_cast<size_t>(bytes));
    out += bytes;
  }
  return batch;
}

namespace detail {

Tensor rows_of(const Tensor& t, size_t position, int64_t samples) {
  LOCKSTEP_CHECK(t.dim() >= 1, ShapeError, "TensorDataset: tensor ", position,
                 " is 0-d, and the first dimension must count the samples");
  LOCKSTEP_CHECK(samples < 0 || t.size(0) == samples, ShapeError, "TensorDataset: tensor 0 has ",
                 samples, " samples and tensor ", position, " has ", t.size(0), ", of shape ",
                 t.shape());
  LOCKSTEP_CHECK(t.device().is_cpu(), DeviceError, "TensorDataset: tensor ", position, " is on ",
                 t.device(),
                 "; keep data on the CPU and move each batch to its device in the training loop");
  return t.detach().contiguous();
}

}  // namespace detail
}  // namespace lockstep::data
