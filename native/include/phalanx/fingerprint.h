// What a rank says of the operation that it enters, compared with its peers' before data moves.
#pragma once

#include <atomic>
#include <cstdint>

#include "phalanx/reduce.h"

namespace phalanx {

// The numbers stand in shared memory: append only.
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
  join = 12,  // of flight recorders alone: the group is being formed
};

struct Fingerprint {
  std::uint64_t sequence = 0;  // how many collectives this group has begun
  std::uint64_t count = 0;     // elements, per rank where ranks contribute one part each
  std::int32_t root = -1;      // root, or the peer of a message; -1 where there is none
  Kind kind = Kind::none;
  DType dtype = DType::uint8;
  ReduceOp op = ReduceOp::none;
  std::uint8_t reserved = 0;

  friend bool operator==(const Fingerprint&, const Fingerprint&) = default;
};
static_assert(sizeof(Fingerprint) == 24);

// A fingerprint in shared memory. The words are atomic, since a rank that reports a failure reads
// its peers' while they may be writing; ordinary readers come after the acquire load of the step.
class SharedFingerprint {
 public:
  void store(const Fingerprint& value);
  Fingerprint load() const;

 private:
  std::atomic<std::uint64_t> words_[3];
};
static_assert(sizeof(SharedFingerprint) == 24);

}  // namespace phalanx
