// The options objects of torch.distributed, read where they lie in memory.
//
// Their attributes are properties in C++, and reading three of them costs three times as much as an
// all-reduce of a few bytes. So the position of each field is found once per process, by
// experiment: objects are made with known values, and the field is at the only position at which
// the memory of all of them shows these values. A class for which that fails has no direct calls.
#pragma once

#include <cstdint>

#include "core.h"

namespace phalanx::bindings {

// The positions of the fields of a class, in bytes; -1 for a field that it lacks.
struct OptionsLayout {
  PyTypeObject* type = nullptr;  // null: unknown
  int timeout = -1;              // int64, in milliseconds; zero or less: unset
  int async_op = -1;             // one byte
  int root = -1;                 // int64
  int op = -1;                   // one byte: torch's number of the operator
};

// The memory of an object of a class bound by pybind11; null if it was not initialized.
inline const std::byte* memory_of(PyObject* object) {
  // After the header of every Python object, an instance of pybind11 holds the pointer to its
  // value.
  return *reinterpret_cast<const std::byte* const*>(reinterpret_cast<const std::byte*>(object) +
                                                    sizeof(PyObject));
}

template <class Number>
Number field_at(const std::byte* memory, int position) {
  Number value;
  __builtin_memcpy(&value, memory + position, sizeof value);
  return value;
}

// Returns the position of the field of `size` bytes (1 or 8) that has `values` in `objects`, all of
// one class bound by pybind11; -1 if there is not exactly one.
int find_field(const nb::list& objects, const std::vector<std::int64_t>& values, int size);

}  // namespace phalanx::bindings
