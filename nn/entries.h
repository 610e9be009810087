// The registered fields of a module as lists, and the traversal of a module tree from which names,
// state dict, modes, conversion and summaries derive. Internal to this folder.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include <lockstep/nn/module.h>

namespace lockstep::nn::detail {

struct Entries {
  struct Field {
    std::string name;
    uintptr_t at;
    size_t size, alignment;
  };
  std::vector<std::pair<std::string, Parameter*>> parameters;  // undefined ones too
  std::vector<std::pair<std::string, Buffer*>> buffers;
  std::vector<std::pair<std::string, Module*>> modules;
  std::vector<std::pair<const void*, Module*>> references;  // parts of other modules
  std::vector<const PositionalModules*> lists;
  std::vector<Field> fields;
};

/// What the fields of this module name, one level deep. Throws Error for a class without a
/// LOCKSTEP_MODULE of its own; checks nothing else.
Entries entries_of(const Module& module);

/// Calls f for this module and all below it, a module before its children: PyTorch's order of
/// names. Throws Error first where a module holds a part that no module names. `always` checks
/// again though nothing was constructed since the last check.
void for_each_module(const Module& module, const ModuleFunction& f, bool always = false);

/// Whether both are the same elements in memory: tied, by one tensor or by two over one storage.
bool same_elements(const Tensor& a, const Tensor& b);
/// For each tensor the position of the first in the list that is the same elements.
std::vector<size_t> first_of_same(const std::vector<Tensor>& tensors);

}  // namespace lockstep::nn::detail
