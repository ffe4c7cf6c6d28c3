#include "phalanx/collective.h"
#include "phalanx/collectives.h"

namespace phalanx {

Status barrier(Group& group, const Bounds& bounds) {
  Collective collective(group, {.kind = Kind::barrier}, bounds);
  return collective.status().ok() ? collective.enter_together() : collective.status();
}

}  // namespace phalanx
