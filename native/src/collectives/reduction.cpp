#include "reduction.h"

#include <array>

#include "pipeline.h"
#include "zero_copy.h"

namespace phalanx {
namespace {

// The size of a slice: as even as whole cache lines allow, and at most its share of a staging area.
std::size_t even_slice(std::size_t total, std::size_t ranks, std::size_t chunk_bytes) {
  const auto parts = [](std::size_t whole, std::size_t part) { return (whole + part - 1) / part; };
  const std::size_t largest = chunk_bytes / ranks / kCacheLine * kCacheLine;
  const std::size_t chunks = parts(total, largest * ranks);
  return parts(parts(total, chunks * ranks), kCacheLine) * kCacheLine;
}

// The reduction of large tensors. The tensor is cut into chunks; of each chunk rank r owns slice r.
// Every rank stages all slices but its own. The owner combines its own slice with the staged ones,
// and stores the result at the position of its own slice in its staging area. Ranks that take the
// result copy it from there. Chunk c + 1 is staged before chunk c is combined, so that an early
// rank does useful work. This is reduce-scatter followed by all-gather (Rabenseifner 2004) in
// shared memory, with the least memory traffic possible for user buffers outside the segment.
class LargeReduction {
 public:
  LargeReduction(Group& group, void* data, std::size_t count, DType dtype, ReduceOp op,
                 const Bounds& bounds)
      : group_(group),
        data_(static_cast<std::byte*>(data)),
        dtype_(dtype),
        op_(op),
        bounds_(bounds),
        total_(count * size_of(dtype)),
        slice_bytes_(even_slice(total_, ranks(), group.segment().chunk_bytes())),
        chunk_bytes_(slice_bytes_ * ranks()),
        chunks_((total_ + chunk_bytes_ - 1) / chunk_bytes_) {}

  // Call it once the collective is entered. `takes_result`: whether this rank takes the result.
  Status run(bool takes_result) {
    // Steps: stage 0 | stage 1, combine 0 | stage 2, combine 1 | ... | combine last.
    const std::uint64_t base = group_.step();
    stage(0);
    group_.advance();
    for (std::uint64_t chunk = 0; chunk < chunks_; ++chunk) {
      const std::uint64_t staged = base + (chunk == 0 ? 1 : 2 * chunk);
      const bool last = chunk + 1 == chunks_;
      if (!last) {
        stage(chunk + 1);
        group_.advance();
      }
      // A peer that has staged this chunk has also copied out chunk - 2, whose slot is reused.
      if (const Status s = group_.wait_steps(staged, bounds_); !s.ok()) {
        return s;
      }
      combine(chunk);
      group_.advance();
      const std::uint64_t combined = base + 2 * chunk + (last ? 2 : 3);
      if (const Status s = group_.wait_steps(combined, bounds_); !s.ok()) {
        return s;
      }
      if (takes_result) {
        copy_out(chunk);
      }
    }
    return {};
  }

 private:
  std::size_t ranks() const { return static_cast<std::size_t>(group_.ranks()); }

  Span chunk_at(std::uint64_t index) const { return chunk_of(total_, chunk_bytes_, index); }

  // Slice `rank` of a chunk, relative to the chunk.
  Span slice(const Span& chunk, int rank) const {
    const std::size_t begin = std::min(slice_bytes_ * static_cast<std::size_t>(rank), chunk.size);
    return {begin, std::min(slice_bytes_, chunk.size - begin)};
  }

  void stage(std::uint64_t index) {
    const Span chunk = chunk_at(index);
    const Span own = slice(chunk, group_.rank());
    std::byte* staging = group_.segment().staging(group_.rank(), index);
    const std::byte* from = data_ + chunk.begin;
    const std::size_t after = own.begin + own.size;
    copy_bytes(staging, from, own.begin);
    copy_bytes(staging + after, from + after, chunk.size - after);
  }

  void combine(std::uint64_t index) {
    const Span chunk = chunk_at(index);
    const Span own = slice(chunk, group_.rank());
    for (int rank = 0; rank < group_.ranks(); ++rank) {
      sources_[static_cast<std::size_t>(rank)] =
          rank == group_.rank() ? data_ + chunk.begin + own.begin
                                : group_.segment().staging(rank, index) + own.begin;
    }
    phalanx::reduce(group_.segment().staging(group_.rank(), index) + own.begin, sources_.data(),
                    ranks(), own.size / size_of(dtype_), dtype_, op_, group_.ranks());
  }

  void copy_out(std::uint64_t index) {
    const Span chunk = chunk_at(index);
    for (int i = 0; i < group_.ranks(); ++i) {
      // Own slice first: it is still in the cache.
      const int rank = (group_.rank() + i) % group_.ranks();
      const Span part = slice(chunk, rank);
      copy_bytes(data_ + chunk.begin + part.begin,
                 group_.segment().staging(rank, index) + part.begin, part.size);
    }
  }

  Group& group_;
  std::byte* data_;
  DType dtype_;
  ReduceOp op_;
  const Bounds& bounds_;
  std::size_t total_;
  // The same for all chunks: the position of a slice in the staging area must not change, since the
  // result of chunk c - 2 may still be read there while chunk c is staged around it.
  std::size_t slice_bytes_;
  std::size_t chunk_bytes_;
  std::uint64_t chunks_;
  // Fixed in size: once a collective is entered, nothing may fail on one rank alone.
  std::array<const void*, kMaxRanks> sources_;
};

// The reduction of large tensors of two ranks to one of them, which combines alone. If the other
// rank combined half, it would save the root half of that work, but cost it a copy of the result.
Status reduce_of_two(Group& group, void* data, const Fingerprint& own, const Bounds& bounds) {
  const int self = group.rank();
  const Segment& segment = group.segment();
  return move_chunks(
      group, own.count * size_of(own.dtype), segment.chunk_bytes(), bounds,
      [&](int rank) { return rank != own.root; }, [&](int rank) { return rank == own.root; },
      [&](Span span, std::uint64_t chunk) {
        copy_bytes(segment.staging(self, chunk), at(data, span.begin), span.size);
      },
      [&](int peer, Span span, std::uint64_t chunk) {
        std::byte* out = at(data, span.begin);
        const void* staged = segment.staging(peer, chunk);
        const std::array<const void*, 2> sources = {self == 0 ? out : staged,
                                                    self == 0 ? staged : out};
        phalanx::reduce(out, sources.data(), 2, span.size / size_of(own.dtype), own.dtype, own.op,
                        2);
      });
}

// The reduction of large tensors that all lie in arenas: every rank combines its own slice, and
// writes the result to all ranks that take it.
class ZeroCopyReduction {
 public:
  ZeroCopyReduction(Group& group, void* data, const Fingerprint& own)
      : group_(group), data_(static_cast<std::byte*>(data)), own_(own) {}

  // Call it once the collective is entered.
  template <class Gives>
  Status run(const ZeroCopySources<Gives>& zero_copy, const Bounds& bounds) {
    const auto ranks = static_cast<std::size_t>(group_.ranks());
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      Status status;
      tensors_[rank] = static_cast<int>(rank) == group_.rank()
                           ? data_
                           : zero_copy.map_peer(static_cast<int>(rank), 0, status);
      if (tensors_[rank] == nullptr) {
        return status;
      }
    }
    const std::size_t total = own_.count * size_of(own_.dtype);
    const std::size_t slice = (total / ranks + kCacheLine) / kCacheLine * kCacheLine;
    const std::size_t begin = std::min(slice * static_cast<std::size_t>(group_.rank()), total);
    const std::size_t end = std::min(begin + slice, total);
    for (std::size_t at = begin; at < end; at += kBlock) {
      combine({at, std::min(kBlock, end - at)});
    }
    return exit_barrier(group_, bounds);
  }

 private:
  // The unit of combination: the result is still in the cache when it is copied to the other ranks.
  static constexpr std::size_t kBlock = 32 * 1024;

  void combine(Span span) {
    const auto ranks = static_cast<std::size_t>(group_.ranks());
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      sources_[rank] = tensors_[rank] + span.begin;
    }
    const bool everywhere = own_.root < 0;
    const auto first = static_cast<std::size_t>(everywhere ? group_.rank() : own_.root);
    std::byte* out = tensors_[first] + span.begin;
    phalanx::reduce(out, sources_.data(), ranks, span.size / size_of(own_.dtype), own_.dtype,
                    own_.op, group_.ranks());
    for (std::size_t rank = 0; everywhere && rank < ranks; ++rank) {
      copy_bytes(tensors_[rank] + span.begin, out, span.size);
    }
  }

  Group& group_;
  std::byte* data_;
  const Fingerprint& own_;
  std::array<std::byte*, kMaxRanks> tensors_;
  std::array<const void*, kMaxRanks> sources_;
};

}  // namespace

Status reduce_to(Group& group, void* data, const Fingerprint& own, const Bounds& bounds,
                 bool takes_result) {
  const Group::CollectiveLock lock(group, bounds);
  if (!lock.status().ok()) {
    return lock.status();
  }
  const std::size_t bytes = own.count * size_of(own.dtype);
  const bool small = bytes <= kInlineBytes;
  Status status = group.prepare(own, bounds, !small);
  if (!status.ok()) {
    return status;
  }
  if (small) {
    copy_bytes(group.next_inline_buffer(), data, bytes);
  } else {
    SourceLocations(group.next_inline_buffer()).publish(data, bytes);
  }
  status = group.enter_collective(own, bounds);
  if (!status.ok() || own.count == 0) {
    return status;
  }
  if (const ZeroCopySources zero_copy(group, [](int) { return true; });
      !small && zero_copy.available()) {
    return ZeroCopyReduction(group, data, own).run(zero_copy, bounds);
  }
  if (!small && own.root >= 0 && group.ranks() == 2) {
    return reduce_of_two(group, data, own, bounds);
  }
  if (!small) {
    return LargeReduction(group, data, own.count, own.dtype, own.op, bounds).run(takes_result);
  }
  if (takes_result) {
    std::array<const void*, kMaxRanks> sources;
    for (int rank = 0; rank < group.ranks(); ++rank) {
      sources[static_cast<std::size_t>(rank)] =
          rank == group.rank() ? data : group.current_inline_buffer(rank);
    }
    phalanx::reduce(data, sources.data(), static_cast<std::size_t>(group.ranks()), own.count,
                    own.dtype, own.op, group.ranks());
  }
  return status;
}

}  // namespace phalanx
