// The collectives of one host, one source file each in src/collectives/.
//
// Every function blocks until this rank is done, holds the group's turn, and needs arguments that
// were validated: pointers to `count` contiguous elements, a root below ranks(), an operator that
// the dtype supports. A status that is not ok means that the group is broken; buffers then hold
// anything. Small payloads travel beside the flag, in one synchronisation (Group::meet); larger
// ones in chunks through the staging areas, so that what is copied stays in the cache.
#pragma once

#include <cstddef>

#include "phalanx/group.h"
#include "phalanx/reduce.h"

namespace phalanx {

Status barrier(Group& group, const Bounds& bounds);

Status broadcast(Group& group, void* data, std::size_t count, DType dtype, int root,
                 const Bounds& bounds);

// In place. The sources are combined in rank order whichever path is taken, so that the result is
// the same, bit for bit, on every rank and at every run.
Status all_reduce(Group& group, void* data, std::size_t count, DType dtype, ReduceOp op,
                  const Bounds& bounds);

// In place on the root; the data of the others is left as it is.
Status reduce(Group& group, void* data, std::size_t count, DType dtype, ReduceOp op, int root,
              const Bounds& bounds);

// outputs: ranks() pointers to `count` elements each on the root, ignored elsewhere.
Status gather(Group& group, const void* input, void* const* outputs, std::size_t count, DType dtype,
              int root, const Bounds& bounds);

// inputs: ranks() pointers to `count` elements each on the root, ignored elsewhere.
Status scatter(Group& group, const void* const* inputs, void* output, std::size_t count,
               DType dtype, int root, const Bounds& bounds);

// outputs: ranks() pointers to `count` elements each.
Status all_gather(Group& group, const void* input, void* const* outputs, std::size_t count,
                  DType dtype, const Bounds& bounds);

// inputs: ranks() pointers to `count` elements each; rank r gets the combination of all inputs[r].
// `output` may be inputs[rank()], not overlap the inputs otherwise. In rank order, as all_reduce.
Status reduce_scatter(Group& group, const void* const* inputs, void* output, std::size_t count,
                      DType dtype, ReduceOp op, const Bounds& bounds);

// What a rank gives to each rank, and where it takes what it gets; ranks() entries each.
struct Splits {
  const void* const* inputs;
  const std::uint64_t* input_counts;  // elements
  void* const* outputs;
  const std::uint64_t* output_counts;
};

// Counts may differ from pair to pair. All ranks compare all of them before data moves: what a rank
// gives to another must be what that one takes.
Status all_to_all(Group& group, const Splits& own, DType dtype, const Bounds& bounds);

}  // namespace phalanx
