#include "gather.h"

namespace phalanx {

Status gather(Group& group, const void* input, void* const* outputs, std::size_t count, DType dtype,
              int root, const Bounds& bounds) {
  const Group::CollectiveLock lock(group, bounds);
  if (!lock.status().ok()) {
    return lock.status();
  }
  const Fingerprint own{.count = count, .root = root, .kind = Kind::gather, .dtype = dtype};
  return gather_to(group, input, outputs, count * size_of(dtype), own, bounds,
                   [root](int rank) { return rank == root; });
}

}  // namespace phalanx
