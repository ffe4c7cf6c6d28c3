// The description of the operation that a rank enters. Ranks compare it before data moves.
#pragma once

#include <atomic>
#include <cstdint>

#include "phalanx/reduce.h"

namespace phalanx {

// The numbers are stored in shared memory: append only.
enum class Kind : std::uint8_t {
  none = 0,
  barrier = 1,
  broadcast = 2,
  reduce = 3,
  all_reduce = 4,
  gather = 5,
  scatter = 6,
  all_gather = 7,
  send = 8,
  recv = 9,
  reduce_scatter = 10,
  all_to_all = 11,
  join = 12,  // in flight recorders only: the group is being formed
  plan = 13,  // several merged collectives; `count` is their number
};

struct Fingerprint {
  std::uint64_t sequence = 0;  // number of collectives begun in this group
  std::uint64_t count = 0;     // elements; per rank if every rank contributes a part
  std::int32_t root = -1;      // root, or the peer of a message; -1 for none
  Kind kind = Kind::none;
  DType dtype = DType::uint8;
  ReduceOp op = ReduceOp::none;

  friend bool operator==(const Fingerprint&, const Fingerprint&) = default;
};

// A fingerprint in two words: the sequence, and all else. Exact for counts below 2^42 (four Ti),
// which no tensor reaches, and for ranks up to 1022.
struct PackedFingerprint {
  std::uint64_t sequence = 0;
  std::uint64_t rest = 0;

  PackedFingerprint() = default;
  explicit PackedFingerprint(const Fingerprint& value);
  Fingerprint unpack() const;

  friend bool operator==(const PackedFingerprint&, const PackedFingerprint&) = default;
};

// A hash of a fingerprint and of all before it, whose hash is `history`.
std::uint64_t extend_history(std::uint64_t history, const PackedFingerprint& next);

// A fingerprint in shared memory. The words are atomic because a rank that reports a failure, or
// compares an earlier entry, reads its peers' fingerprints while they may be writing. Ordinary
// reads come after the acquire load of the entry's number.
class SharedFingerprint {
 public:
  // Each store is a release: a reader that sees it also sees what its writer did before.
  void store(const PackedFingerprint& value) {
    words_[0].store(value.sequence, std::memory_order_release);
    words_[1].store(value.rest, std::memory_order_release);
  }
  PackedFingerprint load() const {
    PackedFingerprint value;
    // Pairs with the stores above.
    value.sequence = words_[0].load(std::memory_order_acquire);
    value.rest = words_[1].load(std::memory_order_acquire);
    return value;
  }

 private:
  std::atomic<std::uint64_t> words_[2];
};
static_assert(sizeof(SharedFingerprint) == 16);

}  // namespace phalanx
