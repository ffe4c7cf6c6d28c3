#include "phalanx/collectives.h"

namespace phalanx {

Status barrier(Group& group, const Bounds& bounds) {
  const std::lock_guard turn(group.turn());
  return group.meet({.kind = Kind::barrier}, bounds);
}

}  // namespace phalanx
