#include <array>
#include <cstring>

#include "exchange.h"
#include "parts.h"
#include "phalanx/collectives.h"

namespace phalanx {
namespace {

// The counts that a rank publishes with its entry: what it gives to every rank, and what it expects
// from each. That is all a peer needs to check the exchange.
class PublishedCounts {
 public:
  PublishedCounts(const std::byte* memory, int ranks)
      : words_(reinterpret_cast<std::uint64_t*>(const_cast<std::byte*>(memory))),
        ranks_(static_cast<std::size_t>(ranks)) {}

  static std::size_t bytes_for(int ranks) {
    return whole_lines((1 + 2 * static_cast<std::size_t>(ranks)) * sizeof(std::uint64_t));
  }
  // `chunks`: the number of chunks of this rank's longest part; 0 if its parts follow the counts.
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

 private:
  std::uint64_t* words_;
  std::size_t ranks_;
};

class AllToAll {
 public:
  AllToAll(Collective& collective, const Splits& own, DType dtype)
      : collective_(collective), own_(own), dtype_(dtype), element_(size_of(dtype)) {}

  Status run() { return collective_.ranks() == 2 ? exchange() : move(); }

 private:
  int self() const { return collective_.self(); }
  int ranks() const { return collective_.ranks(); }
  std::size_t given_bytes(int rank) const { return own_.input_counts[rank] * element_; }
  std::size_t taken_bytes(int rank) const { return own_.output_counts[rank] * element_; }

  Status exchange();
  void take_from(int peer, Span span, const std::byte* from) const {
    const Span part = clipped(span, taken_bytes(peer));
    deliver(at(own_.outputs[peer], part.begin), from, part.size, taken_bytes(peer));
  }
  // The part of a span that lies below `end`.
  static Span clipped(Span span, std::size_t end) {
    const std::size_t begin = std::min(span.begin, end);
    return {begin, std::min(span.size, end - begin)};
  }

  Status move();
  std::size_t part_bytes() const;
  std::uint64_t own_chunks() const;
  PublishedCounts published(int rank) const {
    return {rank == self() ? collective_.data() : collective_.data(rank), ranks()};
  }
  // The counts and the locations come first in a rank's piece.
  std::size_t parts_offset() const {
    return PublishedCounts::bytes_for(ranks()) + LocationTable::bytes_for(ranks());
  }
  std::byte* parts(std::byte* piece) const { return piece + parts_offset(); }
  std::byte* place(std::byte* piece, std::uint64_t chunk, int rank) const;
  Status reserve_and_stage(std::uint64_t chunks);
  void stage(std::uint64_t chunk) const;
  void stage_packed(std::byte* to) const;
  void take_packed(int peer) const;
  void take_staged(int peer, std::uint64_t chunk) const;
  Status take_in_place();
  Status move_chunks(std::uint64_t chunks);

  template <class Given, class Taken>
  Status compare(Given given, Taken taken);

  Collective& collective_;
  const Splits& own_;
  DType dtype_;
  std::size_t element_;
};

// Every rank compares every pair, so that all of them refuse before any has moved data.
// `given(from, to)` and `taken(to, from)` are counts of elements.
template <class Given, class Taken>
Status AllToAll::compare(Given given, Taken taken) {
  PHALANX_STEP("all_to_all: compare the counts");
  for (int to = 0; to < ranks(); ++to) {
    for (int from = 0; from < ranks(); ++from) {
      if (given(from, to) == taken(to, from)) {
        continue;
      }
      const auto side = [&](std::uint64_t count, int other) {
        return Fingerprint{.sequence = collective_.group().sequence(),
                           .count = count,
                           .root = other,
                           .kind = Kind::all_to_all,
                           .dtype = dtype_};
      };
      return collective_.fail({{.code = Code::mismatch, .peer = from, .reporter = to},
                               side(taken(to, from), from),
                               side(given(from, to), to)});
    }
  }
  return {};
}

// ---- two ranks ----

Status AllToAll::exchange() {
  const int peer = 1 - self();
  const std::size_t total = std::max(given_bytes(peer), taken_bytes(peer));
  const std::array<std::uint64_t, 2> counts = {own_.input_counts[peer], own_.output_counts[peer]};
  static_assert(sizeof counts <= kEntryPayload);
  PHALANX_STEP("all_to_all: publish the counts");
  std::memcpy(collective_.payload(), counts.data(), sizeof counts);
  const auto stage = [&](std::byte* to, Span span) {
    const Span part = clipped(span, given_bytes(peer));
    copy_bytes(to, at(own_.inputs[peer], part.begin), part.size);
  };
  Exchange exchange(collective_, total, Exchange::Payload::taken);
  const auto location = Arena::locate(own_.inputs[peer], given_bytes(peer));
  Status status = collective_.reserve_exchange(exchange.first().size);
  if (status.ok() && total > kSmallBytes && (location || given_bytes(peer) == 0)) {
    PHALANX_STEP("zero_copy: publish the locations");
    const ArenaLocation published = location.value_or(ArenaLocation{});
    std::memcpy(collective_.data(), &published, sizeof published);
    collective_.mark_located();
  }
  if (status.ok()) {
    status = exchange.enter(stage);
  }
  if (!status.ok()) {
    return status;
  }
  std::array<std::uint64_t, 2> theirs{};
  std::memcpy(theirs.data(), collective_.payload(peer), sizeof theirs);
  status = compare(
      [&](int from, int to) {
        return from == to ? own_.input_counts[self()] : from == self() ? counts[0] : theirs[0];
      },
      [&](int to, int from) {
        return from == to ? own_.output_counts[self()] : to == self() ? counts[1] : theirs[1];
      });
  if (!status.ok()) {
    return status;
  }
  deliver(own_.outputs[self()], own_.inputs[self()], given_bytes(self()), given_bytes(self()));
  if (!all_located(collective_)) {
    return exchange.run(total + 1, stage,
                        [&](const std::byte* from, Span span) { take_from(peer, span, from); });
  }
  if (taken_bytes(peer) != 0) {
    ArenaLocation published;
    std::memcpy(&published, collective_.data(peer), sizeof published);
    const std::byte* source = collective_.map_peer(peer, published, status);
    if (source == nullptr) {
      return status;
    }
    take_from(peer, {0, taken_bytes(peer)}, source);
  }
  collective_.next_exchange();
  return exit_barrier(collective_);
}

// ---- more ranks, or one ----

// A place for a part of each rank in a chunk.
std::size_t AllToAll::part_bytes() const {
  // There is at least one rank, which clang-tidy cannot know.
  const auto all = static_cast<std::size_t>(std::max(1, ranks()));
  const std::size_t chunk = collective_.group().segment().chunk_bytes() - parts_offset() / 2;
  return chunk / all / kCacheLine * kCacheLine;
}

// The number of chunks of the longest part; 0 if all parts are small together.
std::uint64_t AllToAll::own_chunks() const {
  std::size_t all = 0;
  std::size_t longest = 0;
  for (int rank = 0; rank < ranks(); ++rank) {
    if (rank != self()) {
      all += given_bytes(rank);
      longest = std::max(longest, given_bytes(rank));
    }
  }
  return all <= kSmallBytes ? 0 : chunks_of(longest, part_bytes());
}

Status AllToAll::move() {
  const std::uint64_t chunks = own_chunks();
  Status status = reserve_and_stage(chunks);
  if (status.ok()) {
    status = collective_.enter_together(!collective_.is_located());
  }
  if (status.ok()) {
    status = compare([&](int from, int to) { return published(from).given_to(to); },
                     [&](int to, int from) { return published(to).taken_from(from); });
  }
  if (!status.ok()) {
    return status;
  }
  deliver(own_.outputs[self()], own_.inputs[self()], given_bytes(self()), given_bytes(self()));
  std::uint64_t most = chunks;
  bool in_place = chunks == 0 || collective_.is_located();
  for (int peer = 0; peer < ranks(); ++peer) {
    if (peer == self()) {
      continue;
    }
    const std::uint64_t theirs = published(peer).chunks();
    most = std::max(most, theirs);
    in_place = in_place && (theirs == 0 || collective_.is_located(peer));
    if (theirs == 0) {
      take_packed(peer);
    }
  }
  if (most == 0) {
    collective_.finish(collective_.base() + 1);
    return status;
  }
  collective_.block();
  return in_place ? take_in_place() : move_chunks(most);
}

Status AllToAll::reserve_and_stage(std::uint64_t chunks) {
  std::size_t bytes = 0;
  if (chunks == 0) {
    for (int rank = 0; rank < ranks(); ++rank) {
      bytes += rank == self() ? 0 : given_bytes(rank);
    }
  } else {
    bytes = 2 * static_cast<std::size_t>(ranks()) * part_bytes();
  }
  const Status status = collective_.reserve(parts_offset() + bytes);
  if (!status.ok()) {
    return status;
  }
  PublishedCounts(collective_.data(), ranks()).write(own_, chunks);
  if (chunks == 0) {
    stage_packed(parts(collective_.data()));
    return status;
  }
  LocationTable(collective_.data() + PublishedCounts::bytes_for(ranks()))
      .publish(
          collective_, [&](int rank) { return own_.inputs[rank]; },
          [&](int rank) { return rank == self() ? 0 : given_bytes(rank); });
  if (!collective_.is_located()) {
    stage(0);
  }
  return status;
}

std::byte* AllToAll::place(std::byte* piece, std::uint64_t chunk, int rank) const {
  const auto all = static_cast<std::size_t>(ranks());
  return parts(piece) + ((chunk & 1) * all + static_cast<std::size_t>(rank)) * part_bytes();
}

void AllToAll::stage(std::uint64_t chunk) const {
  for (int rank = 0; rank < ranks(); ++rank) {
    if (rank != self()) {
      const Span span = chunk_of(given_bytes(rank), part_bytes(), chunk);
      copy_bytes(place(collective_.data(), chunk, rank), at(own_.inputs[rank], span.begin),
                 span.size);
    }
  }
}

void AllToAll::stage_packed(std::byte* to) const {
  for (int rank = 0; rank < ranks(); ++rank) {
    if (rank != self()) {
      copy_bytes(to, own_.inputs[rank], given_bytes(rank));
      to += given_bytes(rank);
    }
  }
}

void AllToAll::take_packed(int peer) const {
  const PublishedCounts theirs = published(peer);
  const std::byte* from = parts(const_cast<std::byte*>(collective_.data(peer)));
  for (int rank = 0; rank < self(); ++rank) {
    from += rank == peer ? 0 : theirs.given_to(rank) * element_;
  }
  copy_bytes(own_.outputs[peer], from, taken_bytes(peer));
}

void AllToAll::take_staged(int peer, std::uint64_t chunk) const {
  const Span span = chunk_of(taken_bytes(peer), part_bytes(), chunk);
  deliver(at(own_.outputs[peer], span.begin),
          place(const_cast<std::byte*>(collective_.data(peer)), chunk, self()), span.size,
          taken_bytes(peer));
}

Status AllToAll::take_in_place() {
  for (int i = 1; i < ranks(); ++i) {
    const int peer = (self() + i) % ranks();  // spread the load over the peers
    if (published(peer).chunks() == 0) {
      continue;
    }
    Status status;
    const LocationTable table(collective_.data(peer) + PublishedCounts::bytes_for(ranks()));
    const std::byte* source = table.map_source(collective_, peer, status);
    if (source == nullptr) {
      return status;
    }
    deliver(own_.outputs[peer], source, taken_bytes(peer), taken_bytes(peer));
  }
  return exit_barrier(collective_);
}

Status AllToAll::move_chunks(std::uint64_t chunks) {
  Group& group = collective_.group();
  const std::uint64_t base = collective_.base();
  const bool stages = published(self()).chunks() != 0;
  if (collective_.is_located()) {  // unlike some peer
    stage(0);
    group.advance();
  }
  // All peers have staged chunk - 1, and so have taken chunk - 2, whose place this one takes.
  for (std::uint64_t chunk = 0; chunk < chunks; ++chunk) {
    if (chunk != 0) {
      if (stages) {
        stage(chunk);
      }
      group.advance();
    }
    if (const Status s = group.wait_steps(base + chunk, collective_.bounds()); !s.ok()) {
      return s;
    }
    for (int peer = 0; peer < ranks(); ++peer) {
      if (peer != self() && published(peer).chunks() != 0) {
        take_staged(peer, chunk);
      }
    }
  }
  collective_.finish(base + chunks);
  return {};
}

}  // namespace

Status all_to_all(Group& group, const Splits& own, DType dtype, const Bounds& bounds) {
  Collective collective(group, {.kind = Kind::all_to_all, .dtype = dtype}, bounds);
  return collective.status().ok() ? AllToAll(collective, own, dtype).run() : collective.status();
}

}  // namespace phalanx
