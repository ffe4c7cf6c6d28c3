// The zero-copy path of large operations: receivers read sources that lie in arenas there, and
// nothing is staged. A rank publishes the locations of its sources with its entry.
#pragma once

#include <cstdint>
#include <cstring>

#include "phalanx/arena.h"
#include "phalanx/collective.h"
#include "phalanx/hooks.h"
#include "span.h"

namespace phalanx {

// Before the entry: publishes the location of the source in the entry, if it lies in this rank's
// arena.
inline void publish_location(Collective& collective, const void* source, std::size_t bytes) {
  static_assert(sizeof(ArenaLocation) <= kEntryPayload);
  if (const auto location = Arena::locate(source, bytes)) {
    PHALANX_STEP("zero_copy: publish the locations");
    std::memcpy(collective.payload(), &*location, sizeof *location);
    collective.mark_located();
  }
}

// After the entry: the source of a peer that has published its location, in this process; null with
// a status if it cannot be mapped.
inline std::byte* map_source(Collective& collective, int peer, Status& status) {
  PHALANX_STEP("zero_copy: read the locations");
  ArenaLocation location;
  std::memcpy(&location, collective.payload(peer), sizeof location);
  return collective.map_peer(peer, location, status);
}

// A table of the locations of a rank's sources, one for each peer, in memory that the peers read.
class LocationTable {
 public:
  static std::size_t bytes_for(int ranks) {
    return whole_lines((1 + static_cast<std::size_t>(ranks)) * sizeof(std::uint64_t));
  }
  explicit LocationTable(const std::byte* memory)
      : words_(reinterpret_cast<std::uint64_t*>(const_cast<std::byte*>(memory))) {}

  // Writes the locations of `source(r)`, of `bytes(r)` bytes, and marks this rank, if all of them
  // lie in its arena and at least one is not empty.
  template <class Source, class Bytes>
  void publish(Collective& collective, Source source, Bytes bytes) {
    PHALANX_STEP("zero_copy: publish the locations");
    std::int32_t descriptor = -1;
    for (int rank = 0; rank < collective.ranks(); ++rank) {
      if (bytes(rank) == 0) {
        continue;
      }
      const auto location = Arena::locate(source(rank), bytes(rank));
      if (!location) {
        return;
      }
      descriptor = location->descriptor;
      words_[1 + rank] = location->offset;
    }
    if (descriptor >= 0) {
      words_[0] = static_cast<std::uint64_t>(descriptor);
      collective.mark_located();
    }
  }
  // The source of `owner` for this rank, as map_source.
  std::byte* map_source(Collective& collective, int owner, Status& status) const {
    PHALANX_STEP("zero_copy: read the locations");
    return collective.map_peer(owner,
                               {.descriptor = static_cast<std::int32_t>(words_[0]),
                                .offset = words_[1 + collective.self()]},
                               status);
  }

 private:
  std::uint64_t* words_;
};

// After the entry: whether all ranks have published locations.
inline bool all_located(const Collective& collective) {
  for (int peer = 0; peer < collective.ranks(); ++peer) {
    if (!(peer == collective.self() ? collective.is_located() : collective.is_located(peer))) {
      return false;
    }
  }
  return true;
}

// Ends an operation in which peers read, or write, each other's tensors: no rank may continue
// before all have done so.
inline Status exit_barrier(const Collective& collective) {
  Group& group = collective.group();
  group.advance_to(collective.base() + 1);
  return group.wait_steps(collective.base() + 1, collective.bounds());
}

}  // namespace phalanx
