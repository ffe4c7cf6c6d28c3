// Gradients of rows, coalesced before a table is updated: each row once, in ascending order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "phalanx/reduce.h"
#include "phalanx/rows.h"

namespace phalanx {

// Rows that were pooled into bags, and the gradient of each bag, of `width` elements. Without
// offsets each row is a bag of its own. The bags must be valid for `Rows::pool`.
struct BagGradients {
  RowList list;
  Bags bags;
  Pooling pooling;      // sum or mean
  const void* weights;  // one per row, or null
  const void* outputs;
};

// A shard of the rows: those whose index modulo `count` is `remainder`.
struct RowShard {
  std::int64_t remainder = 0;
  std::int64_t count = 1;
};

// The output, with room for as many rows and gradients as the batches contain.
struct GradientOutput {
  std::int64_t* rows;
  void* gradients;
};

// Computes the gradient of each row: the sum over its occurrences in all batches, in their order,
// divided by `divisor`. float32 or float64. Returns the number of rows.
std::size_t coalesce_gradients(const std::vector<BagGradients>& batches, std::size_t width,
                               DType dtype, double divisor, const RowShard& shard,
                               const GradientOutput& output);

}  // namespace phalanx
