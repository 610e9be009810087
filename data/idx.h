// IDX: the array format of the MNIST files, plain or gzipped.
// Format: yann.lecun.com/exdb/mnist (two zero bytes, type, number of dimensions, big-endian sizes,
// values).
#pragma once

#include <string>

#include <lockstep/tensor/tensor.h>

namespace lockstep::data {

/// The array in the file, as a tensor of u8, i32, f32 or f64 in the file's shape. Throws IoError,
/// naming the file, what was expected and what was found, for anything else; OutOfMemory if its
/// values do not fit. Memory is allocated as bytes arrive, whatever sizes the header claims, and the
/// file must end where its header says.
LOCKSTEP_API Tensor read_idx(const std::string& path);

}  // namespace lockstep::data
