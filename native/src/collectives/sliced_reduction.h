// The reduction of large data in slices, each of which one rank combines.
#pragma once

#include <array>

#include "cache_chain.h"
#include "locations.h"
#include "phalanx/collective.h"
#include "sources.h"

namespace phalanx {

class SlicedReduction {
 public:
  // `root`: the rank that takes the result; -1: all do.
  SlicedReduction(Collective& collective, std::byte* data, std::size_t bytes, Sources& sources,
                  int root);

  // Enters the collective and reduces. The data are cut into chunks, and each chunk into slices, of
  // which rank r owns slice r. Every rank stages all slices but its own. The owner combines its own
  // slice with the staged ones, and stores the result at the position of its own slice in its
  // piece. Ranks that take the result copy it from there. Chunk c + 1 is staged before chunk c is
  // combined, so that an early rank does useful work. This is reduce-scatter followed by all-gather
  // (Rabenseifner 2004) in shared memory, with the least memory traffic possible for user buffers
  // outside the segment.
  //
  // In a large group on several caches, each slice has an owner in each cache, which combines the
  // data of the ranks there with what the owner in the cache before has stored. All caches work at
  // the same time, on consecutive chunks.
  Status run();

  // Reduces data that all lie in arenas, once the collective is entered: every rank combines its
  // own slice, and writes the result to all ranks that take it.
  Status run_in_place();

 private:
  static CacheChain find_chain(const Collective& collective, std::size_t bytes,
                               const Sources& sources);
  Span slices(const Span& chunk, int begin, int end) const;
  std::byte* place(std::byte* piece, std::uint64_t chunk) const {
    return piece + (chunk & 1) * chunk_bytes_;
  }
  std::byte* place(int rank, std::uint64_t chunk) const;
  void stage(std::uint64_t chunk);
  void combine(std::uint64_t chunk);
  void copy_out(std::uint64_t chunk);
  Status stage_late();
  Status reduce_chunks();
  void combine_in_place(const std::array<std::byte*, kMaxRanks>& tensors, Span span);

  Collective& collective_;
  std::byte* data_;
  std::size_t total_;
  Sources& sources_;
  int root_;
  CacheChain chain_;
  int cache_;  // of this rank, in the chain
  // The same for all chunks: the position of a slice in the piece must not change, since the result
  // of chunk c - 2 may still be read there while chunk c is staged around it.
  std::size_t slice_bytes_;
  std::size_t chunk_bytes_;
};

}  // namespace phalanx
