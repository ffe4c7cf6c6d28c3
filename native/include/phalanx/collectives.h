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

}  // namespace phalanx
