#include "phalanx/collectives.h"
#include "stream.h"

namespace phalanx {

Status scatter(Group& group, const void* const* inputs, void* output, std::size_t count,
               DType dtype, int root, const Bounds& bounds) {
  Collective collective(
      group, {.count = count, .root = root, .kind = Kind::scatter, .dtype = dtype}, bounds);
  Status status = collective.status();
  if (!status.ok()) {
    return status;
  }
  const std::size_t bytes = count * size_of(dtype);
  const int self = group.rank();
  const Chunks chunks(collective, bytes, std::max(1, group.ranks() - 1));
  // The root's piece begins with the table of locations, if the data may need one.
  const std::size_t table = chunks.small() ? 0 : LocationTable::bytes_for(group.ranks());
  if (self == root && table != 0) {
    status = collective.reserve(table + chunks.piece());
    if (!status.ok()) {
      return status;
    }
    LocationTable(collective.data())
        .publish(
            collective, [&](int rank) { return inputs[rank]; },
            [&](int rank) { return rank == root ? 0 : bytes; });
  }
  const auto part = [root](int rank) { return rank < root ? rank : rank - 1; };
  status = stream(
      collective, chunks, Peers::root, [root](int rank) { return rank == root; },
      [root](int rank) { return rank != root; },
      [&](std::byte* piece, std::uint64_t chunk) {
        const Span span = chunks.span(chunk);
        for (int rank = 0; rank < group.ranks(); ++rank) {
          if (rank != root) {
            copy_bytes(chunks.place(piece + table, chunk, part(rank)), at(inputs[rank], span.begin),
                       span.size);
          }
        }
      },
      [&](int, const std::byte* piece, std::uint64_t chunk) {
        const Span span = chunks.span(chunk);
        deliver(at(output, span.begin), chunks.place(piece + table, chunk, part(self)), span.size,
                bytes);
      },
      [&](int peer, Status& mapped) {
        const LocationTable locations(collective.data(peer));
        if (const std::byte* source = locations.map_source(collective, peer, mapped)) {
          deliver(output, source, bytes, bytes);
        }
      });
  if (status.ok() && self == root) {
    deliver(output, inputs[root], bytes, bytes);
  }
  return status;
}

}  // namespace phalanx
