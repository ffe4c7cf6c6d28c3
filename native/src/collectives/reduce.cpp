#include "phalanx/collectives.h"
#include "sliced_reduction.h"
#include "sources.h"
#include "stream.h"

namespace phalanx {
namespace {

// The root combines the data of two ranks alone. If the other rank combined half, it would save the
// root half of that work, but cost it a copy of the result.
Status reduce_of_two(Collective& collective, std::byte* data, std::size_t bytes, Sources& sources,
                     int root) {
  const int self = collective.self();
  const Chunks chunks(collective, bytes);
  if (self != root && !chunks.small()) {
    publish_location(collective, data, bytes);
  }
  const auto combine = [&](Span span, const std::byte* theirs) {
    std::byte* own = data + span.begin;
    sources.combine(own, span.size, [&](int rank) { return rank == self ? own : theirs; });
  };
  return stream(
      collective, chunks, Peers::all, [root](int rank) { return rank != root; },
      [root](int rank) { return rank == root; },
      [&](std::byte* piece, std::uint64_t chunk) {
        const Span span = chunks.span(chunk);
        copy_bytes(chunks.place(piece, chunk), data + span.begin, span.size);
      },
      [&](int, const std::byte* piece, std::uint64_t chunk) {
        combine(chunks.span(chunk), chunks.place(piece, chunk));
      },
      [&](int peer, Status& mapped) {
        if (const std::byte* source = map_source(collective, peer, mapped)) {
          combine({0, bytes}, source);
        }
      });
}

// The root reads the data of all others.
Status reduce_small(Collective& collective, std::byte* data, std::size_t bytes, Sources& sources,
                    int root) {
  const int self = collective.self();
  Status status;
  if (self != root) {
    status = collective.reserve(bytes);
    if (!status.ok()) {
      return status;
    }
    copy_bytes(collective.data(), data, bytes);
  }
  status = collective.enter(self == root ? Peers::all : Peers::none);
  if (!status.ok()) {
    return status;
  }
  if (self == root) {
    sources.combine(data, bytes,
                    [&](int rank) { return rank == self ? data : collective.data(rank); });
  }
  if (bytes > kSmallPiece) {
    collective.finish(collective.base() + 1);
  }
  return status;
}

}  // namespace

Status reduce(Group& group, void* data, std::size_t count, DType dtype, ReduceOp op, int root,
              const Bounds& bounds) {
  Collective collective(
      group, {.count = count, .root = root, .kind = Kind::reduce, .dtype = dtype, .op = op},
      bounds);
  if (!collective.status().ok()) {
    return collective.status();
  }
  const std::size_t bytes = count * size_of(dtype);
  auto* own = static_cast<std::byte*>(data);
  Sources sources(collective, dtype, op);
  if (group.ranks() == 2) {
    return reduce_of_two(collective, own, bytes, sources, root);
  }
  return bytes <= kSmallBytes ? reduce_small(collective, own, bytes, sources, root)
                              : SlicedReduction(collective, own, bytes, sources, root).run();
}

}  // namespace phalanx
