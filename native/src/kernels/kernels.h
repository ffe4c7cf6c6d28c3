// Internal to reduce.cpp: the tables of kernels, one per instruction set.
//
// The variants are one source, variant.inc, compiled with different flags. Its includes must not
// define functions with external linkage: the linker keeps one copy of those, possibly the one with
// instructions that this CPU lacks. Hence C headers only, and everything in unnamed namespaces.
#pragma once

#include <stddef.h>

#include "phalanx/reduce.h"

namespace phalanx::kernels {

constexpr size_t n_dtypes = 15;
constexpr size_t n_ops = 9;
constexpr size_t n_encodings = 3;

// Combines sources like phalanx::reduce; `parameter` is the divisor or the factor.
using Fold = void (*)(void* out, const void* const* sources, size_t n_sources, size_t count,
                      double parameter);

// The combination of rows of a table; see rows.h in this directory.
enum class RowCombine : unsigned char { sum, max };
// The encodings of quantization.h.
using Quantize = void (*)(void* out, const float* values, float* residual, size_t count);
using Dequantize = void (*)(float* out, const void* encoded, size_t count);
using LoadRow = void (*)(void* to, const void* from, size_t bytes);
using CombineRows = void (*)(void* out, const void* rows, size_t count, size_t width,
                             RowCombine use, const void* weights, bool first);

// By element type and operator; null if the operator is not defined for the element type.
struct Table {
  Fold reduce[n_dtypes][n_ops];
  Fold scale[n_dtypes];                // of one source
  LoadRow load_row;                    // null if only the language's atomics will do
  CombineRows combine_rows[n_dtypes];  // float32 and float64
  Quantize quantize[n_encodings];
  Dequantize dequantize[n_encodings];
};

extern const Table baseline;
#if defined(__x86_64__)
extern const Table avx2;
extern const Table avx512;
constexpr size_t n_variants = 3;
#else
constexpr size_t n_variants = 1;
#endif

struct Variant {
  const char* name;
  const Table* table;
  bool (*runs_here)();
};

// In the order of their requirements on the CPU.
extern const Variant variants[n_variants];

// Returns the table of the variant in use (instruction_set()).
const Table& in_use();

}  // namespace phalanx::kernels
