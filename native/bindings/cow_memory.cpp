#include "phalanx/cow_memory.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>

#include <cerrno>

#include "core.h"

namespace phalanx::bindings {
namespace {

using Bytes = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using CowMemoryPtr = std::shared_ptr<CowMemory>;

CowMemoryPtr ptr_or_raise(std::unique_ptr<CowMemory> memory, const Status& status) {
  if (!memory) {
    raise_system_error(status.error);
  }
  return memory;
}

// An array keeps the whole memory alive.
Bytes view(const CowMemoryPtr& memory, std::byte* base, std::size_t offset, std::size_t bytes) {
  if (offset > memory->bytes() || bytes > memory->bytes() - offset) {
    throw nb::value_error("the range exceeds the memory");
  }
  const nb::capsule owner(new CowMemoryPtr(memory), [](void* owner_data) noexcept {
    delete static_cast<CowMemoryPtr*>(owner_data);
  });
  return Bytes(base + offset, {bytes}, owner);
}

void check(const CowMemory& memory, std::size_t offset, std::size_t bytes) {
  if (offset % kPage != 0 || bytes % kPage != 0 || offset > memory.bytes() ||
      bytes > memory.bytes() - offset) {
    throw nb::value_error("the range must consist of whole pages within the memory");
  }
}

}  // namespace

void bind_cow_memory(nb::module_& module) {
  nb::class_<CowMemory>(module, "CowMemory")
      .def_static(
          "create",
          [](std::size_t bytes) {
            Status status;
            auto memory = CowMemory::create(bytes, status);
            return ptr_or_raise(std::move(memory), status);
          },
          nb::arg("size"))
      .def_static(
          "open",
          [](int pid, int descriptor, std::size_t bytes) {
            Status status;
            auto memory = CowMemory::open(pid, descriptor, bytes, status);
            return ptr_or_raise(std::move(memory), status);
          },
          nb::arg("pid"), nb::arg("descriptor"), nb::arg("size"))
      .def_prop_ro("descriptor", &CowMemory::descriptor)
      .def("close_descriptor", &CowMemory::close_descriptor)
      .def(
          "shared_view",
          [](const CowMemoryPtr& self, std::size_t offset, std::size_t bytes) {
            return view(self, self->shared_view(), offset, bytes);
          },
          nb::arg("offset"), nb::arg("size"))
      .def(
          "private_view",
          [](const CowMemoryPtr& self, std::size_t offset, std::size_t bytes) {
            return view(self, self->private_view(), offset, bytes);
          },
          nb::arg("offset"), nb::arg("size"))
      .def(
          "publish",
          [](CowMemory& self, std::size_t offset, std::size_t bytes) {
            check(self, offset, bytes);
            const WithoutGil released;
            return self.publish(offset, bytes);
          },
          nb::arg("offset"), nb::arg("size"))
      .def(
          "drop",
          [](CowMemory& self, std::size_t offset, std::size_t bytes) {
            check(self, offset, bytes);
            const WithoutGil released;
            return self.drop(offset, bytes);
          },
          nb::arg("offset"), nb::arg("size"));
  module.attr("PAGE_BYTES") = kPage;
}

}  // namespace phalanx::bindings
