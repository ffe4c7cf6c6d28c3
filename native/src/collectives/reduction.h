// The common part of reduce and all_reduce, which differ only in the ranks that take the result.
#pragma once

#include "phalanx/collectives.h"

namespace phalanx {

// `own.count`, `dtype` and `op` define the reduction; `takes_result`: whether this rank takes the
// result.
Status reduce_to(Group& group, void* data, const Fingerprint& own, const Bounds& bounds,
                 bool takes_result);

}  // namespace phalanx
