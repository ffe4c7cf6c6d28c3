#include "sliced_reduction.h"

#include <algorithm>

namespace phalanx {
namespace {

// The size of a slice: as even as whole cache lines allow, and at most its share of a chunk.
std::size_t even_slice(std::size_t total, std::size_t ranks, std::size_t chunk_bytes) {
  const auto parts = [](std::size_t whole, std::size_t part) { return (whole + part - 1) / part; };
  const std::size_t largest = chunk_bytes / ranks / kCacheLine * kCacheLine;
  const std::size_t chunks = std::max<std::size_t>(1, parts(total, largest * ranks));
  return whole_lines(parts(total, chunks * ranks));
}

// A chain of d caches takes n + d rounds for n chunks, and a flat group n + 1. With 2 d chunks the
// chain has half as many rounds again, and in each of them a cache line crosses (p / d + 1) / 2
// times less often with p ranks: no loss with two ranks per cache, three times less in all with
// eight.
constexpr std::size_t kChunksPerCache = 2;
// Chunks may be this small, so that 2 d of them are not many bytes. In still smaller ones, waiting
// for all ranks would take longer than copying and combining.
constexpr std::size_t smallest_chunk(std::size_t chunk_bytes) { return chunk_bytes / 4; }
static_assert(smallest_chunk(kChunkBytes) / kMaxRanks >= kCacheLine);

// The most bytes of a chunk. Up to 4 d chunks, more of them are better than larger ones.
std::size_t largest_chunk(const CacheChain& chain, std::size_t total, std::size_t chunk_bytes) {
  if (chain.length() == 1) {
    return chunk_bytes;
  }
  const std::size_t chunks = 2 * kChunksPerCache * static_cast<std::size_t>(chain.length());
  return std::clamp(total / chunks, smallest_chunk(chunk_bytes), chunk_bytes);
}

}  // namespace

SlicedReduction::SlicedReduction(Collective& collective, std::byte* data, std::size_t bytes,
                                 Sources& sources, int root)
    : collective_(collective),
      data_(data),
      total_(bytes),
      sources_(sources),
      root_(root),
      chain_(find_chain(collective, bytes, sources)),
      cache_(chain_.cache_of(collective.self())),
      slice_bytes_(
          even_slice(bytes, static_cast<std::size_t>(chain_.slices()),
                     largest_chunk(chain_, bytes, collective.group().segment().chunk_bytes()))),
      chunk_bytes_(slice_bytes_ * static_cast<std::size_t>(chain_.slices())) {}

// The same on all ranks: the caches and the chunk size are. If the rest differs, the ranks find a
// mismatch before they read data.
CacheChain SlicedReduction::find_chain(const Collective& collective, std::size_t bytes,
                                       const Sources& sources) {
  const std::span<const int> caches = collective.group().tree().caches();
  const std::size_t smallest = smallest_chunk(collective.group().segment().chunk_bytes());
  const bool is_long = bytes >= kChunksPerCache * caches.size() * smallest;
  return !caches.empty() && is_long && sources.has_exact_parts()
             ? CacheChain(caches, collective.ranks())
             : CacheChain(collective.ranks());
}

Status SlicedReduction::run() {
  collective_.block();
  publish_location(collective_, data_, total_);
  Status status = collective_.reserve(2 * chunk_bytes_);
  if (!status.ok()) {
    return status;
  }
  if (!collective_.is_located()) {
    stage(0);
  }
  status = collective_.enter_together(!collective_.is_located());
  if (!status.ok()) {
    return status;
  }
  if (all_located(collective_)) {
    return run_in_place();
  }
  status = stage_late();
  return status.ok() ? reduce_chunks() : status;
}

// Some ranks have published locations, but not all: those stage the first chunk now.
Status SlicedReduction::stage_late() {
  Group& group = collective_.group();
  if (collective_.is_located()) {
    stage(0);
    group.advance();
  }
  Status status;
  for (int peer = 0; status.ok() && peer < collective_.ranks(); ++peer) {
    if (peer != collective_.self() && collective_.is_located(peer)) {
      status = group.wait_step(peer, collective_.base(), collective_.bounds());
    }
  }
  return status;
}

// Round r begins when all ranks have ended round r - 1, which a step announces. In it, the ranks of
// cache c combine chunk r - c, and stage the next one. All ranks copy out what the last of d caches
// has combined in the round before: chunk r - d. In a flat group, d is 1.
//
// Whatever is read in a round was written in the round before. A piece has places for two chunks,
// so what is written takes the place of data that were read in the round before, or earlier.
Status SlicedReduction::reduce_chunks() {
  Group& group = collective_.group();
  const std::uint64_t base = collective_.base();
  const std::uint64_t chunks = chunks_of(total_, chunk_bytes_);
  const auto length = static_cast<std::uint64_t>(chain_.length());
  const auto first_round = static_cast<std::uint64_t>(cache_);
  if (first_round != 0) {
    group.advance_to(base + first_round);  // no work before
  }
  for (std::uint64_t round = first_round; round < chunks + length; ++round) {
    if (round != 0) {  // chunk 0 has come with the entry
      if (const Status s = group.wait_steps(base + round, collective_.bounds()); !s.ok()) {
        return s;
      }
    }
    if (round >= length && (root_ < 0 || root_ == collective_.self())) {
      copy_out(round - length);
    }
    const std::uint64_t chunk = round - first_round;
    if (chunk + 1 < chunks) {
      stage(chunk + 1);
    }
    if (chunk < chunks) {
      combine(chunk);
    }
    group.advance_to(base + round + 1);  // in the last round: Collective::finish
  }
  return {};
}

// Slices [begin, end) of a chunk, relative to the chunk.
Span SlicedReduction::slices(const Span& chunk, int begin, int end) const {
  const auto position = [&](int slice) {
    return std::min(slice_bytes_ * static_cast<std::size_t>(slice), chunk.size);
  };
  return {position(begin), position(end) - position(begin)};
}

std::byte* SlicedReduction::place(int rank, std::uint64_t chunk) const {
  const bool is_own = rank == collective_.self();
  return place(is_own ? collective_.data() : const_cast<std::byte*>(collective_.data(rank)), chunk);
}

void SlicedReduction::stage(std::uint64_t index) {
  const Span chunk = chunk_of(total_, chunk_bytes_, index);
  const auto [first, end] = chain_.slices_of(collective_.self());
  const Span own = slices(chunk, first, end);
  std::byte* piece = place(collective_.data(), index);
  const std::byte* from = data_ + chunk.begin;
  const std::size_t after = own.begin + own.size;
  copy_bytes(piece, from, own.begin);
  copy_bytes(piece + after, from + after, chunk.size - after);
}

void SlicedReduction::combine(std::uint64_t index) {
  const int self = collective_.self();
  const Span chunk = chunk_of(total_, chunk_bytes_, index);
  const auto [first, end] = chain_.slices_of(self);
  for (int slice = first; slice < end; ++slice) {
    const Span part = slices(chunk, slice, slice + 1);
    const std::byte* before =
        cache_ == 0 ? nullptr : place(chain_.owner(cache_ - 1, slice), index) + part.begin;
    sources_.combine_part(place(self, index) + part.begin, part.size, before, chain_.begin(cache_),
                          chain_.end(cache_), [&](int rank) {
                            return (rank == self ? data_ + chunk.begin : place(rank, index)) +
                                   part.begin;
                          });
  }
}

void SlicedReduction::copy_out(std::uint64_t index) {
  const Span chunk = chunk_of(total_, chunk_bytes_, index);
  for (int i = 0; i < chain_.slices(); ++i) {
    // Each rank begins with another slice; in a flat group with its own, which is in its cache.
    const int slice = (collective_.self() + i) % chain_.slices();
    const Span part = slices(chunk, slice, slice + 1);
    const std::byte* piece = place(chain_.owner(chain_.length() - 1, slice), index);
    copy_bytes(data_ + chunk.begin + part.begin, piece + part.begin, part.size);
  }
}

Status SlicedReduction::run_in_place() {
  const auto ranks = static_cast<std::size_t>(collective_.ranks());
  std::array<std::byte*, kMaxRanks> tensors;
  for (int rank = 0; rank < collective_.ranks(); ++rank) {
    Status status;
    std::byte* tensor = rank == collective_.self() ? data_ : map_source(collective_, rank, status);
    if (tensor == nullptr) {
      return status;
    }
    tensors[static_cast<std::size_t>(rank)] = tensor;
  }
  const std::size_t share = (total_ / ranks + kCacheLine) / kCacheLine * kCacheLine;
  const std::size_t begin = std::min(share * static_cast<std::size_t>(collective_.self()), total_);
  const std::size_t end = std::min(begin + share, total_);
  // The result of a block is still in the cache when it is copied to the other ranks.
  constexpr std::size_t kBlock = 32 * 1024;
  for (std::size_t position = begin; position < end; position += kBlock) {
    combine_in_place(tensors, {position, std::min(kBlock, end - position)});
  }
  return exit_barrier(collective_);
}

void SlicedReduction::combine_in_place(const std::array<std::byte*, kMaxRanks>& tensors,
                                       Span span) {
  const auto tensor = [&](int rank) {
    return tensors[static_cast<std::size_t>(rank)] + span.begin;
  };
  std::byte* out = tensor(root_ < 0 ? collective_.self() : root_);
  sources_.combine(out, span.size, tensor);
  for (int rank = 0; root_ < 0 && rank < collective_.ranks(); ++rank) {
    copy_bytes(tensor(rank), out, span.size);
  }
}

}  // namespace phalanx
