#include <array>

#include "phalanx/collectives.h"
#include "pipeline.h"
#include "zero_copy.h"

namespace phalanx {
namespace {

// One rank's part of the result: combines the sources that all ranks have for it.
class OwnPart {
 public:
  OwnPart(const Group& group, const void* input, void* output, const Fingerprint& own)
      : group_(group), input_(input), output_(output), own_(own) {}

  // `source(peer)`: the peer's source for this rank's span.
  template <class Source>
  void combine(Span span, Source source) {
    for (int rank = 0; rank < group_.ranks(); ++rank) {
      sources_[static_cast<std::size_t>(rank)] =
          rank == group_.rank() ? at(input_, span.begin) : source(rank);
    }
    phalanx::reduce(at(output_, span.begin), sources_.data(),
                    static_cast<std::size_t>(group_.ranks()), span.size / size_of(own_.dtype),
                    own_.dtype, own_.op, group_.ranks());
  }

 private:
  const Group& group_;
  const void* input_;
  void* output_;
  const Fingerprint& own_;
  // Fixed in size: once a collective is entered, nothing may fail on one rank alone.
  std::array<const void*, kMaxRanks> sources_;
};

}  // namespace

Status reduce_scatter(Group& group, const void* const* inputs, void* output, std::size_t count,
                      DType dtype, ReduceOp op, const Bounds& bounds) {
  const Group::CollectiveLock lock(group, bounds);
  if (!lock.status().ok()) {
    return lock.status();
  }
  const Fingerprint own{.count = count, .kind = Kind::reduce_scatter, .dtype = dtype, .op = op};
  const std::size_t bytes = count * size_of(dtype);
  const int self = group.rank();
  const Parts parts(group, bytes);
  const auto fill = [&](std::byte* buffer, Span span) {
    for (int rank = 0; rank < group.ranks(); ++rank) {
      if (rank != self) {
        copy_bytes(parts.of(buffer, rank), at(inputs[rank], span.begin), span.size);
      }
    }
  };
  Status status = group.prepare(own, bounds, !parts.small());
  if (!status.ok()) {
    return status;
  }
  if (parts.small()) {
    fill(group.next_inline_buffer(), {0, bytes});
  } else {
    SourceLocations(group.next_inline_buffer())
        .publish(
            group.ranks(), [&](int rank) { return inputs[rank]; },
            [&](int rank) { return rank == self ? 0 : bytes; });
  }
  status = group.enter_collective(own, bounds);
  if (!status.ok() || count == 0) {
    return status;
  }
  OwnPart part(group, inputs[self], output, own);
  if (parts.small()) {
    part.combine({0, bytes},
                 [&](int peer) { return parts.of(group.current_inline_buffer(peer), self); });
    return status;
  }
  if (const ZeroCopySources zero_copy(group, [](int) { return true; }); zero_copy.available()) {
    std::array<const std::byte*, kMaxRanks> sources;
    for (int rank = 0; rank < group.ranks(); ++rank) {
      const std::byte* source =
          rank == self ? at(inputs[self], 0) : zero_copy.map_peer(rank, self, status);
      if (source == nullptr) {
        return status;
      }
      sources[static_cast<std::size_t>(rank)] = source;
    }
    part.combine({0, bytes}, [&](int peer) { return sources[static_cast<std::size_t>(peer)]; });
    return exit_barrier(group, bounds);
  }
  const Segment& segment = group.segment();
  return exchange_chunks(
      group, bytes, parts.size(), bounds,
      [&](Span span, std::uint64_t chunk) { fill(segment.staging(self, chunk), span); },
      [&](Span span, std::uint64_t chunk) {
        part.combine(span, [&](int peer) { return parts.of(segment.staging(peer, chunk), self); });
      });
}

}  // namespace phalanx
