#include "phalanx/reduce.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>

#include "kernels/kernels.h"
#include "phalanx/hooks.h"
#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace phalanx {

namespace kernels {

namespace {

bool always() { return true; }

#if defined(__x86_64__)
// F16C by hand: not every compiler's __builtin_cpu_supports knows it.
bool has_avx2() {
  unsigned a, b, c, d;
  return __builtin_cpu_supports("avx2") && __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) != 0;
}

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

}  // namespace

const Variant variants[n_variants] = {
    {"baseline", &baseline, always},
#if defined(__x86_64__)
    {"avx2", &avx2, has_avx2},
    {"avx512", &avx512, has_avx512},
#endif
};

namespace {

// Returns the widest variant that runs here, but none beyond the one that PHALANX_ISA names.
const Variant& choose() {
  const char* limit = std::getenv("PHALANX_ISA");
  const auto is_limit = [limit](const Variant& variant) {
    return limit != nullptr && std::strcmp(limit, variant.name) == 0;
  };
  if (limit != nullptr && std::none_of(std::begin(variants), std::end(variants), is_limit)) {
    std::fprintf(stderr,
                 "phalanx: PHALANX_ISA=%s is not an instruction set of this build; ignored\n",
                 limit);
  }
  const Variant* widest = &variants[0];
  for (const Variant& variant : variants) {
    if (!variant.runs_here()) break;
    widest = &variant;
    if (is_limit(variant)) break;
  }
  return *widest;
}

const Variant& chosen() {
  static const Variant& variant = choose();
  return variant;
}

}  // namespace

const Table& in_use() { return *chosen().table; }

}  // namespace kernels

std::size_t size_of(DType dtype) {
  constexpr std::size_t sizes[kernels::n_dtypes] = {1, 1, 1, 2, 2, 4, 4, 8, 8, 2, 2, 4, 8, 8, 16};
  return sizes[static_cast<std::size_t>(dtype)];
}

bool supports(DType dtype, ReduceOp op) {
  return kernels::baseline.reduce[static_cast<std::size_t>(dtype)][static_cast<std::size_t>(op)] !=
         nullptr;
}

void reduce(void* out, const void* const* sources, std::size_t n_sources, std::size_t count,
            DType dtype, ReduceOp op, double divisor) {
  PHALANX_STEP("reduce");
  const kernels::Table& table = kernels::in_use();
  table.reduce[static_cast<std::size_t>(dtype)][static_cast<std::size_t>(op)](
      out, sources, n_sources, count, divisor);
}

void scale(void* out, const void* in, std::size_t count, DType dtype, double factor) {
  kernels::in_use().scale[static_cast<std::size_t>(dtype)](out, &in, 1, count, factor);
}

const char* instruction_set() { return kernels::chosen().name; }

}  // namespace phalanx
