// Inside of reduce.cpp: the tables of kernels, one per instruction set.
//
// The variants are one source, kernels.inc, compiled with different flags. What it includes must
// not bring functions with external linkage along: the linker keeps one copy of those, perhaps the
// one with instructions that this CPU lacks. Hence C headers only, and everything in unnamed
// namespaces.
#pragma once

#include <stddef.h>

#include "phalanx/reduce.h"

namespace phalanx::kernels {

constexpr size_t n_dtypes = 15;
constexpr size_t n_ops = 9;

// Combines sources as phalanx::reduce does; `parameter` is the divisor or the factor.
using Fold = void (*)(void* out, const void* const* sources, size_t n_sources, size_t count,
                      double parameter);

// By element type and operator; null where the operator has no meaning for the element type.
struct Table {
  Fold reduce[n_dtypes][n_ops];
  Fold scale[n_dtypes];  // of one source
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

// From the least to the most that they ask of the CPU.
extern const Variant variants[n_variants];

}  // namespace phalanx::kernels
