// The zero-copy path of large operations: if all sources lie in arenas, the receivers read them
// there, and nothing is staged. Ranks agree on this path without additional communication: each
// publishes the locations of its sources in its inline buffer, before it enters the collective.
#pragma once

#include <algorithm>
#include <cstdint>

#include "phalanx/arena.h"
#include "phalanx/group.h"
#include "phalanx/hooks.h"

namespace phalanx {

// The locations that a rank publishes: the descriptor of its arena plus one, or 0 if not all of its
// sources lie there, and the offset of each source.
class SourceLocations {
 public:
  explicit SourceLocations(std::byte* inline_buffer)
      : words_(reinterpret_cast<std::uint64_t*>(inline_buffer)) {}
  static constexpr std::size_t bytes_for(std::size_t count) {
    return (1 + count) * sizeof(std::uint64_t);
  }

  // `source(i)` and `bytes(i)` for i < count.
  template <class Source, class Bytes>
  void publish(int count, Source source, Bytes bytes) {
    PHALANX_STEP("zero_copy: publish the locations");
    words_[0] = 0;
    std::uint64_t descriptor = 0;
    for (int i = 0; i < count; ++i) {
      const auto location = bytes(i) == 0
                                ? ArenaLocation{.descriptor = 0, .offset = 0}
                                : Arena::locate(source(i), bytes(i)).value_or(ArenaLocation{});
      if (location.descriptor < 0) {
        return;
      }
      if (bytes(i) != 0) {
        descriptor = static_cast<std::uint64_t>(location.descriptor) + 1;
      }
      words_[1 + i] = location.offset;
    }
    words_[0] = descriptor;
  }
  // One source, the same for all peers.
  void publish(const void* source, std::size_t bytes) {
    publish(1, [source](int) { return source; }, [bytes](int) { return bytes; });
  }
  bool in_arena() const { return words_[0] != 0; }
  // Source i in this process; null with a status if the arena cannot be mapped.
  std::byte* map_peer(Group& group, int owner, int i, Status& status) const {
    return group.map_peer(owner,
                          ArenaLocation{.descriptor = static_cast<std::int32_t>(words_[0] - 1),
                                        .offset = words_[1 + i]},
                          status);
  }

 private:
  std::uint64_t* words_;
};
static_assert(SourceLocations::bytes_for(kMaxRanks) <= kInlineBytes);

// Ends an operation in which peers read, or write, each other's tensors: no rank may continue
// before all have done so.
inline Status exit_barrier(Group& group, const Bounds& bounds) {
  group.advance();
  return group.wait_steps(group.step(), bounds);
}

// The published locations of all ranks, once the collective is entered. `gives(r)` tells which
// ranks have sources, and is the same on all ranks; `offset`: the position in the inline buffers.
template <class Gives>
class ZeroCopySources {
 public:
  ZeroCopySources(Group& group, Gives gives, std::size_t offset = 0)
      : group_(group), gives_(gives), offset_(offset) {}

  // Whether all sources lie in arenas.
  bool available() const {
    PHALANX_STEP("zero_copy: read the locations");
    for (int rank = 0; rank < group_.ranks(); ++rank) {
      if (gives_(rank) && !sources_of(rank).in_arena()) {
        return false;
      }
    }
    return true;
  }

  // Source `index` of a rank in this process; null with a status if that fails.
  std::byte* map_peer(int rank, int index, Status& status) const {
    return sources_of(rank).map_peer(group_, rank, index, status);
  }

  // If this rank is a receiver: calls `take(peer, source)` with source `index` of every peer that
  // has sources.
  template <class Takes, class Take>
  Status copy(int index, const Bounds& bounds, Takes takes, Take take) const {
    const int self = group_.rank();
    for (int i = 1; takes(self) && i < group_.ranks(); ++i) {
      const int peer = (self + i) % group_.ranks();  // spread the load over the peers
      if (gives_(peer)) {
        Status status;
        const std::byte* source = map_peer(peer, index, status);
        if (source == nullptr) {
          return status;
        }
        take(peer, source);
      }
    }
    return exit_barrier(group_, bounds);
  }

 private:
  SourceLocations sources_of(int rank) const {
    return SourceLocations(group_.current_inline_buffer(rank) + offset_);
  }

  Group& group_;
  Gives gives_;
  std::size_t offset_;
};

}  // namespace phalanx
