// The state of groups, and the objects of Python, that direct calls and prepared operations use.
#pragma once

#include <array>
#include <utility>

#include "core.h"

namespace phalanx::bindings {

// The Python class `OperationState`, the base of a membership.
struct OperationState {
  nb::object native;      // the `Group`, or what takes its place
  double timeout;         // in seconds
  int pending = 0;        // operations queued in the group's thread
  bool is_direct = true;  // false: all operations use the general methods
};

// The state of a process group of Python; a null object if it is of another class.
nb::object membership_of(PyObject* group);
// The rest of a membership; null for another object.
const OperationState* state_of(PyObject* membership);
// The native group, if an operation may go directly to it now: ranks are on one host, and no
// operations are queued. Null otherwise.
const PyGroup* direct_group(const OperationState& state);

// Set once, guarded by the GIL.
struct Environment {
  // Names in modules of torch whose values are False unless something observes operations in some
  // thread, and functions without arguments whose result is false if nothing does in this one.
  std::vector<std::pair<nb::dict, nb::str>> observer_flags;
  std::vector<nb::object> observers;
  std::array<std::int8_t, 16> ops{};  // by torch's number of the operator; -1: none
  nb::object done;                    // the work of an operation that has ended
  std::vector<nb::object> blocking;   // the code of the functions that wait for their message
  nb::object check_unexpected;        // looks at the memory of unexpected messages
  nb::object fail_collective;
  nb::object fail_message;
};
Environment& environment();

// Whether a dispatch mode or the profiler observes the operations of this thread.
bool is_observed();

void bind_environment(nb::module_& module);

}  // namespace phalanx::bindings
