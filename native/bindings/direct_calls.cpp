// Direct calls: the methods of the process group, for the operations that need no preparation.
//
// Such an operation blocks, and no observer looks at it (a dispatch mode, the profiler). Everything
// else goes to the general method of the same name, in Python.
#include <nanobind/stl/tuple.h>

#include <exception>
#include <initializer_list>

#include "direct_method.h"
#include "operations.h"
#include "prepared.h"
#include "tensor_memory.h"

namespace phalanx::bindings {
namespace {

// Whether the names are those of the only argument that an operation may have by name.
template <class Operation>
bool are_expected(PyObject* names) {
  return names == nullptr || PyTuple_Size(names) == 0 ||
         (Operation::kKeyword != nullptr && PyTuple_Size(names) == 1 &&
          PyUnicode_CompareWithASCIIString(PyTuple_GetItem(names, 0), Operation::kKeyword) == 0);
}

Py_ssize_t count_all(Py_ssize_t count, PyObject* names) {
  return count + (names == nullptr ? 0 : PyTuple_Size(names));
}

// Runs the operation if it needs no preparation. Returns its work, or null: with `refused`, the
// general method has to run it (Python's error may be set), else Python's error is set.
template <class Operation>
PyObject* call_directly(PyObject* self, PyObject* const* values, Py_ssize_t count, PyObject* names,
                        bool& refused) {
  const nb::object membership = membership_of(self);
  const OperationState* state = state_of(membership.ptr());
  const PyGroup* group = state == nullptr ? nullptr : direct_group(*state);
  if (group == nullptr || !are_expected<Operation>(names)) {
    return nullptr;
  }
  const nb::object native = state->native;  // another thread may leave the group meanwhile
  const std::shared_ptr<Core> core = group->core;
  if (!core) {
    return nullptr;
  }
  Arguments arguments(*core, values, count_all(count, names));
  Operation operation;
  if (!operation.parse(arguments) || is_observed()) {
    return nullptr;
  }
  const double seconds = operation.timeout(arguments, state->timeout);
  refused = false;
  const nb::object status = run(*group, seconds, [&](Core& core, const Bounds& bounds) {
    return operation.run(core, bounds);
  });
  if (!status.is_none()) {
    return operation.fail(self, status, Operation::kName, seconds, 0);
  }
  operation.finish(native);
  return nb::object(environment().done).release().ptr();
}

// Keeps the operation in place of running it. Returns its work, or null if it cannot be prepared.
template <class Operation>
PyObject* prepare_instead(PyObject* self, PyObject* const* values, Py_ssize_t count,
                          PyObject* names) {
  nb::object membership = membership_of(self);
  const OperationState* state = state_of(membership.ptr());
  const std::shared_ptr<Core> core = nb::inst_ptr<PyGroup>(state->native)->core;
  if (!core || !are_expected<Operation>(names)) {
    return nullptr;
  }
  Arguments arguments(*core, values, count_all(count, names), true);
  Operation operation;
  if (!operation.parse(arguments)) {
    return nullptr;
  }
  const double seconds = operation.timeout(arguments, -1);
  preparation->operation = std::make_unique<PreparedOperation<Operation>>(
      nb::borrow(self), std::move(membership), core->group.rank(), std::move(operation), seconds,
      arguments.keep());
  return nb::object(environment().done).release().ptr();
}

template <class Operation>
PyObject* call_method(PyObject* method, PyObject* const* values, std::size_t flags,
                      PyObject* names) {
  try {
    bool refused = true;
    const Py_ssize_t count = PyVectorcall_NARGS(flags);
    PyObject* work = nullptr;
    if (count == 0) {
      // Without self, which is an error.
    } else if (preparation == nullptr || preparation->site != find_call_site()) {
      work = call_directly<Operation>(values[0], values + 1, count - 1, names, refused);
      if (!refused) {
        return work;
      }
    } else {
      work = prepare_instead<Operation>(values[0], values + 1, count - 1, names);
      if (work == nullptr) {
        PyErr_Clear();
        preparation->refused = refused_call(general_method(method), values, count, names);
        work = nb::object(environment().done).release().ptr();
      }
      return work;
    }
    PyErr_Clear();
    return PyObject_Vectorcall(general_method(method), values, flags, names);
  } catch (nb::python_error& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

// Puts a direct method before the one of the class, under all its names.
template <class Operation>
void install(nb::handle group_class, std::initializer_list<const char*> method_names) {
  const nb::object method =
      make_direct_method(group_class.attr(*method_names.begin()), &call_method<Operation>);
  for (const char* name : method_names) {
    nb::setattr(group_class, name, method);
  }
}

// The same for an operation whose options are known: [class, positions of the fields].
template <class Operation>
void install(nb::handle group_class, const nb::dict& layouts,
             std::initializer_list<const char*> method_names) {
  if (!layouts.contains(Operation::kName)) {
    return;
  }
  const auto [type, timeout, async_op, root, op] =
      nb::cast<std::tuple<nb::object, int, int, int, int>>(layouts[Operation::kName]);
  Operation::layout = {.type = reinterpret_cast<PyTypeObject*>(nb::object(type).release().ptr()),
                       .timeout = timeout,
                       .async_op = async_op,
                       .root = root,
                       .op = op};
  install<Operation>(group_class, method_names);
}

void install_direct_calls(nb::handle group_class, const nb::dict& layouts) {
  install<BarrierOperation>(group_class, layouts, {"barrier"});
  install<BroadcastOperation>(group_class, layouts, {"broadcast"});
  install<AllReduceOperation>(group_class, layouts, {"allreduce"});
  install<ReduceOperation>(group_class, layouts, {"reduce"});
  install<AllGatherOperation>(group_class, layouts, {"allgather"});
  install<GatherOperation>(group_class, layouts, {"gather"});
  install<ScatterOperation>(group_class, layouts, {"scatter"});
  install<ReduceScatterOperation>(group_class, layouts, {"reduce_scatter"});
  install<AllGatherSingleOperation>(group_class, layouts, {"all_gather_single", "_allgather_base"});
  install<ReduceScatterSingleOperation>(group_class, layouts,
                                        {"reduce_scatter_single", "_reduce_scatter_base"});
  install<AllToAllSingleOperation>(group_class, layouts, {"all_to_all_single", "alltoall_base"});
  install<AllToAllOperation>(group_class, layouts, {"alltoall"});
  install<SendOperation>(group_class, {"send"});
  install<RecvOperation>(group_class, {"recv"});
}

}  // namespace

void bind_direct_calls(nb::module_& module) {
  module.def("has_field", &has_field, nb::arg("objects"), nb::arg("values"), nb::arg("position"),
             nb::arg("size"));
  module.def("set_tensor_api", &set_tensor_api, nb::arg("table"), nb::arg("types"),
             nb::arg("is_grad_enabled"));
  module.def("set_tensor_layout", &set_tensor_layout, nb::arg("layout"), nb::arg("plain"),
             nb::arg("negative"), nb::arg("conjugate"), nb::arg("graded"), nb::arg("changed"));
  module.def("install_direct_calls", &install_direct_calls, nb::arg("group_class"),
             nb::arg("layouts"));
}

}  // namespace phalanx::bindings
