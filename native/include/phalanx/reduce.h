// Element types, reduction operators and the kernels that combine buffers of several ranks.
//
// The kernels are compiled once per instruction set (baseline, AVX2, AVX-512) and chosen at run
// time. All of them give the same bits: sources are combined in the order given, one operation per
// element and source, without contraction or reassociation. float16 and bfloat16 accumulate in
// float32 and round once, at the end. A NaN result is always the positive quiet NaN without
// payload, since CPUs differ in which of two NaNs an addition propagates.
#pragma once

#include <cstddef>
#include <cstdint>

namespace phalanx {

// The numbers are part of the fingerprint that ranks compare: append only.
enum class DType : std::uint8_t {
  boolean = 0,
  uint8 = 1,
  int8 = 2,
  uint16 = 3,
  int16 = 4,
  uint32 = 5,
  int32 = 6,
  uint64 = 7,
  int64 = 8,
  float16 = 9,
  bfloat16 = 10,
  float32 = 11,
  float64 = 12,
  complex64 = 13,
  complex128 = 14,
};

enum class ReduceOp : std::uint8_t {
  none = 0,
  sum = 1,
  product = 2,
  min = 3,
  max = 4,
  band = 5,
  bor = 6,
  bxor = 7,
  avg = 8,
};

// The size of one element.
std::size_t size_of(DType dtype);

// Whether `op` is defined for `dtype`: min and max not for complex, bitwise only for integers and
// bool, avg only for floats and complex.
bool supports(DType dtype, ReduceOp op);

// out[i] = sources[0][i] op sources[1][i] op ... for i < count; for avg the sum is divided by
// `divisor`, which other operators ignore. `out` may be exactly one of the sources, and must not
// overlap one otherwise. bool (bytes of 0 and 1): sum and max are "or", product and min are "and".
// Integers wrap. min and max propagate NaN. The complex product follows the textbook formula,
// without C's recovery of infinities. Buffers need only the alignment of their elements. Requires
// supports(dtype, op), op != none and n_sources >= 1.
void reduce(void* out, const void* const* sources, std::size_t n_sources, std::size_t count,
            DType dtype, ReduceOp op, double divisor);

// out[i] = in[i] * factor, for floats and complex; `out` may be `in`. The first half of PREMUL_SUM.
void scale(void* out, const void* in, std::size_t count, DType dtype, double factor);

// The name of the instruction set in use: "baseline", "avx2" or "avx512". PHALANX_ISA in the
// environment, read at the first use, can lower it, but not raise it.
const char* instruction_set();

}  // namespace phalanx
