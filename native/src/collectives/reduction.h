// What reduce and all_reduce share: they differ in who takes the result.
#pragma once

#include "phalanx/collectives.h"

namespace phalanx {

// `own.count`, `dtype` and `op` say what is reduced; `wanted`: whether this rank takes the result.
Status reduce_to(Group& group, void* data, const Fingerprint& own, const Bounds& bounds,
                 bool takes_result);

}  // namespace phalanx
