#pragma once

#include "phalanx/collectives.h"
#include "pipeline.h"
#include "zero_copy.h"

namespace phalanx {

// gather and all_gather differ only in the ranks that consume.
template <class Consumes>
Status gather_to(Group& group, const void* input, void* const* outputs, std::size_t bytes,
                 const Fingerprint& own, const Bounds& bounds, Consumes consumes) {
  const int self = group.rank();
  const bool small = bytes <= kInlineBytes;
  const auto gives = [](int) { return true; };
  Status status = group.prepare(own, bounds, !small);
  if (!status.ok()) {
    return status;
  }
  if (small) {
    copy_bytes(group.next_inline_buffer(), input, bytes);
  } else {
    SourceLocations(group.next_inline_buffer()).publish(input, bytes);
  }
  status = group.enter_collective(own, bounds);
  if (!status.ok()) {
    return status;
  }
  if (consumes(self)) {
    deliver(outputs[self], input, bytes, bytes);
  }
  if (small) {
    for (int peer = 0; consumes(self) && peer < group.ranks(); ++peer) {
      if (peer != self) {
        copy_bytes(outputs[peer], group.current_inline_buffer(peer), bytes);
      }
    }
    return status;
  }
  if (const ZeroCopySources zero_copy(group, gives); zero_copy.available()) {
    return zero_copy.copy(0, bounds, consumes, [&](int peer, const std::byte* source) {
      deliver(outputs[peer], source, bytes, bytes);
    });
  }
  const Segment& segment = group.segment();
  return move_chunks(
      group, bytes, move_chunk_bytes(group, bytes), bounds, gives, consumes,
      [&](Span span, std::uint64_t chunk) {
        copy_bytes(segment.staging(self, chunk), at(input, span.begin), span.size);
      },
      [&](int peer, Span span, std::uint64_t chunk) {
        deliver(at(outputs[peer], span.begin), segment.staging(peer, chunk), span.size, bytes);
      });
}

}  // namespace phalanx
