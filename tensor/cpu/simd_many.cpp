// The SIMD kernels of ops with two and three inputs, of those with one input bound to a number, and of
// dropout.
#include <lockstep/tensor/cpu/simd_targets.h>
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE <lockstep/tensor/cpu/simd_many.cpp>
#include <hwy/foreach_target.h>

#include <algorithm>

#include <lockstep/tensor/cpu/philox-inl.h>
#include <lockstep/tensor/cpu/simd-inl.h>

HWY_BEFORE_NAMESPACE();
namespace lockstep::HWY_NAMESPACE {

const cpu::FloatTable<formulas::ManyOperandOps>* many_operand_table() {
  return table(BinaryOps() + TernaryOps() + NumberOps(), formulas::ManyOperandOps());
}

template <class T>
void dropout_row(const void* host, char* const* data, int64_t n, int64_t first) {
  const Dropout op = op_from<Dropout, formulas::Dropout>(host);
  T* y = reinterpret_cast<T*>(data[0]);
  const T* x = reinterpret_cast<const T*>(data[1]);
  const size_t lanes = hn::Lanes(hn::ScalableTag<T>());
  UniformBuffer<T> buffer;
  for (int64_t start = 0; start < n; start += kUniforms) {
    const T* u = buffer.fill(op.seed, op.offset, static_cast<uint64_t>(first + start));
    const size_t m = static_cast<size_t>(std::min<int64_t>(kUniforms, n - start));
    size_t i = 0;
    for (; i + lanes <= m; i += lanes)
      store<T>(op.f(load(x + start + i), load(u + i)), y + start + i);
    if (const size_t k = m - i)
      store_some<T>(op.f(load_some(x + start + i, k), load_some(u + i, k)), y + start + i, k);
  }
}
cpu::Row dropout_f32() { return dropout_row<float>; }
cpu::Row dropout_f64() { return dropout_row<double>; }

}  // namespace lockstep::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lockstep {
HWY_EXPORT(many_operand_table);
HWY_EXPORT(dropout_f32);
HWY_EXPORT(dropout_f64);
const cpu::FloatTable<formulas::ManyOperandOps>& cpu::many_operand_kernels() {
  respect_isa_limit();
  return *HWY_DYNAMIC_DISPATCH(many_operand_table)();
}
cpu::Row cpu::dropout_kernel(DType t) {
  respect_isa_limit();
  return t == DType::f32 ? HWY_DYNAMIC_DISPATCH(dropout_f32)()
                         : HWY_DYNAMIC_DISPATCH(dropout_f64)();
}
}  // namespace lockstep
#endif
