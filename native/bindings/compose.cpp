#include <nanobind/stl/string_view.h>

#include <algorithm>

#include "core.h"

namespace phalanx::bindings {
namespace {

nb::object compose(const PyGroup& self, std::string_view kind, std::size_t count, int dtype, int op,
                   int root, double timeout) {
  const Fingerprint own{.count = count,
                        .root = root,
                        .kind = kind_of(kind),
                        .dtype = static_cast<DType>(dtype),
                        .op = static_cast<ReduceOp>(op)};
  return run(self, timeout,
             [&](Core& core, const Bounds& bounds) { return core.group.compose(own, bounds); });
}

void compose_waited(const PyGroup& self, int rank, double seconds) {
  const auto waited = std::chrono::duration_cast<Clock::duration>(
      std::chrono::duration<double>(std::max(0.0, seconds)));
  self.held()->group.compose_waited(static_cast<std::int16_t>(rank), waited);
}

}  // namespace

void bind_compose(nb::class_<PyGroup>& group) {
  group
      .def(
          "set_names",
          [](const PyGroup& self, const std::vector<std::int16_t>& names, std::uint64_t identity) {
            self.held()->group.set_names(names, identity);
          },
          nb::arg("names"), nb::arg("identity"))
      .def("compose", &compose, nb::arg("kind"), nb::arg("count"), nb::arg("dtype"), nb::arg("op"),
           nb::arg("root"), nb::arg("timeout"))
      .def(
          "compose_end",
          [](const PyGroup& self, std::string_view outcome) {
            const Code code = code_of(outcome);
            if (const auto core = self.core) {  // the group may have been closed meanwhile
              core->group.compose_end(code);
            }
          },
          nb::arg("outcome"))
      .def(
          "compose_waits",
          [](const PyGroup& self, int rank) {
            self.held()->group.compose_waits(static_cast<std::int16_t>(rank));
          },
          nb::arg("rank"))
      .def("compose_waited", &compose_waited, nb::arg("rank"), nb::arg("seconds"));
}

}  // namespace phalanx::bindings
