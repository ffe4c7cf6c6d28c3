#include "direct_method.h"

#include <structmember.h>

#include <cstddef>

namespace phalanx::bindings {
namespace {

struct DirectMethod {
  PyObject base;
  vectorcallfunc call;
  PyObject* general;
  PyObject* name;
  PyObject* doc;
};

// Binds the method to an object, as a function in Python does.
PyObject* bind(PyObject* method, PyObject* object, PyObject* /*type*/) {
  static PyObject* const bound_method =
      nb::object(nb::module_::import_("types").attr("MethodType")).release().ptr();
  return object == nullptr ? Py_NewRef(method)
                           : PyObject_CallFunctionObjArgs(bound_method, method, object, nullptr);
}

PyTypeObject* direct_method_type() {
  static PyMemberDef members[] = {
      {"__vectorcalloffset__", T_PYSSIZET, offsetof(DirectMethod, call), READONLY, nullptr},
      {"__wrapped__", T_OBJECT, offsetof(DirectMethod, general), READONLY, nullptr},
      {"__name__", T_OBJECT, offsetof(DirectMethod, name), READONLY, nullptr},
      {"__doc__", T_OBJECT, offsetof(DirectMethod, doc), READONLY, nullptr},
      {nullptr, 0, 0, 0, nullptr},
  };
  static PyType_Slot slots[] = {
      {Py_tp_call, reinterpret_cast<void*>(&PyVectorcall_Call)},
      {Py_tp_descr_get, reinterpret_cast<void*>(&bind)},
      {Py_tp_members, members},
      {0, nullptr},
  };
  static PyType_Spec spec{
      .name = "phalanx._native.DirectMethod",
      .basicsize = sizeof(DirectMethod),
      .itemsize = 0,
      .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR,
      .slots = slots,
  };
  static auto* const type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  if (type == nullptr) {
    throw nb::python_error();
  }
  return type;
}

}  // namespace

nb::object make_direct_method(nb::object general, vectorcallfunc call) {
  nb::object object = nb::steal(PyType_GenericAlloc(direct_method_type(), 0));
  if (!object.is_valid()) {
    throw nb::python_error();
  }
  auto* method = reinterpret_cast<DirectMethod*>(object.ptr());
  method->call = call;
  method->name = nb::object(general.attr("__name__")).release().ptr();
  method->doc = nb::object(general.attr("__doc__")).release().ptr();
  method->general = general.release().ptr();
  return object;
}

PyObject* general_method(PyObject* method) {
  return reinterpret_cast<DirectMethod*>(method)->general;
}

}  // namespace phalanx::bindings
