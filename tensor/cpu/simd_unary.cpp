// The SIMD kernels of one-input ops. Highway compiles this file once per instruction set, each in a
// namespace of its own, and picks among them when the first op runs.
#include <lockstep/tensor/cpu/simd_targets.h>
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE <lockstep/tensor/cpu/simd_unary.cpp>
#include <hwy/foreach_target.h>

#include <lockstep/tensor/cpu/simd-inl.h>

HWY_BEFORE_NAMESPACE();
namespace lockstep::HWY_NAMESPACE {
const cpu::FloatTable<formulas::UnaryOps>* unary_table() {
  return table(UnaryOps(), formulas::UnaryOps());
}
}  // namespace lockstep::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lockstep {
HWY_EXPORT(unary_table);
const cpu::FloatTable<formulas::UnaryOps>& cpu::unary_kernels() {
  respect_isa_limit();
  return *HWY_DYNAMIC_DISPATCH(unary_table)();
}
}  // namespace lockstep
#endif
