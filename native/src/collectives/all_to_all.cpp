#include <cstring>

#include "phalanx/collectives.h"
#include "pipeline.h"
#include "zero_copy.h"

namespace phalanx {
namespace {

// The contents of a rank's inline buffer at the entry: its counts, and the parts themselves if all
// of them fit behind, otherwise their locations (SourceLocations). That is all a peer needs to
// check the exchange and to compute the number of chunks, which is the same on all ranks.
class PublishedCounts {
 public:
  PublishedCounts(std::byte* buffer, int ranks)
      : words_(reinterpret_cast<std::uint64_t*>(buffer)), ranks_(static_cast<std::size_t>(ranks)) {}

  void write(const Splits& own, std::uint64_t chunks) {
    PHALANX_STEP("all_to_all: publish the counts");
    words_[0] = chunks;
    std::memcpy(words_ + 1, own.input_counts, ranks_ * sizeof(std::uint64_t));
    std::memcpy(words_ + 1 + ranks_, own.output_counts, ranks_ * sizeof(std::uint64_t));
  }
  std::uint64_t chunks() const { return words_[0]; }
  std::uint64_t given_to(int rank) const { return words_[1 + static_cast<std::size_t>(rank)]; }
  std::uint64_t taken_from(int rank) const {
    return words_[1 + ranks_ + static_cast<std::size_t>(rank)];
  }
  std::byte* parts() const { return reinterpret_cast<std::byte*>(words_ + 1 + 2 * ranks_); }
  static std::size_t parts_offset(int ranks) {
    return (1 + 2 * static_cast<std::size_t>(ranks)) * sizeof(std::uint64_t);
  }
  static std::size_t room(int ranks) { return kInlineBytes - parts_offset(ranks); }
  static_assert((1 + 2 * kMaxRanks) * sizeof(std::uint64_t) +
                    SourceLocations::bytes_for(kMaxRanks) <=
                kInlineBytes);

 private:
  std::uint64_t* words_;
  std::size_t ranks_;
};

class AllToAll {
 public:
  AllToAll(Group& group, const Splits& own, DType dtype, const Bounds& bounds)
      : group_(group), own_(own), dtype_(dtype), element_(size_of(dtype)), bounds_(bounds) {}

  Status run() {
    const Fingerprint called{.kind = Kind::all_to_all, .dtype = dtype_};
    const std::uint64_t chunks = own_chunks();
    Status status = group_.prepare(called, bounds_, chunks != 0);
    if (!status.ok()) {
      return status;
    }
    PublishedCounts mine(group_.next_inline_buffer(), group_.ranks());
    mine.write(own_, chunks);
    if (chunks == 0) {
      fill_inline(mine.parts());
    } else {
      SourceLocations(mine.parts())
          .publish(
              group_.ranks(), [&](int rank) { return own_.inputs[rank]; },
              [&](int rank) { return rank == self() ? 0 : given_bytes(rank); });
    }
    status = group_.enter_collective(called, bounds_);
    if (status.ok()) {
      status = compare();
    }
    if (!status.ok()) {
      return status;
    }
    deliver(own_.outputs[self()], own_.inputs[self()], given_bytes(self()), given_bytes(self()));
    std::uint64_t most = 0;
    for (int peer = 0; peer < group_.ranks(); ++peer) {
      const std::uint64_t theirs = published(peer).chunks();
      most = std::max(most, theirs);
      if (theirs == 0 && peer != self()) {
        take_inline(peer);
      }
    }
    const auto gives = [this](int rank) { return published(rank).chunks() != 0; };
    const ZeroCopySources zero_copy(group_, gives, PublishedCounts::parts_offset(group_.ranks()));
    if (most != 0 && zero_copy.available()) {
      return zero_copy.copy(
          self(), bounds_, [](int) { return true; },
          [this](int peer, const std::byte* source) {
            deliver(own_.outputs[peer], source, taken_bytes(peer), taken_bytes(peer));
          });
    }
    return move(most);
  }

 private:
  int self() const { return group_.rank(); }
  std::size_t part_bytes() const { return Parts::staged(group_); }
  std::size_t given_bytes(int rank) const { return own_.input_counts[rank] * element_; }
  std::size_t taken_bytes(int rank) const { return own_.output_counts[rank] * element_; }
  PublishedCounts published(int rank) const {
    return PublishedCounts(group_.current_inline_buffer(rank), group_.ranks());
  }

  // The number of chunks of the longest part; 0 if all parts fit into the inline buffer.
  std::uint64_t own_chunks() const {
    std::size_t all = 0;
    std::size_t longest = 0;
    for (int rank = 0; rank < group_.ranks(); ++rank) {
      if (rank != self()) {
        all += given_bytes(rank);
        longest = std::max(longest, given_bytes(rank));
      }
    }
    return all <= PublishedCounts::room(group_.ranks())
               ? 0
               : (longest + part_bytes() - 1) / part_bytes();
  }

  void fill_inline(std::byte* to) const {
    for (int rank = 0; rank < group_.ranks(); ++rank) {
      if (rank != self()) {
        copy_bytes(to, own_.inputs[rank], given_bytes(rank));
        to += given_bytes(rank);
      }
    }
  }

  void take_inline(int peer) const {
    const PublishedCounts theirs = published(peer);
    const std::byte* from = theirs.parts();
    for (int rank = 0; rank < self(); ++rank) {
      from += rank == peer ? 0 : theirs.given_to(rank) * element_;
    }
    copy_bytes(own_.outputs[peer], from, taken_bytes(peer));
  }

  // Every rank compares every pair, so that all of them refuse before any has moved data.
  Status compare() {
    PHALANX_STEP("all_to_all: compare the counts");
    for (int to = 0; to < group_.ranks(); ++to) {
      const PublishedCounts taker = published(to);
      for (int from = 0; from < group_.ranks(); ++from) {
        const std::uint64_t given = published(from).given_to(to);
        const std::uint64_t taken = taker.taken_from(from);
        if (given != taken) {
          const auto side = [&](std::uint64_t count, int other) {
            return Fingerprint{.sequence = group_.sequence(),
                               .count = count,
                               .root = other,
                               .kind = Kind::all_to_all,
                               .dtype = dtype_};
          };
          return group_.fail_collective(Status{.code = Code::mismatch,
                                               .peer = from,
                                               .reporter = to,
                                               .mine = side(taken, from),
                                               .theirs = side(given, to)});
        }
      }
    }
    return {};
  }

  Status move(std::uint64_t chunks) {
    const Segment& segment = group_.segment();
    const std::size_t part = part_bytes();
    const auto piece = [part](std::uint64_t chunk, std::size_t bytes) {
      const std::size_t begin = std::min(chunk * part, bytes);
      return Span{begin, std::min(part, bytes - begin)};
    };
    const bool gives = published(self()).chunks() != 0;
    return move_chunks(
        group_, chunks * part, part, bounds_, [](int) { return true; }, [](int) { return true; },
        [&](Span, std::uint64_t chunk) {
          for (int rank = 0; gives && rank < group_.ranks(); ++rank) {
            if (rank != self()) {
              const Span span = piece(chunk, given_bytes(rank));
              copy_bytes(Parts::part_at(segment.staging(self(), chunk), rank, part),
                         at(own_.inputs[rank], span.begin), span.size);
            }
          }
        },
        [&](int peer, Span, std::uint64_t chunk) {
          if (published(peer).chunks() != 0) {
            const Span span = piece(chunk, taken_bytes(peer));
            deliver(at(own_.outputs[peer], span.begin),
                    Parts::part_at(segment.staging(peer, chunk), self(), part), span.size,
                    taken_bytes(peer));
          }
        });
  }

  Group& group_;
  const Splits& own_;
  DType dtype_;
  std::size_t element_;
  const Bounds& bounds_;
};

}  // namespace

Status all_to_all(Group& group, const Splits& own, DType dtype, const Bounds& bounds) {
  const Group::CollectiveLock lock(group, bounds);
  if (!lock.status().ok()) {
    return lock.status();
  }
  return AllToAll(group, own, dtype, bounds).run();
}

}  // namespace phalanx
