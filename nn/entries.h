// What one visit of a module finds, as lists. Internal to this folder: the derived functions walk
// these.
#pragma once

#include <functional>
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
  std::vector<Field> fields;
};

/// The parts of this module, one level deep. Throws Error when one that lies in the module is not
/// named.
Entries entries_of(const Module& module);

using ModuleFunction =
    std::function<void(const std::string& path, Module& m, const Entries& entries)>;
/// Calls f for this module and all below it, a module before its children: PyTorch's order of
/// names.
void for_each_module(const Module& module, const std::string& prefix, const ModuleFunction& f);

}  // namespace lockstep::nn::detail
