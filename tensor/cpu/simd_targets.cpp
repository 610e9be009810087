// LOCKSTEP_MAX_ISA limits the instruction sets that are used. In Highway better instruction sets
// have lower bits; those below the limit's bit are disabled before the first kernel is chosen.
#include <lockstep/tensor/cpu/simd_targets.h>

#include <hwy/targets.h>

#include <cstdlib>
#include <string_view>

#include <lockstep/tensor/error.h>

namespace lockstep::cpu {

void respect_isa_limit() {
  static const bool done = [] {
    const char* limit = std::getenv("LOCKSTEP_MAX_ISA");
    if (!limit || !*limit) return true;
    const std::string_view name = limit;
    int64_t disabled = 0;
    if (name == "avx2")
      disabled = HWY_AVX2 - 1;
    else if (name == "sse4")
      disabled = HWY_SSE4 - 1;
    else if (name == "scalar")
      disabled = HWY_EMU128 - 1;  // which is there instead of HWY_SCALAR with clang
    else
      fail<ValueError>("LOCKSTEP_MAX_ISA: must be avx2, sse4 or scalar, got ", name);
    hwy::DisableTargets(disabled);
    return true;
  }();
  (void)done;
}

}  // namespace lockstep::cpu
