// Moves in which every rank gives every other a part of its own, for more than two ranks. A chunk
// in a rank's piece of the ring has a place for a part of every rank.
#pragma once

#include "locations.h"
#include "phalanx/collective.h"
#include "span.h"

namespace phalanx {

class Parts {
 public:
  // `longest`: the size of the longest part. All data are in place at the entry if the chunk with
  // all parts is small.
  Parts(Collective& collective, std::size_t longest)
      : collective_(collective),
        small_(longest * static_cast<std::size_t>(collective.ranks()) <= kSmallBytes),
        longest_(longest),
        bytes_(small_ ? longest : largest(collective)) {}

  bool small() const { return small_; }
  Span span(std::uint64_t chunk) const { return chunk_of(longest_, bytes_, chunk); }
  std::byte* place(std::byte* piece, std::uint64_t chunk, int rank) const {
    const auto ranks = static_cast<std::size_t>(collective_.ranks());
    return piece + table() + ((chunk & 1) * ranks + static_cast<std::size_t>(rank)) * bytes_;
  }
  const std::byte* place(const std::byte* piece, std::uint64_t chunk, int rank) const {
    return place(const_cast<std::byte*>(piece), chunk, rank);
  }

  // Enters the collective. `stage(piece, chunk)` fills this rank's places of a chunk; `source(r)`
  // and `bytes(r)`: the whole part for rank r, whose location is published instead if possible.
  template <class Stage, class Source, class Bytes>
  Status enter(Stage stage, Source source, Bytes bytes) {
    if (!small_) {
      collective_.block();
    }
    const std::size_t slots = small_ ? 1 : 2;
    const auto ranks = static_cast<std::size_t>(collective_.ranks());
    const Status status = collective_.reserve(table() + slots * ranks * bytes_);
    if (!status.ok()) {
      return status;
    }
    if (!small_) {
      LocationTable(collective_.data()).publish(collective_, source, bytes);
    }
    if (!collective_.is_located()) {
      stage(collective_.data(), 0);
    }
    return collective_.enter_together(!collective_.is_located());
  }

  // Moves the data. `take(chunk)` is called when all peers have filled their places.
  template <class Stage, class Take>
  Status run(Stage stage, Take take) {
    Group& group = collective_.group();
    const std::uint64_t base = collective_.base();
    if (collective_.is_located()) {  // unlike some peer
      stage(collective_.data(), 0);
      group.advance();
    }
    // All peers have staged chunk - 1, and so have taken chunk - 2, whose place this one takes.
    for (std::uint64_t chunk = 0; chunk < chunks_of(longest_, bytes_); ++chunk) {
      if (chunk != 0) {
        stage(collective_.data(), chunk);
        group.advance();
      }
      if (const Status s = group.wait_steps(base + chunk, collective_.bounds()); !s.ok()) {
        return s;
      }
      take(chunk);
    }
    collective_.finish(base + chunks_of(longest_, bytes_));
    return {};
  }

 private:
  static std::size_t largest(const Collective& collective) {
    const auto ranks = static_cast<std::size_t>(std::max(1, collective.ranks()));
    return collective.group().segment().chunk_bytes() / ranks / kCacheLine * kCacheLine;
  }
  // The piece begins with the table of locations, if the data may need one.
  std::size_t table() const { return small_ ? 0 : LocationTable::bytes_for(collective_.ranks()); }

  Collective& collective_;
  bool small_;
  std::size_t longest_;
  std::size_t bytes_;
};

}  // namespace phalanx
