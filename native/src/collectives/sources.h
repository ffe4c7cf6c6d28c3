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
      : ranks_(collective.ranks()), dtype_(dtype), op_(op) {}

  // `source(rank)`: the first byte of the rank's data.
  template <class Source>
  void combine(void* out, std::size_t bytes, Source source) {
    combine_part(out, bytes, nullptr, 0, ranks_, source);
  }

  // Combines a part of the ranks, [begin, end), with `before`: the combined data of all ranks below
  // `begin`, or null if there are none. The part with the last rank ends the reduction. The result
  // of all parts has the bits of `combine`, if has_exact_parts().
  template <class Source>
  void combine_part(void* out, std::size_t bytes, const void* before, int begin, int end,
                    Source source) {
    std::size_t n = 0;
    if (before != nullptr) {
      sources_[n++] = before;
    }
    for (int rank = begin; rank < end; ++rank) {
      sources_[n++] = source(rank);
    }
    if (bytes != 0) {
      const ReduceOp op = end < ranks_ && op_ == ReduceOp::avg ? ReduceOp::sum : op_;
      phalanx::reduce(out, sources_.data(), n, bytes / size_of(dtype_), dtype_, op,
                      static_cast<double>(ranks_));
    }
  }

  // Whether the result of a part loses nothing when it is stored. 16-bit floats are combined as
  // float32, and rounded at the end: that of a minimum or maximum changes nothing.
  bool has_exact_parts() const {
    const bool is_half = dtype_ == DType::float16 || dtype_ == DType::bfloat16;
    return !is_half || op_ == ReduceOp::min || op_ == ReduceOp::max;
  }

 private:
  int ranks_;
  DType dtype_;
  ReduceOp op_;
  std::array<const void*, kMaxRanks> sources_;
};

// The unit of combination in which the lines that were read are still in the cache of the core when
// others are written to them.
inline constexpr std::size_t kCombinedBlock = 2 * 1024;

}  // namespace phalanx
