#include "phalanx/collectives.h"
#include "pipeline.h"
#include "zero_copy.h"

namespace phalanx {

Status scatter(Group& group, const void* const* inputs, void* output, std::size_t count,
               DType dtype, int root, const Bounds& bounds) {
  const Group::CollectiveLock lock(group, bounds);
  if (!lock.status().ok()) {
    return lock.status();
  }
  const Fingerprint own{.count = count, .root = root, .kind = Kind::scatter, .dtype = dtype};
  const std::size_t bytes = count * size_of(dtype);
  const int self = group.rank();
  const auto gives = [root](int rank) { return rank == root; };
  const auto takes = [root](int rank) { return rank != root; };
  const Parts parts(group, bytes);  // in the root's buffers
  const auto fill = [&](std::byte* buffer, Span span) {
    for (int rank = 0; rank < group.ranks(); ++rank) {
      if (rank != root) {
        copy_bytes(parts.of(buffer, rank), at(inputs[rank], span.begin), span.size);
      }
    }
  };
  Status status = group.prepare(own, bounds, !parts.small() && self == root);
  if (!status.ok()) {
    return status;
  }
  if (parts.small() && self == root) {
    fill(group.next_inline_buffer(), {0, bytes});
  } else if (self == root) {
    SourceLocations(group.next_inline_buffer())
        .publish(
            group.ranks(), [&](int rank) { return inputs[rank]; },
            [&](int rank) { return rank == root ? 0 : bytes; });
  }
  status = group.enter_collective(own, bounds);
  if (!status.ok()) {
    return status;
  }
  if (self == root) {
    deliver(output, inputs[root], bytes, bytes);
  } else if (parts.small()) {
    copy_bytes(output, parts.of(group.current_inline_buffer(root), self), bytes);
  }
  if (parts.small()) {
    return status;
  }
  if (const ZeroCopySources zero_copy(group, gives); zero_copy.available()) {
    return zero_copy.copy(self, bounds, takes, [&](int, const std::byte* source) {
      deliver(output, source, bytes, bytes);
    });
  }
  const Segment& segment = group.segment();
  return move_chunks(
      group, bytes, parts.size(), bounds, gives, takes,
      [&](Span span, std::uint64_t chunk) { fill(segment.staging(root, chunk), span); },
      [&](int peer, Span span, std::uint64_t chunk) {
        deliver(at(output, span.begin), parts.of(segment.staging(peer, chunk), self), span.size,
                bytes);
      });
}

}  // namespace phalanx
