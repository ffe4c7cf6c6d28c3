// The only place that converts a status of the core to a Python object.
#include "core.h"

namespace phalanx::bindings {
const char* name_of(Code code) {
  switch (code) {
    case Code::ok: return "ok";
    case Code::peer_lost: return "peer_lost";
    case Code::mismatch: return "mismatch";
    case Code::timeout: return "timeout";
    case Code::aborted: return "aborted";
    case Code::interrupted: return "interrupted";
    case Code::out_of_memory: return "out_of_memory";
    case Code::system: return "system";
    case Code::left: return "left";
    case Code::deadlock: return "deadlock";
  }
  return "unknown";
}

const char* name_of(Kind kind) {
  switch (kind) {
    case Kind::none: return "none";
    case Kind::barrier: return "barrier";
    case Kind::broadcast: return "broadcast";
    case Kind::reduce: return "reduce";
    case Kind::all_reduce: return "all_reduce";
    case Kind::gather: return "gather";
    case Kind::scatter: return "scatter";
    case Kind::all_gather: return "all_gather";
    case Kind::reduce_scatter: return "reduce_scatter";
    case Kind::all_to_all: return "all_to_all";
    case Kind::join: return "join";
    case Kind::send: return "send";
    case Kind::recv: return "recv";
  }
  return "unknown";
}

Kind kind_of(std::string_view name) {
  for (int number = 0; number <= static_cast<int>(Kind::join); ++number) {
    if (name == name_of(static_cast<Kind>(number))) {
      return static_cast<Kind>(number);
    }
  }
  throw nb::value_error("unknown operation");
}

Code code_of(std::string_view name) {
  for (int number = 0; number <= static_cast<int>(Code::deadlock); ++number) {
    if (name == name_of(static_cast<Code>(number))) {
      return static_cast<Code>(number);
    }
  }
  throw nb::value_error("unknown outcome");
}

namespace {

// The function called in a thread that has waited for long; see set_watcher. Guarded by the GIL.
PyObject* watcher = nullptr;

// The begin of this thread's operation, and the waiting time after which the watcher is called
// next.
struct Wait {
  Clock::time_point began;
  Clock::duration next_call;
};
thread_local Wait current_wait;
constexpr auto kFirstCall = std::chrono::seconds(1);
constexpr auto kRepeatedCall = std::chrono::milliseconds(500);

// Calls the watcher at growing intervals, and again soon if it suspected something. Returns true if
// a signal handler has raised meanwhile: that error stands.
bool watch(Clock::time_point now) {
  const Clock::duration waited = now - current_wait.began;
  if (watcher == nullptr || waited < current_wait.next_call) {
    return false;
  }
  const nb::object suspected = nb::steal(PyObject_CallNoArgs(watcher));
  if (!suspected.is_valid()) {
    if (PyErr_ExceptionMatches(PyExc_Exception) == 0) {
      return true;  // KeyboardInterrupt, SystemExit
    }
    PyErr_WriteUnraisable(watcher);
  }
  const bool soon = suspected.is_valid() && suspected.is(nb::bool_(true));
  current_wait.next_call = soon ? waited + kRepeatedCall : 2 * waited;
  return false;
}

bool python_signals() {
  const nb::gil_scoped_acquire acquire;
  if (PyErr_CheckSignals() != 0) {
    return true;
  }
  return watch(Clock::now());
}

void set_watcher(nb::object call) { watcher = call.release().ptr(); }

}  // namespace

Bounds bounds_for(double seconds) {
  const auto now = Clock::now();
  const std::chrono::duration<double> span(seconds);
  current_wait = {.began = now, .next_call = kFirstCall};
  const bool endless = span >= std::chrono::hours(24 * 365);
  return {.deadline = endless ? Clock::time_point::max()
                              : now + std::chrono::duration_cast<Clock::duration>(span),
          .begin = now,
          .interrupted = python_signals};
}

void raise_system_error(int error) {
  errno = error;
  PyErr_SetFromErrno(PyExc_OSError);
  throw nb::python_error();
}

nb::object to_python(const Status& status) {
  if (status.ok()) {
    return nb::none();
  }
  if (status.code == Code::interrupted && PyErr_Occurred() != nullptr) {
    throw nb::python_error();
  }
  return nb::cast(status);
}

void bind_status(nb::module_& module) {
  module.def("set_watcher", &set_watcher, nb::arg("call"));
  nb::class_<Fingerprint>(module, "Fingerprint",
                          "The operation that a rank was in, as it published it.")
      .def_ro("sequence", &Fingerprint::sequence)
      .def_ro("count", &Fingerprint::count)
      .def_ro("root", &Fingerprint::root)
      .def_prop_ro("kind", [](const Fingerprint& self) { return name_of(self.kind); })
      .def_prop_ro("dtype", [](const Fingerprint& self) { return static_cast<int>(self.dtype); })
      .def_prop_ro("op", [](const Fingerprint& self) { return static_cast<int>(self.op); });
  nb::class_<Status>(module, "Status", "The reason for the failure of an operation.")
      .def_prop_ro("code", [](const Status& self) { return name_of(self.code); })
      .def_ro("peer", &Status::peer)
      .def_ro("reporter", &Status::reporter)
      .def_ro("error", &Status::error)
      .def_ro("mine", &Status::mine)
      .def_ro("theirs", &Status::theirs);
}

}  // namespace phalanx::bindings
