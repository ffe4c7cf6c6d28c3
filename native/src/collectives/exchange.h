// Exchanges between two ranks: each gives data to the other.
//
// There are two buffers. In every exchange a rank writes to the one that it has just read from, and
// reads from the other. So each cache line moves to the other core once per exchange, together with
// the right to write to it. With a buffer per rank it would move twice. The first chunk is in place
// at the entry. The chunk that follows replaces the one that is being read, block by block.
#pragma once

#include "locations.h"
#include "phalanx/collective.h"
#include "span.h"

namespace phalanx {

class Exchange {
 public:
  // The first data go to the entry itself, if they fit there and the operation does not use that.
  enum class Payload : bool { free, taken };

  // `total`: the larger number of bytes of the two directions.
  Exchange(Collective& collective, std::size_t total, Payload payload = Payload::free)
      : collective_(collective),
        total_(total),
        chunk_bytes_(std::min(collective.group().segment().chunk_bytes() / 2, kExchangeBytes)),
        chunks_(total <= chunk_bytes_ ? 1 : chunks_of(total, chunk_bytes_)),
        in_entry_(payload == Payload::free && total <= kEntryPayload) {}

  // The first chunk.
  Span first() const { return span(0); }

  // Enters the collective. `stage(to, span)` writes this rank's data. If it has published
  // locations, that comes later, and only if the peer has none.
  template <class Stage>
  Status enter(Stage stage) {
    if (total_ >= kLongCopy) {
      collective_.block();
    }
    if (!collective_.is_located()) {
      Status status;
      if (collective_.data() == nullptr) {
        status =
            in_entry_ ? collective_.reserve(total_) : collective_.reserve_exchange(first().size);
      }
      if (!status.ok()) {
        return status;
      }
      stage(collective_.data(), first());
    }
    return collective_.enter(Peers::all, !collective_.is_located());
  }

  // Moves the data. `take(from, span)` reads the peer's. `block`: the number of bytes that are read
  // before those of the next chunk are written there.
  template <class Stage, class Take>
  Status run(std::size_t block, Stage stage, Take take) {
    Group& group = collective_.group();
    const int peer = 1 - collective_.self();
    Status status = stage_late(stage);
    const std::uint64_t base = collective_.base();
    for (std::uint64_t chunk = 0; status.ok() && chunk < chunks_; ++chunk) {
      const std::byte* from = in_entry_ ? collective_.data(peer) : collective_.exchanged();
      const Span next = span(chunk + 1);
      if (next.size == 0) {
        take(from, span(chunk));
        continue;
      }
      std::byte* to = collective_.exchanged();
      for (std::size_t done = 0; done < span(chunk).size; done += block) {
        take(from + done, part_of(span(chunk), done, block));
        stage(to + done, part_of(next, done, block));
      }
      collective_.next_exchange();
      group.advance();
      status = group.wait_step(peer, base + chunk + 1, collective_.bounds());
    }
    if (!in_entry_) {
      collective_.next_exchange();
    }
    return status;
  }

 private:
  Span span(std::uint64_t chunk) const { return chunk_of(total_, chunk_bytes_, chunk); }
  static Span part_of(const Span& span, std::size_t done, std::size_t block) {
    const std::size_t begin = std::min(done, span.size);
    return {span.begin + begin, std::min(block, span.size - begin)};
  }

  // The case that only one of the two ranks has published locations.
  template <class Stage>
  Status stage_late(Stage stage) {
    const int peer = 1 - collective_.self();
    if (collective_.is_located()) {
      stage(collective_.own_exchange_buffer(), first());
      collective_.group().advance();
      return {};
    }
    if (!collective_.is_located(peer)) {
      return {};
    }
    collective_.block();
    return collective_.group().wait_step(peer, collective_.base(), collective_.bounds());
  }

  Collective& collective_;
  std::size_t total_;
  std::size_t chunk_bytes_;
  std::uint64_t chunks_;
  bool in_entry_;
};

}  // namespace phalanx
