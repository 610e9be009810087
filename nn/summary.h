// summary(): what a module is made of, with the shape that each layer returns for an input and the
// parameters it holds.
//
//   std::cout << nn::summary(net, zeros({1, 1, 28, 28}));
#pragma once

#include <lockstep/nn/module.h>

namespace lockstep::nn {

struct LOCKSTEP_API Summary {
  struct Row {
    std::string path;  // "" for the module itself
    std::string type;  // "Conv2d 1->32, 3x3"
    int depth = 0;
    bool called = false;     // the input went through it; else `output` means nothing
    Shape output;            // of its last call
    int64_t parameters = 0;  // elements of its own, without its children's; tied ones count once
  };
  std::vector<Row> rows;
  int64_t parameters = 0, trainable = 0, bytes = 0;  // all together

  /// A table for a fixed-width font.
  std::string to_string() const;
};
template <class Stream>
auto operator<<(Stream& out, const Summary& s) -> decltype(out << std::string()) {
  return out << s.to_string();
}

/// Sends `input` once through the module in eval mode, without gradients; modes are as before
/// afterwards. The module's forward must map one tensor to one.
LOCKSTEP_API Summary summary(Module& module, const Tensor& input);

}  // namespace lockstep::nn
