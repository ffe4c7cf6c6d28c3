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
};

struct Fingerprint {
  std::uint64_t sequence = 0;  // number of collectives begun in this group
  std::uint64_t count = 0;     // elements; per rank if every rank contributes a part
  std::int32_t root = -1;      // root, or the peer of a message; -1 for none
  Kind kind = Kind::none;
  DType dtype = DType::uint8;
  ReduceOp op = ReduceOp::none;
  std::uint8_t reserved = 0;

  friend bool operator==(const Fingerprint&, const Fingerprint&) = default;
};
static_assert(sizeof(Fingerprint) == 24);

// A fingerprint in shared memory. The words are atomic because a rank that reports a failure reads
// its peers' fingerprints while they may be writing. Ordinary reads come after the acquire load of
// the step.
class SharedFingerprint {
 public:
  void store(const Fingerprint& value);
  Fingerprint load() const;

 private:
  std::atomic<std::uint64_t> words_[3];
};
static_assert(sizeof(SharedFingerprint) == 24);

}  // namespace phalanx
