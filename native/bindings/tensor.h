// Tensors of torch, read through the C table that torch publishes for other libraries (DLPack's
// exchange API, https://dmlc.github.io/dlpack/latest/c_api.html), so that nothing links to torch.
#pragma once

#include <cstddef>

#include "core.h"

namespace phalanx::bindings {

// A contiguous tensor in host memory. Valid while the caller keeps the tensor alive, and holds the
// GIL or forbids the user to resize it.
struct Operand {
  Address address = 0;
  std::size_t count = 0;
  std::size_t rows = 0;  // the extent of the first dimension; 1 without dimensions
  DType dtype{};

  std::size_t bytes() const { return count * size_of(dtype); }
  // Whether the rows can be shared equally.
  bool has_rows_for(std::size_t ranks) const { return rows % ranks == 0; }
};

// Sets torch's table, `torch.Tensor.__dlpack_c_exchange_api__`, and the classes and functions of
// torch that its tensors are checked with. Returns false if the table has another version.
bool set_tensor_api(nb::handle capsule, const nb::tuple& types, nb::handle is_grad_enabled);

// Reads a tensor that the core can use as it is. Returns false for all others: other layouts,
// devices, dtypes and classes, tensors with gaps, and views that negate or conjugate. Python's
// error indicator may then be set. Requires the GIL.
bool read_tensor(PyObject* tensor, Operand& operand);

// Whether autograd follows what happens to a tensor in this thread.
bool is_followed(PyObject* tensor);

}  // namespace phalanx::bindings
