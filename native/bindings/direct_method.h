// A method of a Python class, as a native function before a general method in Python.
//
// Torch's C++ calls the methods of a group in Python, but takes a builtin function for its own
// method, which it does not call. So these methods have a type of their own.
#pragma once

#include "core.h"

namespace phalanx::bindings {

// Returns a method that calls `call`, with the arguments of Python's vectorcall: self is the first,
// and `method` the object returned here. It has the name and the documentation of `general`.
nb::object make_direct_method(nb::object general, vectorcallfunc call);

// The general method, borrowed.
PyObject* general_method(PyObject* method);

}  // namespace phalanx::bindings
