#include "environment.h"

#include <algorithm>

namespace phalanx::bindings {

Environment& environment() {
  // Never destroyed: it holds Python objects, and the interpreter ends before static objects do.
  static Environment* const only = new Environment;
  return *only;
}

nb::object membership_of(PyObject* group) {
  static PyObject* const name = PyUnicode_InternFromString("_membership");
  return nb::steal(PyObject_GetAttr(group, name));
}

const OperationState* state_of(PyObject* membership) {
  static const PyTypeObject* known = nullptr;  // the class of memberships
  if (membership == nullptr) {
    return nullptr;
  }
  if (Py_TYPE(membership) != known) {
    if (!nb::isinstance<OperationState>(membership)) {
      return nullptr;
    }
    known = Py_TYPE(membership);
  }
  return nb::inst_ptr<OperationState>(membership);
}

const PyGroup* direct_group(const OperationState& state) {
  static const auto* const type = reinterpret_cast<PyTypeObject*>(nb::type<PyGroup>().ptr());
  const bool is_direct =
      state.is_direct && state.pending == 0 && Py_TYPE(state.native.ptr()) == type;
  return is_direct ? nb::inst_ptr<PyGroup>(state.native) : nullptr;
}

bool is_observed() {
  const auto& flags = environment().observer_flags;
  const bool none = !flags.empty() && std::ranges::all_of(flags, [](const auto& flag) {
    return PyDict_GetItem(flag.first.ptr(), flag.second.ptr()) == Py_False;
  });
  return !none && std::ranges::any_of(environment().observers, [](const nb::object& count) {
    const nb::object answer = nb::steal(PyObject_CallNoArgs(count.ptr()));
    return !answer.is_valid() || PyObject_IsTrue(answer.ptr()) != 0;
  });
}

namespace {

void set_environment(const nb::list& observer_flags, const nb::list& observers,
                     const std::vector<int>& ops, nb::object done, const nb::list& blocking,
                     nb::object check_unexpected, nb::object fail_collective,
                     nb::object fail_message) {
  Environment& all = environment();
  for (const nb::handle each : observer_flags) {
    PyObject* name = PyUnicode_InternFromString(nb::cast<nb::str>(each[1]).c_str());
    all.observer_flags.emplace_back(nb::cast<nb::dict>(each[0].attr("__dict__")),
                                    nb::steal<nb::str>(name));
  }
  for (const nb::handle each : observers) {
    all.observers.push_back(nb::borrow(each));
  }
  for (const nb::handle each : blocking) {
    all.blocking.push_back(nb::borrow(each));
  }
  all.ops.fill(-1);
  for (std::size_t i = 0; i < std::min(ops.size(), all.ops.size()); ++i) {
    all.ops[i] = static_cast<std::int8_t>(ops[i]);
  }
  all.done = std::move(done);
  all.check_unexpected = std::move(check_unexpected);
  all.fail_collective = std::move(fail_collective);
  all.fail_message = std::move(fail_message);
}

}  // namespace

void bind_environment(nb::module_& module) {
  nb::class_<OperationState>(module, "OperationState", "The state that direct calls need.")
      .def(nb::init<nb::object, double>(), nb::arg("native"), nb::arg("timeout"))
      .def_rw("native", &OperationState::native)
      .def_rw("timeout", &OperationState::timeout)
      .def_rw("pending", &OperationState::pending)
      .def_rw("is_direct", &OperationState::is_direct);
  module.def("set_direct_call_environment", &set_environment, nb::arg("observer_flags"),
             nb::arg("observers"), nb::arg("ops"), nb::arg("done"), nb::arg("blocking"),
             nb::arg("check_unexpected"), nb::arg("fail_collective"), nb::arg("fail_message"));
}

}  // namespace phalanx::bindings
