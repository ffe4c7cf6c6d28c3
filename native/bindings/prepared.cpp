#include "prepared.h"

#include <structmember.h>

#include <cstddef>
#include <exception>

#include "phalanx/call_site.h"
#include "tensor_memory.h"

namespace phalanx::bindings {

thread_local Preparation* preparation = nullptr;

std::shared_ptr<Core> Prepared::open_core() const {
  static const auto* const type = reinterpret_cast<PyTypeObject*>(nb::type<PyGroup>().ptr());
  const nb::object& native = state().native;
  return Py_TYPE(native.ptr()) == type ? nb::inst_ptr<PyGroup>(native)->core : nullptr;
}

std::shared_ptr<Core> Prepared::ready_core() const {
  return direct_group(state()) == nullptr ? nullptr : open_core();
}

int Prepared::visit(const std::function<int(PyObject*)>& visit) const {
  const int stopped = visit(group_.ptr());
  return stopped != 0 ? stopped : visit(membership_.ptr());
}

namespace {

enum class Phase : std::uint8_t { idle, running, started };

// The contents of the native class of prepared operations. Guarded by the GIL.
struct Contents {
  nb::object plain;  // the Python object with the general ways
  std::unique_ptr<Prepared> prepared;
  std::vector<TensorState> tensors;
  std::uint32_t site = 0;
  Phase phase = Phase::idle;
  MessagePtr message;  // of a message that was started
  nb::object work;     // of another operation that was started

  PyObject* run();
  PyObject* run_in_core(Core& core, bool runs_ahead);
  bool start();
  PyObject* wait();
  bool check_tensors();
  PyObject* fail(const nb::object& status, double seconds) const {
    return prepared->fail(status, seconds, site);
  }
  int visit(const std::function<int(PyObject*)>& visit) const;
};

struct Object {
  PyObject base;
  vectorcallfunc call;
  PyObject* weak_references;
  Contents* contents;
};

Object& object_of(PyObject* self) { return *reinterpret_cast<Object*>(self); }

// Null with an error if the garbage collector has taken the contents.
Contents* contents_of(PyObject* self) {
  Contents* own = object_of(self).contents;
  if (own == nullptr) {
    PyErr_SetString(PyExc_ReferenceError, "the prepared operation is being deleted");
  }
  return own;
}

PyObject* call_plain(const Contents& own, const char* method) {
  return PyObject_CallMethod(own.plain.ptr(), method, nullptr);
}

// Raises the error of a call in the wrong phase.
PyObject* refuse(const Contents& own, const char* call) {
  const char* phase = own.phase == Phase::idle      ? "idle"
                      : own.phase == Phase::running ? "running"
                                                    : "started";
  return PyObject_CallMethod(own.plain.ptr(), "refuse", "ss", call, phase);
}

// Enters a phase, and leaves it at the end of a call.
class InPhase {
 public:
  InPhase(Contents& own, Phase phase) : own_(own), before_(own.phase) { own.phase = phase; }
  ~InPhase() { own_.phase = after_.value_or(before_); }
  InPhase(const InPhase&) = delete;
  InPhase& operator=(const InPhase&) = delete;
  void end_in(Phase phase) { after_ = phase; }

 private:
  Contents& own_;
  Phase before_;
  std::optional<Phase> after_;
};

// ---- the operation ----

bool Contents::check_tensors() {
  for (const TensorState& each : tensors) {
    if (each.is_current()) {
      continue;
    }
    const nb::object checked = nb::steal(call_plain(*this, "check"));
    if (!checked.is_valid()) {
      return false;
    }
    for (TensorState& other : tensors) {
      other = TensorState(other.tensor());
    }
    break;
  }
  return true;
}

PyObject* Contents::run_in_core(Core& core, bool runs_ahead) {
  const double seconds = prepared->seconds();
  mark_call_site(site);
  Status status;
  {
    const BlockingCall call(seconds, runs_ahead);
    status = prepared->run(core, call.bounds());
  }
  if (!status.ok()) {
    return fail(to_python(status, core.group), seconds);
  }
  prepared->finish();
  return Py_NewRef(Py_None);
}

PyObject* Contents::run() {
  const std::shared_ptr<Core> core = prepared ? prepared->ready_core() : nullptr;
  if (!core || is_observed()) {
    PyErr_Clear();
    return call_plain(*this, "run");
  }
  return check_tensors() ? run_in_core(*core, true) : nullptr;
}

bool Contents::start() {
  const std::shared_ptr<Core> core = prepared ? prepared->ready_core() : nullptr;
  if (prepared && !check_tensors()) {
    return false;
  }
  if (core && !is_observed()) {
    mark_call_site(site);
    {
      const WithoutGil released;
      message = prepared->post(*core, true);
    }
    if (message) {
      const nb::object moves =
          nb::steal(message->done() ? Py_NewRef(Py_None) : call_plain(*this, "start_progress"));
      return moves.is_valid();
    }
  }
  PyErr_Clear();
  work = nb::steal(call_plain(*this, "start"));
  return work.is_valid();
}

PyObject* Contents::wait() {
  if (!message) {
    const nb::object own = std::move(work);
    return PyObject_CallMethod(plain.ptr(), "wait", "O", own.ptr());
  }
  const MessagePtr own = std::move(message);
  const double seconds = prepared->seconds();
  nb::object failure = nb::none();
  if (own->done()) {
    failure = to_python(own->failure());
  } else if (const std::shared_ptr<Core> core = prepared->open_core()) {
    Status status;
    {
      const BlockingCall call(seconds);
      status = core->mailbox.wait(*own, call.bounds());
    }
    failure = status.ok() ? nb::none() : to_python(status, core->group);
  }
  if (!failure.is_none()) {
    return fail(failure, seconds);
  }
  prepared->finish();
  return Py_NewRef(Py_None);
}

int Contents::visit(const std::function<int(PyObject*)>& visit) const {
  int stopped = visit(plain.ptr());
  if (stopped == 0 && work.is_valid()) {
    stopped = visit(work.ptr());
  }
  for (const TensorState& each : tensors) {
    stopped = stopped != 0 ? stopped : each.visit(visit);
  }
  return stopped == 0 && prepared ? prepared->visit(visit) : stopped;
}

// ---- the Python class ----

// Converts exceptions of C++ to those of Python.
template <class Action>
auto guarded(Action&& action) -> decltype(action()) {
  try {
    return action();
  } catch (nb::python_error& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return {};
}

PyObject* call(PyObject* self, PyObject* const* /*values*/, std::size_t flags, PyObject* names) {
  Contents* own = contents_of(self);
  if (own == nullptr) {
    return nullptr;
  }
  if (PyVectorcall_NARGS(flags) != 0 || (names != nullptr && PyTuple_Size(names) != 0)) {
    PyErr_SetString(PyExc_TypeError, "a prepared operation takes no arguments: they were prepared");
    return nullptr;
  }
  if (own->phase != Phase::idle) {
    return refuse(*own, "call");
  }
  const InPhase running(*own, Phase::running);
  return guarded([&] { return own->run(); });
}

PyObject* start(PyObject* self, PyObject* /*none*/) {
  Contents* own = contents_of(self);
  if (own == nullptr || own->phase != Phase::idle) {
    return own == nullptr ? nullptr : refuse(*own, "start");
  }
  InPhase running(*own, Phase::running);
  if (!guarded([&] { return own->start(); })) {
    return nullptr;
  }
  running.end_in(Phase::started);
  return Py_NewRef(Py_None);
}

PyObject* wait(PyObject* self, PyObject* /*none*/) {
  Contents* own = contents_of(self);
  if (own == nullptr || own->phase != Phase::started) {
    return own == nullptr ? nullptr : refuse(*own, "wait");
  }
  InPhase running(*own, Phase::running);
  running.end_in(Phase::idle);
  return guarded([&] { return own->wait(); });
}

// Runs the operation in the thread of its group, which has set the call site. Returns a Status.
PyObject* run_queued(PyObject* self, PyObject* seconds) {
  return guarded([&]() -> PyObject* {
    Contents* own = contents_of(self);
    if (own == nullptr) {
      return nullptr;
    }
    const std::shared_ptr<Core> core = own->prepared ? own->prepared->open_core() : nullptr;
    if (!core) {
      PyErr_SetString(PyExc_ValueError, "the group is closed");
      return nullptr;
    }
    Status status;
    {
      const BlockingCall blocking(PyFloat_AsDouble(seconds));
      status = own->prepared->run(*core, blocking.bounds());
    }
    return (status.ok() ? nb::none() : to_python(status, core->group)).release().ptr();
  });
}

PyObject* get_plain(PyObject* self, void* /*closure*/) {
  const Contents* own = contents_of(self);
  return own == nullptr ? nullptr : Py_NewRef(own->plain.ptr());
}

PyObject* is_native(PyObject* self, void* /*closure*/) {
  const Contents* own = contents_of(self);
  return own == nullptr ? nullptr : PyBool_FromLong(own->prepared ? 1 : 0);
}

PyObject* represent(PyObject* self) {
  const Contents* own = contents_of(self);
  return own == nullptr ? nullptr : PyObject_Repr(own->plain.ptr());
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  const Contents* own = object_of(self).contents;
  return own == nullptr ? 0 : own->visit([&](PyObject* object) { return visit(object, arg); });
}

// Operations that were deleted while the core moves their messages. Guarded by the GIL.
std::vector<std::unique_ptr<Contents>>& abandoned() {
  static auto* const all = new std::vector<std::unique_ptr<Contents>>;
  return *all;
}

int clear(PyObject* self) {
  std::unique_ptr<Contents> own(std::exchange(object_of(self).contents, nullptr));
  auto& others = abandoned();
  // Their deletion may run Python, so it comes when the list is consistent again.
  std::vector<std::unique_ptr<Contents>> ended;
  for (auto& each : others) {
    if (each->message->done()) {
      ended.push_back(std::move(each));
    }
  }
  std::erase(others, nullptr);
  if (own && own->message && !own->message->done()) {
    others.push_back(std::move(own));
  }
  return 0;
}

void deallocate(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  if (object_of(self).weak_references != nullptr) {
    PyObject_ClearWeakRefs(self);
  }
  clear(self);
  PyObject_GC_Del(self);
  Py_DECREF(type);
}

// The class of prepared operations; null before `make_class`.
PyTypeObject* type_of_operations = nullptr;

// Whether the interpreter is a debug build, which asserts that a class with vectorcall has its own
// `tp_call`.
bool is_debug_build() { return PySys_GetObject("gettotalrefcount") != nullptr; }

// Creates the class, derived from `base`. `base` has a `__call__` in Python, which Dynamo finds and
// traces. The interpreter does not use it: the class has a vectorcall of its own. A `tp_call` in
// the slots would put a wrapper before it that Dynamo cannot trace.
void make_class(const nb::type_object& base) {
  static PyMemberDef members[] = {
      {"__vectorcalloffset__", T_PYSSIZET, offsetof(Object, call), READONLY, nullptr},
      {"__weaklistoffset__", T_PYSSIZET, offsetof(Object, weak_references), READONLY, nullptr},
      {nullptr, 0, 0, 0, nullptr},
  };
  static PyMethodDef methods[] = {
      {"start", &start, METH_NOARGS,
       "Start the operation; its tensors must not be used before wait."},
      {"wait", &wait, METH_NOARGS, "Block until the operation that was started has ended."},
      {"run_queued", &run_queued, METH_O, "Run the operation in the group's thread."},
      {nullptr, nullptr, 0, nullptr},
  };
  static PyGetSetDef properties[] = {
      {"plain", &get_plain, nullptr, nullptr, nullptr},
      {"is_native", &is_native, nullptr, nullptr, nullptr},
      {nullptr, nullptr, nullptr, nullptr, nullptr},
  };
  PyType_Slot slots[] = {
      {Py_tp_getset, properties},
      {Py_tp_repr, reinterpret_cast<void*>(&represent)},
      {Py_tp_traverse, reinterpret_cast<void*>(&traverse)},
      {Py_tp_clear, reinterpret_cast<void*>(&clear)},
      {Py_tp_dealloc, reinterpret_cast<void*>(&deallocate)},
      {Py_tp_members, members},
      {Py_tp_methods, methods},
      {is_debug_build() ? Py_tp_call : 0, reinterpret_cast<void*>(&PyVectorcall_Call)},
      {0, nullptr},
  };
  PyType_Spec spec{
      .name = "phalanx._native.PreparedOperation",
      .basicsize = sizeof(Object),
      .itemsize = 0,
      .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL |
               Py_TPFLAGS_DISALLOW_INSTANTIATION,
      .slots = slots,
  };
  PyObject* const made = PyType_FromSpecWithBases(&spec, nb::make_tuple(base).ptr());
  if (made == nullptr) {
    throw nb::python_error();
  }
  type_of_operations = reinterpret_cast<PyTypeObject*>(made);
}

// Calls a function of torch.distributed, which prepares its operation. Returns the operation; or a
// tuple, if it cannot be prepared (see refused_call); or None, if the function has not called a
// method of a group.
nb::object prepare(nb::object plain, nb::handle function, const nb::tuple& arguments,
                   const nb::dict& options, const nb::tuple& tensors, std::uint32_t site) {
  Preparation own{.site = find_call_site(), .operation = nullptr, .refused = {}};
  Preparation* const outer = std::exchange(preparation, &own);
  const nb::object result =
      nb::steal(PyObject_Call(function.ptr(), arguments.ptr(), options.ptr()));
  preparation = outer;
  if (!result.is_valid()) {
    throw nb::python_error();
  }
  if (!own.operation) {
    return own.refused.is_valid() ? own.refused : nb::none();
  }
  return make_prepared(std::move(own.operation), std::move(plain), tensors, site);
}

// Makes an operation that does not go to the core.
nb::object wrap_plain(nb::object plain) {
  return make_prepared(nullptr, std::move(plain), nb::tuple(), 0);
}

}  // namespace

nb::object refused_call(PyObject* general, PyObject* const* values, Py_ssize_t count,
                        PyObject* names) {
  nb::list arguments;
  for (Py_ssize_t i = 0; i < count; ++i) {
    arguments.append(nb::borrow(values[i]));
  }
  nb::dict options;
  for (Py_ssize_t i = 0; names != nullptr && i < PyTuple_Size(names); ++i) {
    options[nb::borrow(PyTuple_GetItem(names, i))] = nb::borrow(values[count + i]);
  }
  return nb::make_tuple(nb::borrow(general), arguments, options);
}

nb::object make_prepared(std::unique_ptr<Prepared> prepared, nb::object plain,
                         const nb::tuple& tensors, std::uint32_t site) {
  auto own = std::make_unique<Contents>();
  own->prepared = std::move(prepared);
  own->plain = std::move(plain);
  own->site = site;
  for (const nb::handle each : tensors) {
    own->tensors.emplace_back(each);
  }
  nb::object object = nb::steal(PyType_GenericAlloc(type_of_operations, 0));
  if (!object.is_valid()) {
    throw nb::python_error();
  }
  object_of(object.ptr()).call = &call;
  object_of(object.ptr()).contents = own.release();
  return object;
}

Prepared* prepared_of(nb::handle operation) {
  const Contents* own = Py_TYPE(operation.ptr()) == type_of_operations
                            ? object_of(operation.ptr()).contents
                            : nullptr;
  return own == nullptr ? nullptr : own->prepared.get();
}

void bind_prepared(nb::module_& module) {
  module.def("make_operation_class", &make_class, nb::arg("base"));
  module.def("prepare", &prepare, nb::arg("plain"), nb::arg("function"), nb::arg("arguments"),
             nb::arg("options"), nb::arg("tensors"), nb::arg("site"));
  module.def("wrap_plain", &wrap_plain, nb::arg("plain"));
}

}  // namespace phalanx::bindings
