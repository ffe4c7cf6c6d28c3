// One-way moves: some ranks give data in their rings, and some take them. A rank that only gives is
// ahead of those that take by as much as its ring and its entries allow.
#pragma once

#include "locations.h"
#include "phalanx/collective.h"
#include "span.h"

namespace phalanx {

// The division of a stream into chunks, and the places of these in the giver's piece of the ring.
// `parts`: the number of parts of a chunk, one for each taker if they get different data.
class Chunks {
 public:
  Chunks(const Collective& collective, std::size_t total, int parts = 1)
      : total_(total), parts_(static_cast<std::size_t>(parts)), bytes_(total) {
    const std::size_t whole = collective.group().segment().chunk_bytes();
    const std::size_t largest = (parts == 1 ? whole : whole / parts_) / kSlots;
    const std::size_t smallest = parts == 1 ? kSmallBytes : kSmallBytes / parts_;
    if (total > std::min(smallest, largest)) {
      bytes_ = std::clamp(total / kSlots, std::min(smallest, largest), largest);
      bytes_ = std::max(kCacheLine, bytes_ / kCacheLine * kCacheLine);
      count_ = chunks_of(total, bytes_);
    }
  }

  // All data are in place at the entry, and are not worth a zero-copy path.
  bool small() const { return count_ == 1 && total_ * parts_ <= kSmallBytes; }
  std::uint64_t count() const { return count_; }
  Span span(std::uint64_t chunk) const { return chunk_of(total_, bytes_, chunk); }
  // The size of the piece in the ring.
  std::size_t piece() const { return bytes_ * parts_ * std::min(count_, kSlots); }
  // Chunk c takes the place of chunk c - kSlots.
  std::byte* place(std::byte* piece, std::uint64_t chunk, int part = 0) const {
    return piece + ((chunk % kSlots) * parts_ + static_cast<std::size_t>(part)) * bytes_;
  }
  const std::byte* place(const std::byte* piece, std::uint64_t chunk, int part = 0) const {
    return place(const_cast<std::byte*>(piece), chunk, part);
  }

  static constexpr std::uint64_t kSlots = 4;

 private:
  std::size_t total_;
  std::size_t parts_;
  std::size_t bytes_;
  std::uint64_t count_ = 1;
};

// Enters the collective and moves all chunks, through a piece that it reserves unless that is done.
// `gives(r)` and `takes(r)` tell which ranks do so, and
// are the same on all ranks; `peers`: the ranks that a taker waits for. `stage(piece, chunk)` fills
// this rank's place of a chunk; `take(peer, piece, chunk)` reads the peer's. If this rank has
// published locations, it stages nothing, and `take_source(peer, status)` takes the whole of its
// source.
//
// Steps: a rank at base + c has staged chunk c and taken all before. At base + count it is done.
template <class Gives, class Takes, class Stage, class Take, class TakeSource>
Status stream(Collective& collective, const Chunks& chunks, Peers peers, Gives gives, Takes takes,
              Stage stage, Take take, TakeSource take_source) {
  Group& group = collective.group();
  const int self = collective.self();
  const bool stages = gives(self) && !collective.is_located();
  const auto others = [&](auto chosen, auto action) {
    Status status;
    for (int peer = 0; status.ok() && peer < collective.ranks(); ++peer) {
      if (peer != self && chosen(peer)) {
        status = action(peer);
      }
    }
    return status;
  };
  // A rank that waits for takers compares their entries first: they might be in another operation.
  const auto wait_for_takers = [&](std::uint64_t step) {
    const Status status = collective.meet();
    return status.ok()
               ? others(takes,
                        [&](int peer) { return group.wait_step(peer, step, collective.bounds()); })
               : status;
  };
  if (!chunks.small()) {
    collective.block();
  }
  Status status;
  if (stages) {
    if (collective.data() == nullptr) {
      status = collective.reserve(chunks.piece());
    }
    if (!status.ok()) {
      return status;
    }
    stage(collective.data(), 0);
  }
  status = collective.enter(takes(self) ? peers : Peers::none);
  const std::uint64_t base = collective.base();
  for (std::uint64_t chunk = 0; status.ok() && chunk < chunks.count(); ++chunk) {
    if (chunk != 0) {
      if (stages) {
        if (chunk >= Chunks::kSlots) {
          status = wait_for_takers(base + chunk - Chunks::kSlots + 1);
          if (!status.ok()) {
            return status;
          }
        }
        stage(collective.data(), chunk);
      }
      group.advance();
    }
    if (!takes(self)) {
      continue;
    }
    status = others(gives, [&](int peer) {
      Status now;
      if (collective.is_located(peer)) {
        if (chunk == 0) {
          take_source(peer, now);
        }
        return now;
      }
      if (chunk != 0) {  // the first one came with the entry
        now = group.wait_step(peer, base + chunk, collective.bounds());
      }
      if (now.ok()) {
        take(peer, collective.data(peer), chunk);
      }
      return now;
    });
  }
  if (!status.ok() || (chunks.small() && chunks.piece() <= kSmallPiece)) {
    return status;
  }
  collective.finish(base + chunks.count());
  return gives(self) && !stages ? wait_for_takers(base + chunks.count()) : status;
}

}  // namespace phalanx
