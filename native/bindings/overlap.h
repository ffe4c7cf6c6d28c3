// Overlap checks for the buffers of a caller.
#pragma once

#include "core.h"

namespace phalanx::bindings {

// Whether one of the parts, of `bytes` each, overlaps `part` without being exactly part `rank`.
bool is_misplaced(Address part, const std::vector<Address>& parts, std::size_t bytes, int rank);

}  // namespace phalanx::bindings
