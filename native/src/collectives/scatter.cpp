#include "phalanx/collectives.h"
#include "pipeline.h"

namespace phalanx {

Status scatter(Group& group, const void* const* inputs, void* output, std::size_t count,
               DType dtype, int root, const Bounds& bounds) {
  const std::lock_guard turn(group.turn());
  const Fingerprint own{.count = count, .root = root, .kind = Kind::scatter, .dtype = dtype};
  const std::size_t bytes = count * size_of(dtype);
  const int self = group.rank();
  const auto ranks = static_cast<std::size_t>(group.ranks());
  // The root's buffers hold a part for each rank, at its rank times the size of a part.
  const bool small = bytes * ranks <= kInlineBytes;
  const std::size_t part = small ? bytes : group.segment().chunk_bytes() / ranks / kLine * kLine;
  const auto place = [part](int rank) { return static_cast<std::size_t>(rank) * part; };
  const auto fill = [&](std::byte* buffer, Span span) {
    for (int rank = 0; rank < group.ranks(); ++rank) {
      if (rank != root) {
        copy_bytes(buffer + place(rank), at(inputs[rank], span.begin), span.size);
      }
    }
  };
  Status status = group.prepare(!small && self == root);
  if (!status.ok()) {
    return status;
  }
  if (small && self == root) {
    fill(group.next_inline_buffer(), {0, bytes});
  }
  status = group.meet(own, bounds);
  if (!status.ok()) {
    return status;
  }
  if (self == root) {
    copy_bytes(output, inputs[root], bytes);
  } else if (small) {
    copy_bytes(output, group.met_inline_buffer(root) + place(self), bytes);
  }
  const Segment& segment = group.segment();
  return small ? status
               : move_chunks(
                     group, bytes, part, bounds, [&](int rank) { return rank == root; },
                     [&](int rank) { return rank != root; },
                     [&](Span span, std::uint64_t chunk) {
                       fill(segment.staging(root, chunk), span);
                     },
                     [&](int peer, Span span, std::uint64_t chunk) {
                       copy_bytes(at(output, span.begin),
                                  segment.staging(peer, chunk) + place(self), span.size);
                     });
}

}  // namespace phalanx
