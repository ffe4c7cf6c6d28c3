// The agreement of a group's ranks, after a failure, on those that go on, and on the segment that
// they enter.
//
// It has rounds, each with a segment of its own. In a round, one decision is made on every rank
// that was a member of the round before: it joins the round itself, or another rank excludes it,
// since it has died or is late. A decision never changes, so all ranks find the same members once
// all decisions of a round are made. The lowest member then creates the segment of the round, and
// publishes its location; the others enter it. A member that is in the segment joins the next
// round; one that cannot enter it, since its creator has died, is stranded there. If all members of
// a round join the next, the agreement is reached: all are in the segment. Otherwise the members of
// the next round go on in the same way. A rank that is excluded from a round is in none of the
// later ones.
//
// This is what shared memory needs for it. The rounds themselves are run by topology/agreement.py,
// which knows when a rank has died; docs/design/membership.md says why they are right.
#pragma once

#include <cstdint>
#include <optional>

#include "phalanx/segment.h"
#include "phalanx/status.h"

namespace phalanx {

struct SegmentLocation {
  int pid = 0;
  int descriptor = -1;
  std::uint64_t nonce = 0;
};

// Rounds are from 0 to Segment::agreement_rounds() - 1.
class Agreement {
 public:
  explicit Agreement(const Segment& segment) : segment_(segment) {}

  // Decides on a rank, unless that is done already, and returns the decision. `wanted`: joined or
  // stranded, by the rank itself, or excluded. Fails (out_of_memory) if there is no memory for this
  // round and the next.
  Decision decide(int round, int rank, Decision wanted, Status& status) const;
  Decision decision(int round, int rank) const;

  // Publishes the location of the segment that the members of a round enter; called once, by the
  // lowest of them, before it enters the next round.
  void publish(int round, const SegmentLocation& location) const;
  std::optional<SegmentLocation> location(int round) const;

 private:
  const Segment& segment_;
};

}  // namespace phalanx
