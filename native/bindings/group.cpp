#include "phalanx/group.h"

#include "core.h"

namespace phalanx::bindings {
namespace {

PyGroup make(std::unique_ptr<Segment> segment, int rank, const Status& status) {
  if (!segment) {
    errno = status.error;
    PyErr_SetFromErrno(PyExc_OSError);
    throw nb::python_error();
  }
  return {std::make_shared<Core>(std::move(segment), rank)};
}

PyGroup create(int ranks, int rank, std::uint64_t nonce) {
  Status status;
  return make(Segment::create(ranks, nonce, status), rank, status);
}

PyGroup open(int pid, int descriptor, int ranks, int rank, std::uint64_t nonce) {
  Status status;
  return make(Segment::open(pid, descriptor, ranks, nonce, status), rank, status);
}

void close(PyGroup& self) {
  const std::shared_ptr<Core> core = self.core;
  if (core) {
    core->mailbox.stop();
    {
      const nb::gil_scoped_release release;
      core->mailbox.close();
    }
    core->group.leave();
    self.core.reset();
  }
}

std::vector<int> absent(const PyGroup& self) {
  const Segment& segment = self.held()->group.segment();
  std::vector<int> ranks;
  for (int rank = 0; rank < segment.ranks(); ++rank) {
    // Pairs with the store in Group's constructor: who is present has stored its pid.
    if (segment.control(rank).presence.load(std::memory_order_seq_cst) == Presence::absent) {
      ranks.push_back(rank);
    }
  }
  return ranks;
}

nb::object abort(const PyGroup& self) {
  Group& group = self.held()->group;
  return to_python(group.abort(Status{.code = Code::aborted, .reporter = group.rank()}));
}

}  // namespace

nb::class_<PyGroup> bind_group(nb::module_& module) {
  module.attr("LAYOUT_VERSION") = kLayoutVersion;
  module.attr("MAX_RANKS") = kMaxRanks;
  module.attr("INLINE_BYTES") = kInlineBytes;
  module.attr("CHUNK_BYTES") = kChunkBytes;
  module.attr("RING_BYTES") = kRingBytes;
  module.def("usable_cores", &usable_cores);
  module.def("segment_bytes", &Segment::bytes_for, nb::arg("ranks"));
  auto group = nb::class_<PyGroup>(module, "Group", "One rank's view of its group on this host.");
  group.def_static("create", &create, nb::arg("ranks"), nb::arg("rank"), nb::arg("nonce"))
      .def_static("open", &open, nb::arg("pid"), nb::arg("descriptor"), nb::arg("ranks"),
                  nb::arg("rank"), nb::arg("nonce"))
      .def_prop_ro("descriptor",
                   [](const PyGroup& self) { return self.held()->group.segment().descriptor(); })
      .def("connect", [](const PyGroup& self) { return to_python(self.held()->group.connect()); })
      .def("absent", &absent)
      .def(
          "pid", [](const PyGroup& self, int rank) { return self.held()->group.pid(rank); },
          nb::arg("rank"))
      .def(
          "wait_status",
          [](const PyGroup& self, int rank) { return self.held()->group.wait_status(rank); },
          nb::arg("rank"))
      .def_prop_ro("sequence", [](const PyGroup& self) { return self.held()->group.sequence(); })
      .def(
          "behind", [](const PyGroup& self, int rank) { return self.held()->group.behind(rank); },
          nb::arg("rank"))
      .def("broken", [](const PyGroup& self) { return to_python(self.held()->group.broken()); })
      .def("abort", &abort)
      .def("close", &close)
      .def_prop_ro("closed", [](const PyGroup& self) { return self.core == nullptr; });
  return group;
}

}  // namespace phalanx::bindings
