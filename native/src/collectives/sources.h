// The sources of a reduction, in rank order.
#pragma once

#include <array>

#include "phalanx/collective.h"
#include "phalanx/reduce.h"
#include "span.h"

namespace phalanx {

// Combines one span of the data of all ranks. Fixed in size: once a collective is entered, nothing
// may fail on one rank alone.
class Sources {
 public:
  Sources(const Collective& collective, DType dtype, ReduceOp op)
      : ranks_(static_cast<std::size_t>(collective.ranks())), dtype_(dtype), op_(op) {}

  // `source(rank)`: the first byte of the rank's data.
  template <class Source>
  void combine(void* out, std::size_t bytes, Source source) {
    for (std::size_t rank = 0; rank < ranks_; ++rank) {
      sources_[rank] = source(static_cast<int>(rank));
    }
    if (bytes != 0) {
      phalanx::reduce(out, sources_.data(), ranks_, bytes / size_of(dtype_), dtype_, op_,
                      static_cast<double>(ranks_));
    }
  }

 private:
  std::size_t ranks_;
  DType dtype_;
  ReduceOp op_;
  std::array<const void*, kMaxRanks> sources_;
};

// The unit of combination in which the lines that were read are still in the cache of the core when
// others are written to them.
inline constexpr std::size_t kCombinedBlock = 2 * 1024;

}  // namespace phalanx
