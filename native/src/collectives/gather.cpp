#include "gather.h"

#include "phalanx/collectives.h"

namespace phalanx {

Status gather(Group& group, const void* input, void* const* outputs, std::size_t count, DType dtype,
              int root, const Bounds& bounds) {
  Collective collective(group, {.count = count, .root = root, .kind = Kind::gather, .dtype = dtype},
                        bounds);
  return gather_to(
      collective, input, outputs, count * size_of(dtype), [root](int rank) { return rank != root; },
      [root](int rank) { return rank == root; });
}

}  // namespace phalanx
