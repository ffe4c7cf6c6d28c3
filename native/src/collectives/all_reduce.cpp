#include "exchange.h"
#include "phalanx/collectives.h"
#include "sliced_reduction.h"
#include "sources.h"

namespace phalanx {
namespace {

Status reduce_by_exchange(Collective& collective, std::byte* data, std::size_t bytes,
                          Sources& sources) {
  const int self = collective.self();
  if (bytes > kSmallBytes) {
    publish_location(collective, data, bytes);
  }
  const auto stage = [&](std::byte* to, Span span) {
    copy_bytes(to, data + span.begin, span.size);
  };
  Exchange exchange(collective, bytes);
  const Status status = exchange.enter(stage);
  if (!status.ok()) {
    return status;
  }
  if (all_located(collective)) {
    return SlicedReduction(collective, data, bytes, sources, -1).run_in_place();
  }
  return exchange.run(kCombinedBlock, stage, [&](const std::byte* from, Span span) {
    std::byte* own = data + span.begin;
    sources.combine(own, span.size, [&](int rank) { return rank == self ? own : from; });
  });
}

// Every rank reads the data of all others.
Status reduce_small(Collective& collective, std::byte* data, std::size_t bytes, Sources& sources) {
  Status status = collective.reserve(bytes);
  if (!status.ok()) {
    return status;
  }
  copy_bytes(collective.data(), data, bytes);
  status = collective.enter(Peers::all);
  if (!status.ok()) {
    return status;
  }
  sources.combine(data, bytes, [&](int rank) {
    return rank == collective.self() ? data : collective.data(rank);
  });
  if (bytes > kSmallPiece) {
    collective.finish(collective.base() + 1);
  }
  return status;
}

}  // namespace

Status all_reduce(Group& group, void* data, std::size_t count, DType dtype, ReduceOp op,
                  const Bounds& bounds) {
  Collective collective(group, {.count = count, .kind = Kind::all_reduce, .dtype = dtype, .op = op},
                        bounds);
  if (!collective.status().ok()) {
    return collective.status();
  }
  const std::size_t bytes = count * size_of(dtype);
  auto* own = static_cast<std::byte*>(data);
  Sources sources(collective, dtype, op);
  if (group.ranks() == 2) {
    return reduce_by_exchange(collective, own, bytes, sources);
  }
  return bytes <= kSmallBytes ? reduce_small(collective, own, bytes, sources)
                              : SlicedReduction(collective, own, bytes, sources, -1).run();
}

}  // namespace phalanx
