// Gradients of rows, put together before a table is updated: each row once, in ascending order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "phalanx/reduce.h"
#include "phalanx/rows.h"

namespace phalanx {

// Rows that were combined bag by bag, and the gradient of each bag, of `width` elements. Without
// offsets each row is a bag of its own. The bags must be as `Rows::pool` takes them.
struct BagGradients {
  RowList list;
  Bags bags;
  Pooling pooling;      // sum or mean
  const void* weights;  // one for each row, or null
  const void* outputs;
};

// Which rows are wanted: those that leave `rest` when they are divided by `shares`.
struct RowShard {
  std::int64_t remainder = 0;
  std::int64_t count = 1;
};

// Where they are put: room for as many rows and gradients as come in.
struct GradientOutput {
  std::int64_t* rows;
  void* gradients;
};

// The gradient of each row: added up over its places in all batches, in their order, and divided
// by `divisor`. float32 or float64. Returns how many rows there are.
std::size_t coalesce_gradients(const std::vector<BagGradients>& batches, std::size_t width,
                               DType dtype, double divisor, const RowShard& shard,
                               const GradientOutput& output);

}  // namespace phalanx
