#include "phalanx/collectives.h"

namespace phalanx {

Status barrier(Group& group, const Bounds& bounds) {
  const Group::Turn turn(group, bounds);
  if (!turn.status().ok()) {
    return turn.status();
  }
  return group.meet({.kind = Kind::barrier}, bounds);
}

}  // namespace phalanx
