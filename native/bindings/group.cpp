#include "phalanx/group.h"

#include <nanobind/stl/string_view.h>
#include <unistd.h>

#include <algorithm>
#include <iterator>

#include "core.h"
#include "phalanx/agreement.h"
#include "phalanx/call_site.h"
#include "phalanx/flight_recorder_reader.h"

namespace phalanx::bindings {
namespace {

PyGroup make(std::unique_ptr<Segment> segment, int rank, std::uint16_t entry, Status& status) {
  if (segment) {
    status = segment->allocate(rank);
  }
  if (!status.ok()) {
    raise_system_error(status.error);
  }
  return {std::make_shared<Core>(std::move(segment), rank, entry)};
}

PyGroup create(int ranks, int rank, std::uint64_t nonce, std::uint16_t entry) {
  Status status;
  return make(Segment::create(ranks, nonce, status), rank, entry, status);
}

PyGroup open(int pid, int descriptor, int ranks, int rank, std::uint64_t nonce,
             std::uint16_t entry) {
  Status status;
  return make(Segment::open(pid, descriptor, ranks, nonce, status), rank, entry, status);
}

void close(PyGroup& self) {
  const std::shared_ptr<Core> core = self.core;
  if (core) {
    mark_call_site();
    core->mailbox.stop();
    {
      const WithoutGil released;
      core->mailbox.close();
    }
    core->group.leave();
    self.core.reset();
  }
}

void set_tree(const PyGroup& self, const std::vector<int>& parents,
              const std::vector<int>& caches) {
  Group& group = self.require_core()->group;
  if (parents.empty()) {
    group.set_tree({});
  } else if (parents.size() == static_cast<std::size_t>(group.ranks()) &&
             Tree::is_valid(parents, caches)) {
    group.set_tree({parents, group.rank(), caches});
  } else {
    throw nb::value_error(
        "expected parents: a lower rank for each rank, and -1 for rank 0; and caches: ascending "
        "ranks from 0 on, or none");
  }
}

std::vector<int> absent_ranks(const PyGroup& self) {
  const Segment& segment = self.require_core()->group.segment();
  std::vector<int> ranks;
  for (int rank = 0; rank < segment.ranks(); ++rank) {
    // Pairs with the store in Group's constructor: a rank that is present has stored its pid.
    if (segment.control(rank).presence.load(std::memory_order_seq_cst) == Presence::absent) {
      ranks.push_back(rank);
    }
  }
  return ranks;
}

// Raises ValueError for a round or a rank that does not exist.
Agreement agreement_of(const Group& group, int round, int rank) {
  const Segment& segment = group.segment();
  if (round < 0 || round >= segment.agreement_rounds() || rank < 0 || rank >= segment.ranks()) {
    throw nb::value_error("expected a round and a rank of the group");
  }
  return Agreement(segment);
}

constexpr std::string_view kDecisions[] = {"", "joined", "stranded", "excluded"};

nb::object decision_to_python(Decision decision) {
  const std::string_view name = kDecisions[static_cast<std::size_t>(decision)];
  return decision == Decision::none ? nb::none() : nb::cast(name);
}

nb::object decide(const PyGroup& self, int round, int rank, std::string_view wanted) {
  const auto* const found = std::find(std::begin(kDecisions) + 1, std::end(kDecisions), wanted);
  if (found == std::end(kDecisions)) {
    throw nb::value_error("expected joined, stranded or excluded");
  }
  const auto decision = static_cast<Decision>(found - std::begin(kDecisions));
  const std::shared_ptr<Core> core = self.require_core();
  Status status;
  const Decision made =
      agreement_of(core->group, round, rank).decide(round, rank, decision, status);
  if (!status.ok()) {
    raise_system_error(status.error);
  }
  return decision_to_python(made);
}

nb::object decision(const PyGroup& self, int round, int rank) {
  const std::shared_ptr<Core> core = self.require_core();
  return decision_to_python(agreement_of(core->group, round, rank).decision(round, rank));
}

void publish_successor(const PyGroup& self, int round, int descriptor, std::uint64_t nonce) {
  const std::shared_ptr<Core> core = self.require_core();
  agreement_of(core->group, round, 0)
      .publish(round, {.pid = getpid(), .descriptor = descriptor, .nonce = nonce});
}

nb::object successor(const PyGroup& self, int round) {
  const std::shared_ptr<Core> core = self.require_core();
  const auto location = agreement_of(core->group, round, 0).location(round);
  return location ? nb::object(nb::make_tuple(location->pid, location->descriptor, location->nonce))
                  : nb::none();
}

// Records in this rank's flight recorder, for others to read, why it breaks the group.
void set_abort_reason(Group& group, std::string_view reason) {
  if (GroupEntry* entry = group.entry(); entry != nullptr && group.failure().ok()) {
    mark_call_site();
    FlightRecorder::set_abort_reason(*entry, reason);
    // A reader that finds the call site in a copy of the file may read the reason.
    entry->left_at.store(current_caller().site, std::memory_order_release);
  }
}

nb::object abort(const PyGroup& self, std::string_view reason) {
  Group& group = self.require_core()->group;
  set_abort_reason(group, reason);
  return to_python(group.abort(Status{.code = Code::aborted, .reporter = group.rank()}), group);
}

nb::object abort_deadlock(const PyGroup& self, int peer, std::string_view reason) {
  Group& group = self.require_core()->group;
  set_abort_reason(group, reason);
  // All groups of the deadlock are broken before any rank leaves one of them because of it.
  const Status status{.code = Code::deadlock, .peer = peer, .reporter = group.rank()};
  return to_python(group.abort(status, false), group);
}

void fail(const PyGroup& self, bool wake, std::string_view reason) {
  Group& group = self.require_core()->group;
  if (!reason.empty()) {
    set_abort_reason(group, reason);
  }
  group.fail(wake);
}

nb::object flight_recorder(const PyGroup& self, int rank, std::size_t history) {
  const Group& group = self.require_core()->group;
  const std::vector<std::byte> bytes =
      copy_recorder(group.pid(rank), group.recorder_descriptor(rank));
  if (bytes.empty()) {
    return nb::none();
  }
  try {
    return recorder_to_python(bytes, history);
  } catch (const nb::builtin_exception&) {  // of another version, or damaged
    return nb::none();
  }
}

}  // namespace

nb::class_<PyGroup> bind_group(nb::module_& module) {
  module.attr("LAYOUT_VERSION") = kLayoutVersion;
  module.attr("MAX_RANKS") = kMaxRanks;
  module.attr("SMALL_BYTES") = kSmallBytes;
  module.attr("CHUNK_BYTES") = kChunkBytes;
  module.attr("RING_BYTES") = kRingBytes;
  module.def("usable_cores", &usable_cores);
  module.def("segment_bytes", &Segment::bytes_for, nb::arg("ranks"));
  auto group = nb::class_<PyGroup>(module, "Group", "One rank's view of its group on this host.");
  group
      .def_static("create", &create, nb::arg("ranks"), nb::arg("rank"), nb::arg("nonce"),
                  nb::arg("entry") = 0)
      .def_static("open", &open, nb::arg("pid"), nb::arg("descriptor"), nb::arg("ranks"),
                  nb::arg("rank"), nb::arg("nonce"), nb::arg("entry") = 0)
      .def_prop_ro(
          "descriptor",
          [](const PyGroup& self) { return self.require_core()->group.segment().descriptor(); })
      .def_prop_ro("rank", [](const PyGroup& self) { return self.require_core()->group.rank(); })
      .def("connect",
           [](const PyGroup& self) {
             Group& group = self.require_core()->group;
             return to_python(group.connect(), group);
           })
      .def("set_tree", &set_tree, nb::arg("parents"), nb::arg("caches"))
      .def_prop_ro("has_tree",
                   [](const PyGroup& self) { return !self.require_core()->group.tree().empty(); })
      .def_prop_ro("caches",
                   [](const PyGroup& self) {
                     const auto caches = self.require_core()->group.tree().caches();
                     return std::vector<int>(caches.begin(), caches.end());
                   })
      .def("absent_ranks", &absent_ranks)
      .def(
          "pid", [](const PyGroup& self, int rank) { return self.require_core()->group.pid(rank); },
          nb::arg("rank"))
      .def(
          "wait_status",
          [](const PyGroup& self, int rank) {
            return self.require_core()->group.wait_status(rank);
          },
          nb::arg("rank"))
      .def_prop_ro("sequence",
                   [](const PyGroup& self) { return self.require_core()->group.sequence(); })
      .def(
          "ranks_behind",
          [](const PyGroup& self, int rank) {
            return self.require_core()->group.ranks_behind(rank);
          },
          nb::arg("rank"))
      .def("is_awaited",
           [](const PyGroup& self) { return self.require_core()->group.is_awaited(); })
      .def("failure",
           [](const PyGroup& self) {
             return to_python(self.require_core()->group.failure_report());
           })
      .def("abort", &abort, nb::arg("reason"))
      .def("abort_deadlock", &abort_deadlock, nb::arg("peer"), nb::arg("reason"))
      .def("fail", &fail, nb::arg("wake"), nb::arg("reason") = "")
      .def(
          "is_failing",
          [](const PyGroup& self, int rank) { return self.require_core()->group.is_failing(rank); },
          nb::arg("rank"))
      .def(
          "has_gone",
          [](const PyGroup& self, int rank) { return self.require_core()->group.has_gone(rank); },
          nb::arg("rank"))
      .def("begin_leaving", [](const PyGroup& self) { self.require_core()->group.begin_leaving(); })
      .def(
          "posts_no_more",
          [](const PyGroup& self, int rank) {
            const auto core = self.require_core();
            return core->group.is_leaving(rank) || core->group.has_gone(rank);
          },
          nb::arg("rank"))
      .def("decide", &decide, nb::arg("number"), nb::arg("rank"), nb::arg("wanted"))
      .def("decision", &decision, nb::arg("number"), nb::arg("rank"))
      .def("publish_successor", &publish_successor, nb::arg("number"), nb::arg("descriptor"),
           nb::arg("nonce"))
      .def("successor", &successor, nb::arg("number"))
      .def("flight_recorder", &flight_recorder, nb::arg("rank"), nb::arg("history"))
      .def_prop_ro(
          "identity",
          [](const PyGroup& self) { return self.require_core()->group.segment().header().nonce; })
      .def("close", &close)
      .def_prop_ro("closed", [](const PyGroup& self) { return self.core == nullptr; });
  return group;
}

}  // namespace phalanx::bindings
