// The collectives of one host, one source file each in src/collectives/.
//
// Every function blocks until this rank is done, and holds the group's collective lock. Arguments
// must have been validated: pointers to `count` contiguous elements, a root below ranks(), an
// operator that the dtype supports. A status that is not ok means that the group is broken; the
// contents of buffers are then undefined. With Bounds::runs_ahead, a rank that only gives data (the
// root of a broadcast or scatter, all others in a gather or reduce) is done when the data are in
// shared memory, and a failure of its peers is reported by a later operation. Small data come with
// the entry, in one synchronisation (Collective::enter). Larger ones move in chunks, so that the
// copied data stay in the cache.
#pragma once

#include <cstddef>

#include "phalanx/group.h"
#include "phalanx/reduce.h"

namespace phalanx {

Status barrier(Group& group, const Bounds& bounds);

Status broadcast(Group& group, void* data, std::size_t count, DType dtype, int root,
                 const Bounds& bounds);

// In place. Every path combines the sources in rank order, so that the result is bitwise the same
// on every rank and in every run.
Status all_reduce(Group& group, void* data, std::size_t count, DType dtype, ReduceOp op,
                  const Bounds& bounds);

// In place on the root; the data of other ranks stay unchanged.
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
// `output` may be inputs[rank()], and must not overlap the inputs otherwise. Combines in rank
// order, like all_reduce.
Status reduce_scatter(Group& group, const void* const* inputs, void* output, std::size_t count,
                      DType dtype, ReduceOp op, const Bounds& bounds);

// The parts that a rank sends to and receives from each rank; ranks() entries each.
struct Splits {
  const void* const* inputs;
  const std::uint64_t* input_counts;  // elements
  void* const* outputs;
  const std::uint64_t* output_counts;
};

// Counts may differ between pairs. All ranks compare all counts before data moves: a rank must send
// to another exactly what the other expects from it.
Status all_to_all(Group& group, const Splits& own, DType dtype, const Bounds& bounds);

}  // namespace phalanx
