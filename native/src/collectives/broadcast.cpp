#include "phalanx/collectives.h"
#include "stream.h"

namespace phalanx {

Status broadcast(Group& group, void* data, std::size_t count, DType dtype, int root,
                 const Bounds& bounds) {
  Collective collective(
      group, {.count = count, .root = root, .kind = Kind::broadcast, .dtype = dtype}, bounds);
  if (!collective.status().ok()) {
    return collective.status();
  }
  const std::size_t bytes = count * size_of(dtype);
  const Chunks chunks(collective, bytes);
  if (group.rank() == root && !chunks.small()) {
    publish_location(collective, data, bytes);
  }
  return stream(
      collective, chunks, Peers::root, [root](int rank) { return rank == root; },
      [root](int rank) { return rank != root; },
      [&](std::byte* piece, std::uint64_t chunk) {
        const Span span = chunks.span(chunk);
        copy_bytes(chunks.place(piece, chunk), at(data, span.begin), span.size);
      },
      [&](int, const std::byte* piece, std::uint64_t chunk) {
        const Span span = chunks.span(chunk);
        deliver(at(data, span.begin), chunks.place(piece, chunk), span.size, bytes);
      },
      [&](int peer, Status& mapped) {
        if (const std::byte* source = map_source(collective, peer, mapped)) {
          deliver(data, source, bytes, bytes);
        }
      });
}

}  // namespace phalanx
