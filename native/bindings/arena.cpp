#include "phalanx/arena.h"

#include <nanobind/ndarray.h>

#include <cerrno>

#include "core.h"

namespace phalanx::bindings {
namespace {

using Bytes = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// The allocation that an array's owner releases.
struct Block {
  Arena* arena;
  std::byte* data;
};

Bytes allocate_shared(std::size_t size) {
  Status status;
  Arena* arena = Arena::own(status);
  std::byte* data = arena == nullptr ? nullptr : arena->allocate(size, status);
  if (data == nullptr) {
    raise_system_error(status.error);
  }
  const nb::capsule owner(new Block{arena, data}, [](void* owner_data) noexcept {
    const auto* block = static_cast<Block*>(owner_data);
    block->arena->release(block->data);
    delete block;
  });
  return Bytes(data, {size}, owner);
}

std::size_t shared_bytes_in_use() {
  Status status;
  const Arena* arena = Arena::own(status);
  return arena == nullptr ? 0 : arena->in_use();
}

}  // namespace

void bind_arena(nb::module_& module) {
  module.def("allocate_shared", &allocate_shared, nb::arg("size"));
  module.def("shared_bytes_in_use", &shared_bytes_in_use);
}

}  // namespace phalanx::bindings
