// The pipeline of operations that move data without combining it: some ranks produce chunks in
// their staging areas, some consume them, and chunk c + 1 is produced while chunk c is consumed.
#pragma once

#include <algorithm>

#include "phalanx/copy.h"
#include "phalanx/group.h"

namespace phalanx {

// A part of a buffer, in bytes.
struct Span {
  std::size_t begin;
  std::size_t size;
};

inline Span chunk_of(std::size_t total, std::size_t chunk_bytes, std::uint64_t chunk) {
  const std::size_t begin = chunk * chunk_bytes;
  return {begin, std::min(chunk_bytes, total - begin)};
}

inline const std::byte* at(const void* data, std::size_t offset) {
  return static_cast<const std::byte*>(data) + offset;
}

inline std::byte* at(void* data, std::size_t offset) {
  return static_cast<std::byte*>(data) + offset;
}

// The chunk size for a total: at least four chunks, as long as they stay large enough to be worth a
// synchronisation each, so that consumers do not wait for most of the data.
inline std::size_t move_chunk_bytes(const Group& group, std::size_t total) {
  const std::size_t whole = group.segment().chunk_bytes();
  return std::min(whole, std::max(whole, total) / 4 / kCacheLine * kCacheLine);
}

// Moves ceil(total / chunk_bytes) chunks of a collective that has been entered. `produces(r)` and
// `consumes(r)` tell which ranks do so, and are the same on all ranks. `produce(span, chunk)` fills
// this rank's staging area, and `consume(peer, span, chunk)` reads the peer's.
template <class Produces, class Consumes, class Produce, class Consume>
Status move_chunks(Group& group, std::size_t total, std::size_t chunk_bytes, const Bounds& bounds,
                   Produces produces, Consumes consumes, Produce produce, Consume consume) {
  const int self = group.rank();
  const std::uint64_t base = group.step();
  const std::uint64_t chunks = (total + chunk_bytes - 1) / chunk_bytes;
  for (std::uint64_t chunk = 0; chunk < chunks; ++chunk) {
    const Span span = chunk_of(total, chunk_bytes, chunk);
    if (produces(self)) {
      // A consumer at step base + chunk has consumed chunk - 2, whose slot this chunk takes.
      for (int peer = 0; chunk >= 2 && peer < group.ranks(); ++peer) {
        if (peer != self && consumes(peer)) {
          if (const Status s = group.wait_step(peer, base + chunk, bounds); !s.ok()) {
            return s;
          }
        }
      }
      produce(span, chunk);
    }
    group.advance();
    for (int peer = 0; consumes(self) && peer < group.ranks(); ++peer) {
      if (peer != self && produces(peer)) {
        if (const Status s = group.wait_step(peer, base + chunk + 1, bounds); !s.ok()) {
          return s;
        }
        consume(peer, span, chunk);
      }
    }
  }
  return {};
}

// Moves ceil(total / chunk_bytes) chunks of a collective that has been entered, in which every rank
// sends to every other. `stage(span, chunk)` fills this rank's staging area; `take(span, chunk)` is
// called when all peers have filled theirs.
template <class Stage, class Take>
Status exchange_chunks(Group& group, std::size_t total, std::size_t chunk_bytes,
                       const Bounds& bounds, Stage stage, Take take) {
  const std::uint64_t base = group.step();
  const std::uint64_t chunks = (total + chunk_bytes - 1) / chunk_bytes;
  for (std::uint64_t chunk = 0; chunk < chunks; ++chunk) {
    const Span span = chunk_of(total, chunk_bytes, chunk);
    // All peers have staged chunk - 1, and so have taken chunk - 2, whose slot this one takes.
    stage(span, chunk);
    group.advance();
    if (const Status s = group.wait_steps(base + chunk + 1, bounds); !s.ok()) {
      return s;
    }
    take(span, chunk);
  }
  return {};
}

// A buffer of one rank with a part for every rank: part r begins at r times the part size.
class Parts {
 public:
  // `bytes`: the size of a whole part. Small parts are published inline; a staging area holds a
  // piece of each larger one.
  Parts(const Group& group, std::size_t bytes)
      : small_(bytes * static_cast<std::size_t>(group.ranks()) <= kInlineBytes),
        size_(small_ ? bytes : staged(group)) {}

  bool small() const { return small_; }
  std::size_t size() const { return size_; }
  std::byte* of(std::byte* buffer, int rank) const { return part_at(buffer, rank, size_); }

  static std::byte* part_at(std::byte* buffer, int rank, std::size_t size) {
    return buffer + static_cast<std::size_t>(rank) * size;
  }
  // The bytes in a staging area for each rank.
  static std::size_t staged(const Group& group) {
    // There is at least one rank, which clang-tidy cannot know.
    const auto ranks = static_cast<std::size_t>(std::max(1, group.ranks()));
    return group.segment().chunk_bytes() / ranks / kCacheLine * kCacheLine;
  }

 private:
  bool small_;
  std::size_t size_;
};

}  // namespace phalanx
