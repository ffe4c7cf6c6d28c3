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

}  // namespace

SlicedReduction::SlicedReduction(Collective& collective, std::byte* data, std::size_t bytes,
                                 Sources& sources, int root)
    : collective_(collective),
      data_(data),
      total_(bytes),
      sources_(sources),
      root_(root),
      slice_bytes_(even_slice(bytes, static_cast<std::size_t>(collective.ranks()),
                              collective.group().segment().chunk_bytes())),
      chunk_bytes_(slice_bytes_ * static_cast<std::size_t>(collective.ranks())) {}

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

// Steps, from the base: 0: chunk 0 is staged | stage 1 | combine 0 | stage 2 | combine 1 | ... |
// combine the last.
Status SlicedReduction::reduce_chunks() {
  Group& group = collective_.group();
  const Bounds& bounds = collective_.bounds();
  const std::uint64_t base = collective_.base();
  const std::uint64_t chunks = chunks_of(total_, chunk_bytes_);
  for (std::uint64_t chunk = 0; chunk < chunks; ++chunk) {
    const bool last = chunk + 1 == chunks;
    if (!last) {
      stage(chunk + 1);
      group.advance();
    }
    // All peers have staged this chunk, so they have also copied out chunk - 2, whose place is
    // reused: this rank has waited for that at their entries, or at the end of the last round.
    combine(chunk);
    group.advance();
    const std::uint64_t combined = base + 2 * chunk + (last ? 1 : 2);
    if (const Status s = group.wait_steps(combined, bounds); !s.ok()) {
      return s;
    }
    if (root_ < 0 || root_ == collective_.self()) {
      copy_out(chunk);
    }
  }
  collective_.finish(base + 2 * chunks);
  return {};
}

// Slice `rank` of a chunk, relative to the chunk.
Span SlicedReduction::slice(const Span& chunk, int rank) const {
  const std::size_t begin = std::min(slice_bytes_ * static_cast<std::size_t>(rank), chunk.size);
  return {begin, std::min(slice_bytes_, chunk.size - begin)};
}

std::byte* SlicedReduction::place(int rank, std::uint64_t chunk) const {
  return place(const_cast<std::byte*>(collective_.data(rank)), chunk);
}

void SlicedReduction::stage(std::uint64_t index) {
  const Span chunk = chunk_of(total_, chunk_bytes_, index);
  const Span own = slice(chunk, collective_.self());
  std::byte* piece = place(collective_.data(), index);
  const std::byte* from = data_ + chunk.begin;
  const std::size_t after = own.begin + own.size;
  copy_bytes(piece, from, own.begin);
  copy_bytes(piece + after, from + after, chunk.size - after);
}

void SlicedReduction::combine(std::uint64_t index) {
  const Span chunk = chunk_of(total_, chunk_bytes_, index);
  const Span own = slice(chunk, collective_.self());
  sources_.combine(place(collective_.data(), index) + own.begin, own.size, [&](int rank) {
    return rank == collective_.self() ? data_ + chunk.begin + own.begin
                                      : place(rank, index) + own.begin;
  });
}

void SlicedReduction::copy_out(std::uint64_t index) {
  const Span chunk = chunk_of(total_, chunk_bytes_, index);
  for (int i = 0; i < collective_.ranks(); ++i) {
    // Own slice first: it is still in the cache.
    const int rank = (collective_.self() + i) % collective_.ranks();
    const Span part = slice(chunk, rank);
    const std::byte* piece =
        rank == collective_.self() ? place(collective_.data(), index) : place(rank, index);
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
