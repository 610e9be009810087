// Parameter and Buffer: the tensors that a module owns. A Parameter is trained; a Buffer is state
// that is not (running statistics, a mask). Both are known by address while they live, so that a
// module can tell when one of its own is missing from LOCKSTEP_MODULE and would be left out of
// training.
//
//   nn::Parameter weight = randn({out, in});       // a leaf that requires grad
//   nn::Buffer mask{ones({8, 8}), false};          // not part of the state dict
#pragma once

#include <lockstep/tensor/tensor.h>

namespace lockstep::nn {

namespace detail {

enum class Part : uint8_t { parameter, buffer, module, list };
LOCKSTEP_API void part_appears(const void* at, Part what);
/// part_appears for what is moved; a module keeps its age. Where there is no memory for it, the part
/// stays unknown until a check finds it among a module's fields.
LOCKSTEP_API void part_moves(const void* to, const void* from, Part what) noexcept;
LOCKSTEP_API void part_disappears(const void* at) noexcept;

/// An empty base that registers the address of what derives from it.
template <Part what>
class Registered {
 protected:
  Registered() { part_appears(this, what); }
  Registered(const Registered&) : Registered() {}
  Registered(Registered&& from) noexcept { part_moves(this, &from, what); }
  Registered& operator=(const Registered&) = default;
  ~Registered() { part_disappears(this); }
};

}  // namespace detail

/// A trainable tensor. Its identity is the tensor's body: `to`, loading and broadcasting change the
/// storage inside that, so optimizers and wrappers that hold the tensor follow. Undefined means
/// absent (no bias).
class LOCKSTEP_API Parameter : public Tensor, private detail::Registered<detail::Part::parameter> {
 public:
  Parameter() = default;
  /// A leaf over the same data as `data`, outside its graph. Floating dtypes only.
  Parameter(const Tensor& data,
            bool requires_grad = true);  // NOLINT: implicit, like PyTorch's assignment
};
// Copying a Parameter shares its body: `decoder.weight = embedding.weight` ties the two.

/// A tensor that belongs to the module's state but is not trained.
class LOCKSTEP_API Buffer : public Tensor, private detail::Registered<detail::Part::buffer> {
 public:
  Buffer() = default;
  /// `persistent` says whether it is part of the state dict.
  Buffer(Tensor data, bool persistent = true)  // NOLINT: implicit
      : Tensor(std::move(data)), persistent_(persistent) {}
  bool is_persistent() const { return persistent_; }
  /// Another tensor in its place; whether it is persistent stays.
  Buffer& operator=(Tensor data) {
    Tensor::operator=(std::move(data));
    return *this;
  }

 private:
  bool persistent_ = true;
};

}  // namespace lockstep::nn
