#include "phalanx/collectives.h"
#include "pipeline.h"
#include "zero_copy.h"

namespace phalanx {

Status broadcast(Group& group, void* data, std::size_t count, DType dtype, int root,
                 const Bounds& bounds) {
  const Group::CollectiveLock lock(group, bounds);
  if (!lock.status().ok()) {
    return lock.status();
  }
  const Fingerprint own{.count = count, .root = root, .kind = Kind::broadcast, .dtype = dtype};
  const std::size_t bytes = count * size_of(dtype);
  const bool is_root = group.rank() == root;
  const auto gives = [root](int rank) { return rank == root; };
  const auto takes = [root](int rank) { return rank != root; };
  const bool small = bytes <= kInlineBytes;
  Status status = group.prepare(own, bounds, is_root && !small);
  if (!status.ok()) {
    return status;
  }
  if (small && is_root) {
    copy_bytes(group.next_inline_buffer(), data, bytes);
  } else if (is_root) {
    SourceLocations(group.next_inline_buffer()).publish(data, bytes);
  }
  status = group.enter_collective(own, bounds);
  if (!status.ok()) {
    return status;
  }
  if (small) {
    if (!is_root) {
      copy_bytes(data, group.current_inline_buffer(root), bytes);
    }
    return status;
  }
  if (const ZeroCopySources zero_copy(group, gives); zero_copy.available()) {
    return zero_copy.copy(0, bounds, takes, [&](int, const std::byte* source) {
      deliver(data, source, bytes, bytes);
    });
  }
  const Segment& segment = group.segment();
  return move_chunks(
      group, bytes, move_chunk_bytes(group, bytes), bounds, gives, takes,
      [&](Span span, std::uint64_t chunk) {
        copy_bytes(segment.staging(root, chunk), at(data, span.begin), span.size);
      },
      [&](int peer, Span span, std::uint64_t chunk) {
        deliver(at(data, span.begin), segment.staging(peer, chunk), span.size, bytes);
      });
}

}  // namespace phalanx
