#include <algorithm>

#include "exchange.h"
#include "phalanx/collectives.h"
#include "sliced_reduction.h"
#include "sources.h"

namespace phalanx {
namespace {

// Above this, ranks reduce a slice each and then read the slices of the others: the bytes that a
// rank reads otherwise grow with the ranks, those of the slices don't. On 16 cores with one cache,
// both took as long at 32 to 48 KiB. Smaller slices would not fit the layout of small pieces.
std::size_t direct_limit(const Group& group) {
  constexpr std::size_t kReadBytes = 48 * 1024;
  const std::size_t limit = kReadBytes / static_cast<std::size_t>(group.ranks());
  return group.tree().empty() ? std::clamp(limit, kSmallPiece, kSmallBytes) : kSmallBytes;
}

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

// The root of the tree combines the data of all ranks, in their order, so that the result is the
// same with and without a tree. Little data move up in blocks. The root reads more data where they
// are.
Status reduce_over_tree(Collective& collective, std::byte* data, std::size_t bytes,
                        Sources& sources) {
  const Tree& tree = collective.group().tree();
  const std::size_t all_bytes = bytes * static_cast<std::size_t>(collective.ranks());
  const bool in_blocks = all_bytes <= kSmallBytes;
  Status status = collective.reserve(in_blocks ? bytes * tree.size() : bytes);
  if (!status.ok()) {
    return status;
  }
  std::byte* own = collective.data();
  copy_bytes(own, data, bytes);
  status = collective.enter_tree();
  if (!status.ok()) {
    return status;
  }
  if (in_blocks) {
    for (const int child : tree.children()) {
      copy_bytes(own + bytes * tree.place(child), collective.data(child), bytes * tree.size(child));
    }
  }
  if (tree.is_root()) {
    sources.combine(own, bytes, [&](int rank) -> const std::byte* {
      if (in_blocks || rank == collective.self()) {
        return own + bytes * tree.place(rank);
      }
      return collective.data(rank);
    });
  }
  collective.pass_up();
  status = collective.await_parent();
  if (!status.ok()) {
    return status;
  }
  if (!tree.is_root()) {
    copy_bytes(own, collective.data(tree.parent()), bytes);
  }
  collective.pass_down();
  copy_bytes(data, own, bytes);
  // The same on all ranks, although only the blocks of some are that large.
  if (bytes > kSmallPiece || (in_blocks && all_bytes > kSmallPiece)) {
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
  if (bytes > direct_limit(group)) {
    return SlicedReduction(collective, own, bytes, sources, -1).run();
  }
  return group.tree().empty() ? reduce_small(collective, own, bytes, sources)
                              : reduce_over_tree(collective, own, bytes, sources);
}

}  // namespace phalanx
