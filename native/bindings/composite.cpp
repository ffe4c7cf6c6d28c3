#include <nanobind/stl/string_view.h>

#include <algorithm>

#include "core.h"

namespace phalanx::bindings {
namespace {

nb::object begin_composite(const PyGroup& self, std::string_view kind, std::size_t count, int dtype,
                           int op, int root, double timeout) {
  const Fingerprint own{.count = count,
                        .root = root,
                        .kind = kind_of(kind),
                        .dtype = static_cast<DType>(dtype),
                        .op = static_cast<ReduceOp>(op)};
  return run(self, timeout, [&](Core& core, const Bounds& bounds) {
    return core.group.begin_composite(own, bounds);
  });
}

void end_composite_wait(const PyGroup& self, int rank, double seconds) {
  const auto waited = std::chrono::duration_cast<Clock::duration>(
      std::chrono::duration<double>(std::max(0.0, seconds)));
  self.require_core()->group.end_composite_wait(static_cast<std::int16_t>(rank), waited);
}

}  // namespace

void bind_composite(nb::class_<PyGroup>& group) {
  group
      .def(
          "set_global_ranks",
          [](const PyGroup& self, const std::vector<std::int16_t>& global_ranks,
             std::uint64_t identity) {
            self.require_core()->group.set_global_ranks(global_ranks, identity);
          },
          nb::arg("global_ranks"), nb::arg("identity"))
      .def("begin_composite", &begin_composite, nb::arg("kind"), nb::arg("count"), nb::arg("dtype"),
           nb::arg("op"), nb::arg("root"), nb::arg("timeout"))
      .def(
          "end_composite",
          [](const PyGroup& self, std::string_view outcome) {
            const Code code = code_of(outcome);
            if (const auto core = self.core) {  // the group may have been closed meanwhile
              core->group.end_composite(code);
            }
          },
          nb::arg("outcome"))
      .def(
          "begin_composite_wait",
          [](const PyGroup& self, int rank) {
            self.require_core()->group.begin_composite_wait(static_cast<std::int16_t>(rank));
          },
          nb::arg("rank"))
      .def("end_composite_wait", &end_composite_wait, nb::arg("rank"), nb::arg("seconds"))
      .def(
          "set_composite_progress",
          [](const PyGroup& self, int percent) {
            self.require_core()->group.set_composite_progress(static_cast<std::uint8_t>(percent));
          },
          nb::arg("percent"));
}

}  // namespace phalanx::bindings
