#include "phalanx/collectives.h"

namespace phalanx {

Status barrier(Group& group, const Bounds& bounds) {
  const Group::CollectiveLock lock(group, bounds);
  if (!lock.status().ok()) {
    return lock.status();
  }
  return group.enter_collective({.kind = Kind::barrier}, bounds);
}

}  // namespace phalanx
