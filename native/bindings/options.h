// The options objects of torch.distributed, read where they lie in memory.
//
// Their attributes are properties in C++, and reading three of them costs three times as much as an
// all-reduce of a few bytes. The positions of their fields are in a table (torch_layouts.py), and
// are confirmed with objects that have known values. A class for which that fails has no direct
// calls.
#pragma once

#include <cstdint>

#include "foreign_memory.h"

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

// Whether the field of `size` bytes (1 or 8) at a position has these values in `objects`, which are
// of one class bound by pybind11.
bool has_field(const nb::list& objects, const std::vector<std::int64_t>& values, int position,
               int size);

}  // namespace phalanx::bindings
