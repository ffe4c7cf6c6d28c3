// Overlap checks for the buffers of a caller.
#pragma once

#include "core.h"

namespace phalanx::bindings {

// Whether an input shares memory with an output. Counts are in elements.
bool overlap(const std::vector<Address>& inputs, const std::vector<std::uint64_t>& input_counts,
             const std::vector<Address>& outputs, const std::vector<std::uint64_t>& output_counts,
             DType dtype);

// Whether two of several parts share memory. Counts are in elements of `size` bytes.
bool have_common_memory(const std::vector<Address>& starts,
                        const std::vector<std::uint64_t>& counts, std::size_t size);

// Whether one of the parts, of `bytes` each, overlaps `part` without being exactly part `rank`.
bool is_misplaced(Address part, const std::vector<Address>& parts, std::size_t bytes, int rank);

}  // namespace phalanx::bindings
