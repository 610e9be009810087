// Which tensors share memory. Views of one storage, several from_blob() of the same bytes and
// interleaved views (columns of a matrix) are told apart by their addresses.
#pragma once

#include <vector>

#include <lockstep/tensor/tensor.h>

namespace lockstep::dist {

/// Whether the memory between the first and the last byte of one meets that of the other. False is
/// certain; interleaved views meet without sharing an element.
bool may_overlap(const Tensor& a, const Tensor& b);
/// Whether both are the same elements in the same order.
bool is_same_view(const Tensor& a, const Tensor& b);
/// The tensors by place in memory, as indices: those of one list form a chain in which neighbours
/// may_overlap(), those of two lists share nothing. Tensors without elements are in none.
std::vector<std::vector<size_t>> overlapping(const std::vector<Tensor>& tensors);
/// Whether an element of one of them is an element of another. None overlaps itself.
bool share_elements(const std::vector<Tensor>& tensors);

}  // namespace lockstep::dist
