#include "reduction.h"

namespace phalanx {

Status reduce(Group& group, void* data, std::size_t count, DType dtype, ReduceOp op, int root,
              const Bounds& bounds) {
  const Fingerprint own{
      .count = count, .root = root, .kind = Kind::reduce, .dtype = dtype, .op = op};
  return reduce_to(group, data, own, bounds, group.rank() == root);
}

}  // namespace phalanx
