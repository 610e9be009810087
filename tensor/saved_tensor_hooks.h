// SavedTensorHooks: what happens to the tensors that ops save for backward. While a guard lives,
// each of them goes through `pack`, whose result, of any type, is kept in its place; backward gets
// from `unpack` what it then reads. Offloading and activation checkpointing are such pairs.
//
//   const autograd::SavedTensorHooks guard{
//       [](const Tensor& t) { return write_to_disk(t); },              // a file's name, say
//       [](const std::string& name) { return read_from_disk(name); }};
//   loss = net(x);
#pragma once

#include <any>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>

#include <lockstep/tensor/tensor.h>

namespace lockstep {

/// What a saved tensor is to its op.
struct LOCKSTEP_API SavedFrom {
  enum Role { input, output, kept };
  const char* op;
  Role role;
  int number;
  bool is_leaf = false;  // an input that accumulates a gradient, such as a parameter
};
/// "input 0"
LOCKSTEP_API void append(std::string& text, const SavedFrom& from);

namespace autograd {

/// Hooks of this thread, for the guard's lifetime; the innermost guard's alone are called.
///
/// pack(t) or pack(t, from) gets the saved inputs, outputs and kept tensors of every op that is
/// recorded, outside the graph and without grad mode. It must not change t. What it returns is
/// released with the graph, and is not checked for changes in place. What pack itself saves goes
/// through no hook.
///
/// unpack(packed) runs in backward, each time that an op reads the tensor, in backward's grad mode.
/// It returns a tensor of the same shape, dtype and device, else ShapeError, DTypeError or DeviceError
/// names the op. Under create_graph the tensor is connected to where the saved one came from,
/// whatever unpack did.
class LOCKSTEP_API SavedTensorHooks {
 public:
  template <class Pack, class Unpack>
  SavedTensorHooks(Pack pack, Unpack unpack) : SavedTensorHooks(Functions()) {
    auto call = [pack = std::move(pack)](const Tensor& t, const SavedFrom& from) {
      if constexpr (std::is_invocable_v<const Pack&, const Tensor&, const SavedFrom&>)
        return pack(t, from);
      else
        return pack(t);
    };
    using Packed =
        std::decay_t<std::invoke_result_t<decltype(call), const Tensor&, const SavedFrom&>>;
    if constexpr (std::is_same_v<Packed, std::any>)
      functions_->unpack = std::move(unpack);
    else
      functions_->unpack = [unpack = std::move(unpack)](const std::any& packed) {
        return unpack(*std::any_cast<Packed>(&packed));
      };
    functions_->pack = [call = std::move(call)](const Tensor& t, const SavedFrom& from) {
      return std::any(call(t, from));
    };
  }
  ~SavedTensorHooks();
  SavedTensorHooks(const SavedTensorHooks&) = delete;
  SavedTensorHooks& operator=(const SavedTensorHooks&) = delete;

  struct Functions {
    std::function<std::any(const Tensor&, const SavedFrom&)> pack;
    std::function<Tensor(const std::any&)> unpack;
  };
  /// Of the innermost guard of this thread; null for none.
  static std::shared_ptr<const Functions> active();

 private:
  explicit SavedTensorHooks(Functions functions);

  std::shared_ptr<Functions> functions_;  // lives as long as what was packed
  SavedTensorHooks* outer_;
};

}  // namespace autograd
}  // namespace lockstep
