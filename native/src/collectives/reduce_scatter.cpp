#include "exchange.h"
#include "parts.h"
#include "phalanx/collectives.h"
#include "sources.h"

namespace phalanx {
namespace {

Status scatter_by_exchange(Collective& collective, const void* const* inputs, std::byte* output,
                           std::size_t bytes, Sources& sources) {
  const int self = collective.self();
  const int peer = 1 - self;
  const auto combine = [&](const std::byte* theirs, Span span) {
    sources.combine(output + span.begin, span.size,
                    [&](int rank) { return rank == self ? at(inputs[self], span.begin) : theirs; });
  };
  if (bytes > kSmallBytes) {
    publish_location(collective, inputs[peer], bytes);
  }
  const auto stage = [&](std::byte* to, Span span) {
    copy_bytes(to, at(inputs[peer], span.begin), span.size);
  };
  Exchange exchange(collective, bytes);
  Status status = exchange.enter(stage);
  if (!status.ok() || !all_located(collective)) {
    return status.ok() ? exchange.run(kCombinedBlock, stage, combine) : status;
  }
  const std::byte* theirs = map_source(collective, peer, status);
  if (theirs == nullptr) {
    return status;
  }
  combine(theirs, {0, bytes});
  return exit_barrier(collective);
}

Status scatter_in_place(Collective& collective, const void* const* inputs, std::byte* output,
                        std::size_t bytes, Sources& sources) {
  std::array<const std::byte*, kMaxRanks> mapped;
  for (int rank = 0; rank < collective.ranks(); ++rank) {
    Status status;
    const std::byte* source =
        rank == collective.self()
            ? at(inputs[rank], 0)
            : LocationTable(collective.data(rank)).map_source(collective, rank, status);
    if (source == nullptr) {
      return status;
    }
    mapped[static_cast<std::size_t>(rank)] = source;
  }
  sources.combine(output, bytes, [&](int rank) { return mapped[static_cast<std::size_t>(rank)]; });
  return exit_barrier(collective);
}

}  // namespace

Status reduce_scatter(Group& group, const void* const* inputs, void* output, std::size_t count,
                      DType dtype, ReduceOp op, const Bounds& bounds) {
  Collective collective(
      group, {.count = count, .kind = Kind::reduce_scatter, .dtype = dtype, .op = op}, bounds);
  if (!collective.status().ok()) {
    return collective.status();
  }
  const std::size_t bytes = count * size_of(dtype);
  auto* out = static_cast<std::byte*>(output);
  Sources sources(collective, dtype, op);
  if (group.ranks() == 2) {
    return scatter_by_exchange(collective, inputs, out, bytes, sources);
  }
  const int self = group.rank();
  Parts parts(collective, bytes);
  const auto stage = [&](std::byte* piece, std::uint64_t chunk) {
    const Span span = parts.span(chunk);
    for (int rank = 0; rank < group.ranks(); ++rank) {
      if (rank != self) {
        copy_bytes(parts.place(piece, chunk, rank), at(inputs[rank], span.begin), span.size);
      }
    }
  };
  Status status = parts.enter(
      stage, [&](int rank) { return inputs[rank]; },
      [&](int rank) { return rank == self ? 0 : bytes; });
  if (!status.ok()) {
    return status;
  }
  if (!parts.small() && all_located(collective)) {
    return scatter_in_place(collective, inputs, out, bytes, sources);
  }
  return parts.run(stage, [&](std::uint64_t chunk) {
    const Span span = parts.span(chunk);
    sources.combine(out + span.begin, span.size, [&](int rank) {
      return rank == self ? at(inputs[self], span.begin)
                          : parts.place(collective.data(rank), chunk, self);
    });
  });
}

}  // namespace phalanx
