// The only place that converts a status of the core to a Python object.
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

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
    case Kind::plan: return "plan";
    case Kind::send: return "send";
    case Kind::recv: return "recv";
  }
  return "unknown";
}

Kind kind_of(std::string_view name) {
  for (int number = 0; number <= static_cast<int>(Kind::plan); ++number) {
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

constexpr auto kFirstWatch = std::chrono::seconds(1);
constexpr auto kRepeatedWatch = std::chrono::milliseconds(500);

void set_watcher(nb::object call) { watcher = call.release().ptr(); }

}  // namespace

void take_gil(PyThreadState* released) noexcept {
  try {
    PyEval_RestoreThread(released);
  } catch (...) {  // pthread_exit, which must not be stopped for good
    while (true) {
      pause();
    }
  }
}

thread_local BlockingCall* BlockingCall::current_ = nullptr;

BlockingCall::BlockingCall(double seconds, bool runs_ahead)
    : outer_(std::exchange(current_, this)) {
  constexpr double kEndless = 24.0 * 3600 * 365;
  if (seconds < kEndless) {
    bounds_.timeout =
        std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  }
  bounds_.interrupted = &check_signals;
  bounds_.blocks = &release;
  bounds_.runs_ahead = runs_ahead;
}

BlockingCall::~BlockingCall() {
  if (released_ != nullptr) {
    take_gil(released_);
  }
  current_ = outer_;
}

void BlockingCall::release() {
  if (current_->released_ == nullptr) {
    current_->began_ = Clock::now();
    current_->next_watch_ = kFirstWatch;
    current_->released_ = PyEval_SaveThread();
  }
}

// Calls the watcher at growing intervals, and again soon if it suspected something. Returns true if
// a signal handler has raised meanwhile: that error stands.
bool BlockingCall::watch(Clock::time_point now) {
  const Clock::duration waited = now - began_;
  if (watcher == nullptr || waited < next_watch_) {
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
  next_watch_ = soon ? waited + kRepeatedWatch : 2 * waited;
  return false;
}

bool BlockingCall::check_signals() {
  BlockingCall* const call = current_;
  release();
  take_gil(std::exchange(call->released_, nullptr));
  const bool interrupted = PyErr_CheckSignals() != 0 || call->watch(Clock::now());
  call->released_ = PyEval_SaveThread();
  return interrupted;
}

void raise_system_error(int error) {
  std::string reason = std::strerror(error);
  if (error == EFBIG) {  // nobody expects that of a limit on files
    reason += ": raise `ulimit -f`, which limits shared memory too";
  } else if (error == EMFILE) {
    reason += ": raise `ulimit -n`";
  }
  const nb::object exception = nb::handle(PyExc_OSError)(error, reason.c_str());
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception.ptr())), exception.ptr());
  throw nb::python_error();
}

nb::object to_python(const Failure& failure) {
  if (failure.status.ok()) {
    return nb::none();
  }
  if (failure.status.code == Code::interrupted && PyErr_Occurred() != nullptr) {
    throw nb::python_error();
  }
  return nb::cast(failure);
}

nb::object to_python(const Status& status, const Group& group) {
  Failure failure = group.failure_report();
  failure.status = status;
  return to_python(failure);
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
  nb::class_<Failure>(module, "Status", "The reason for the failure of an operation.")
      .def_prop_ro("code", [](const Failure& self) { return name_of(self.status.code); })
      .def_prop_ro("peer", [](const Failure& self) { return self.status.peer; })
      .def_prop_ro("reporter", [](const Failure& self) { return self.status.reporter; })
      .def_prop_ro("error", [](const Failure& self) { return self.status.error; })
      .def_ro("mine", &Failure::mine)
      .def_ro("theirs", &Failure::theirs);
}

}  // namespace phalanx::bindings
