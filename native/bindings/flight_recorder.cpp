#include "phalanx/flight_recorder.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>

#include "core.h"
#include "phalanx/call_site.h"
#include "phalanx/flight_recorder_reader.h"

namespace phalanx::bindings {
namespace {

// Decodes arbitrary bytes.
nb::object text(const std::string& bytes) {
  PyObject* decoded =
      PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), "replace");
  if (decoded == nullptr) {
    throw nb::python_error();
  }
  return nb::steal(decoded);
}

const char* name_of(Ending ending) {
  switch (ending) {
    case Ending::none: return "";
    case Ending::left: return "left";
    case Ending::exited: return "exited";
    case Ending::failed: return "failed";
  }
  return "";
}

Ending ending_of(std::string_view name) {
  for (const Ending ending : {Ending::left, Ending::exited, Ending::failed}) {
    if (name == name_of(ending)) {
      return ending;
    }
  }
  throw nb::value_error("unknown ending");
}

nb::dict group_to_python(const RecordedGroup& group) {
  nb::dict to;
  to["identity"] = group.identity;
  to["name"] = text(group.name);
  to["rank"] = group.rank;
  to["size"] = group.size;
  to["members"] = text(group.members);
  to["sequence"] = group.sequence;
  to["left_time"] = group.left_time;
  to["left_at"] = text(group.left_at);
  to["abort_reason"] = text(group.abort_reason);
  return to;
}

int index_of(const RecorderContents& contents, std::uint16_t id) {
  for (std::size_t index = 0; id != 0 && index < contents.groups.size(); ++index) {
    if (contents.groups[index].id == id) {
      return static_cast<int>(index);
    }
  }
  return -1;
}

nb::dict record_to_python(const RecorderContents& contents, const Record& record) {
  const bool typed =
      record.kind != Kind::barrier && record.kind != Kind::join && record.kind != Kind::plan;
  nb::dict to;
  to["number"] = record.number;
  to["kind"] = bindings::name_of(record.kind);
  to["group"] = index_of(contents, record.group);
  to["sequence"] = record.sequence;
  to["dtype"] = typed ? bindings::name_of(record.dtype) : "";
  to["count"] = record.count;
  to["op"] = record.op == ReduceOp::none ? nb::str("")
                                         : nb::str(bindings::name_of(record.op)).attr("upper")();
  to["peer"] = record.peer;
  to["site"] =
      text(record.site < contents.sites.size() ? contents.sites[record.site] : std::string());
  to["begin"] = record.begin;
  to["end"] = record.end;
  to["waited"] = record.waited;
  to["waiting_for"] = record.waiting_for;
  to["outcome"] = bindings::name_of(record.outcome);
  to["thread"] = record.thread;
  to["progress"] = record.progress;
  return to;
}

nb::list records_to_python(const RecorderContents& contents, const std::vector<Record>& records) {
  nb::list list;
  for (const Record& record : records) {
    list.append(record_to_python(contents, record));
  }
  return list;
}

using BytesOfLink = std::tuple<std::uint64_t, std::uint64_t, std::uint64_t>;

nb::dict link_to_python(const RecordedLink& link) {
  const auto numbers = [](const LinkBytes& bytes) {
    return BytesOfLink(bytes.sent, bytes.received, bytes.time);
  };
  nb::dict to;
  to["host"] = text(link.host);
  to["now"] = numbers(link.now);
  to["earlier"] = numbers(link.earlier);
  return to;
}

void record_link(int link, const BytesOfLink& now, const BytesOfLink& earlier) {
  FlightRecorder* recorder = FlightRecorder::own();
  if (recorder == nullptr || link < 0 || link >= static_cast<int>(kRecorderLinks)) {
    return;
  }
  const auto bytes = [](const BytesOfLink& numbers) {
    const auto [sent, received, time] = numbers;
    return LinkBytes{.sent = sent, .received = received, .time = time};
  };
  recorder->record_link(link, bytes(now), bytes(earlier));
}

nb::dict contents_to_python(const RecorderContents& contents) {
  nb::dict to;
  to["pid"] = contents.pid;
  to["rank"] = contents.rank;
  to["world_size"] = contents.world_size;
  to["attempt"] = contents.attempt;
  to["host"] = text(contents.host);
  to["job"] = text(contents.job);
  to["clock"] = contents.clock;
  to["opened"] = contents.opened;
  to["ending"] = name_of(contents.ending);
  to["ended"] = contents.ending_time;
  to["exception"] = text(contents.exception);
  to["note"] = text(contents.note);
  to["operations"] = contents.operations;
  to["main_thread_wait"] = contents.main_thread_wait;
  to["lone_wait"] = contents.lone_wait;
  to["torn"] = contents.torn;
  nb::list groups;
  for (const RecordedGroup& group : contents.groups) {
    groups.append(group_to_python(group));
  }
  to["groups"] = groups;
  to["open"] = records_to_python(contents, contents.open);
  to["done"] = records_to_python(contents, contents.done);
  nb::list reports;
  for (const RecordedReport& report : contents.reports) {
    reports.append(nb::make_tuple(report.time, report.step, report.loss));
  }
  to["reports"] = reports;
  nb::list links;
  for (const RecordedLink& link : contents.links) {
    links.append(link_to_python(link));
  }
  to["links"] = links;
  return to;
}

nb::dict read(const nb::bytes& data, std::size_t history) {
  const auto* begin = reinterpret_cast<const std::byte*>(data.data());
  return recorder_to_python({begin, begin + data.size()}, history);
}

void open(int descriptor, int rank, int world_size, int attempt, std::string_view host,
          std::string_view job) {
  Status status;
  auto recorder = FlightRecorder::open(
      descriptor,
      {.rank = rank, .world_size = world_size, .attempt = attempt, .host = host, .job = job},
      status);
  if (!recorder) {
    raise_system_error(status.error);
  }
  FlightRecorder::install(std::move(recorder));
}

// The record of a group that is being formed: an entry, and an operation that shows the awaited
// rank.
class GroupFormation {
 public:
  GroupFormation(std::string_view name, int rank, int size, std::string_view members) {
    if (recorder_ == nullptr) {
      return;
    }
    entry_ = recorder_->add_group(rank, size);
    if (GroupEntry* entry = recorder_->group(entry_)) {
      FlightRecorder::name_group(*entry, name, members);
    }
    mark_call_site();
    record_.begin = nanoseconds(Clock::now());
    record_.kind = Kind::join;
    record_.group = entry_;
    record_.site = current_caller().site;
    record_.thread = current_caller().thread;
    slot_ = recorder_->begin(record_);
  }

  std::uint16_t entry() const { return entry_; }

  void waiting_for(int rank) {
    record_.waiting_for = static_cast<std::int16_t>(rank);
    if (slot_ >= 0) {
      recorder_->waiting_for(slot_, record_);
    }
  }

  // A second call does nothing.
  void end(std::string_view outcome) {
    const Code code = code_of(outcome);
    if (recorder_ == nullptr || record_.end != 0) {
      return;
    }
    record_.end = nanoseconds(Clock::now());
    record_.waited = record_.waiting_for < 0 ? 0 : record_.end - record_.begin;
    record_.outcome = code;
    recorder_->end(slot_, record_);
    GroupEntry* entry = recorder_->group(entry_);
    if (code != Code::ok && entry != nullptr) {
      entry->left_time.store(record_.end, std::memory_order_relaxed);
    }
  }

 private:
  FlightRecorder* recorder_ = FlightRecorder::own();
  Record record_;
  int slot_ = -1;
  std::uint16_t entry_ = 0;
};

}  // namespace

nb::dict recorder_to_python(const std::vector<std::byte>& bytes, std::size_t history) {
  RecorderContents contents;
  if (const std::string error = parse_recorder(bytes, history, contents); !error.empty()) {
    throw nb::value_error(error.c_str());
  }
  return contents_to_python(contents);
}

void bind_flight_recorder(nb::module_& module) {
  module.def("read_flight_recorder", &read, nb::arg("data"), nb::arg("history"));
  module.def("flight_recorder_bytes", [] { return sizeof(RecorderLayout); });
  module.def("open_flight_recorder", &open, nb::arg("descriptor"), nb::arg("rank"),
             nb::arg("world_size"), nb::arg("attempt"), nb::arg("host"), nb::arg("job"));
  module.def("has_flight_recorder", [] { return FlightRecorder::own() != nullptr; });
  module.def("detach_flight_recorder", &FlightRecorder::detach);
  module.def(
      "set_main_thread_wait",
      [](std::uint64_t number) {
        if (FlightRecorder* recorder = FlightRecorder::own()) {
          recorder->set_main_thread_wait(number);
        }
      },
      nb::arg("number"));
  module.def(
      "set_lone_wait",
      [](std::uint64_t number) {
        if (FlightRecorder* recorder = FlightRecorder::own()) {
          recorder->set_lone_wait(number);
        }
      },
      nb::arg("number"));
  module.def(
      "add_link",
      [](std::string_view host) {
        FlightRecorder* recorder = FlightRecorder::own();
        return recorder == nullptr ? -1 : recorder->add_link(host);
      },
      nb::arg("host"));
  module.def("record_link", &record_link, nb::arg("link"), nb::arg("now"), nb::arg("earlier"));
  module.def(
      "report",
      [](std::int64_t step, std::optional<double> loss, std::string_view note) {
        if (FlightRecorder* recorder = FlightRecorder::own()) {
          recorder->report(step, loss, note);
        }
      },
      nb::arg("step"), nb::arg("loss").none(), nb::arg("note"));
  module.def(
      "record_ending",
      [](std::string_view ending, std::string_view exception) {
        if (FlightRecorder* recorder = FlightRecorder::own()) {
          recorder->record_ending(ending_of(ending), exception);
        }
      },
      nb::arg("ending"), nb::arg("exception"));
  nb::class_<GroupFormation>(module, "GroupFormation",
                             "The record of a group that is being formed, in the flight recorder.")
      .def(nb::init<std::string_view, int, int, std::string_view>(), nb::arg("name"),
           nb::arg("rank"), nb::arg("size"), nb::arg("members"))
      .def_prop_ro("entry", &GroupFormation::entry)
      .def("waiting_for", &GroupFormation::waiting_for, nb::arg("rank"))
      .def("end", &GroupFormation::end, nb::arg("outcome"));
}

}  // namespace phalanx::bindings
