#include "phalanx/commons.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>

#include <cerrno>

#include "core.h"

namespace phalanx::bindings {
namespace {

using Bytes = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Held = std::shared_ptr<Commons>;

Held made(std::unique_ptr<Commons> commons, const Status& status) {
  if (!commons) {
    errno = status.error;
    PyErr_SetFromErrno(PyExc_OSError);
    throw nb::python_error();
  }
  return commons;
}

// What is made of it keeps all of it.
Bytes view(const Held& commons, std::byte* base, std::size_t offset, std::size_t bytes) {
  if (offset > commons->bytes() || bytes > commons->bytes() - offset) {
    throw nb::value_error("a range inside is expected");
  }
  const nb::capsule owner(new Held(commons),
                          [](void* held) noexcept { delete static_cast<Held*>(held); });
  return Bytes(base + offset, {bytes}, owner);
}

void check(const Commons& commons, std::size_t offset, std::size_t bytes) {
  if (offset % kPage != 0 || bytes % kPage != 0 || offset > commons.bytes() ||
      bytes > commons.bytes() - offset) {
    throw nb::value_error("a range of whole pages inside is expected");
  }
}

}  // namespace

void bind_commons(nb::module_& module) {
  nb::class_<Commons>(module, "Commons")
      .def_static(
          "create",
          [](std::size_t bytes) {
            Status status;
            auto commons = Commons::create(bytes, status);
            return made(std::move(commons), status);
          },
          nb::arg("size"))
      .def_static(
          "open",
          [](int pid, int descriptor, std::size_t bytes) {
            Status status;
            auto commons = Commons::open(pid, descriptor, bytes, status);
            return made(std::move(commons), status);
          },
          nb::arg("pid"), nb::arg("descriptor"), nb::arg("size"))
      .def_prop_ro("descriptor", &Commons::descriptor)
      .def("close_descriptor", &Commons::close_descriptor)
      .def(
          "common",
          [](const Held& self, std::size_t offset, std::size_t bytes) {
            return view(self, self->common(), offset, bytes);
          },
          nb::arg("offset"), nb::arg("size"))
      .def(
          "own",
          [](const Held& self, std::size_t offset, std::size_t bytes) {
            return view(self, self->own(), offset, bytes);
          },
          nb::arg("offset"), nb::arg("size"))
      .def(
          "publish",
          [](Commons& self, std::size_t offset, std::size_t bytes) {
            check(self, offset, bytes);
            const nb::gil_scoped_release release;
            return self.publish(offset, bytes);
          },
          nb::arg("offset"), nb::arg("size"))
      .def(
          "drop",
          [](Commons& self, std::size_t offset, std::size_t bytes) {
            check(self, offset, bytes);
            const nb::gil_scoped_release release;
            return self.drop(offset, bytes);
          },
          nb::arg("offset"), nb::arg("size"));
  module.attr("PAGE_BYTES") = kPage;
}

}  // namespace phalanx::bindings
