// The memory of torch's tensors as objects, as far as their C table tells nothing of it.
//
// Its layout is not part of any interface: it comes from a table by version of torch, and is
// confirmed with tensors that differ in each field. If that fails, there are no direct calls.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "foreign_memory.h"

namespace phalanx::bindings {

// Counts the changes of the memory of a tensor and all its views. By it, autograd finds out that a
// tensor which it has saved for the backward pass was changed since.
using VersionCounter = std::atomic<std::uint32_t>;
static_assert(VersionCounter::is_always_lock_free);

// Sets the layout of tensors: the positions of fields in bytes, and sizes, by their names in the
// table. Returns whether tensors have it; the functions below require that. The first three lists
// have tensors that differ in the bits of views only; those of `graded` require gradients;
// `changed` has tensors with many different versions, which do not.
bool set_tensor_layout(const nb::dict& layout, const nb::list& plain, const nb::list& negative,
                       const nb::list& conjugate, const nb::list& graded, const nb::list& changed);

// Whether a tensor of a class of torch's own is a negative or conjugate view.
bool is_lazy_view(PyObject* tensor);
// False if a tensor certainly requires no gradients.
bool may_require_grad(PyObject* tensor);
// The counter of a tensor, which keeps it alive; null for an inference tensor, which has none.
VersionCounter* version_counter(PyObject* tensor);

// A tensor's state at one time, to find out whether it has the same memory, shape and type later.
class TensorState {
 public:
  TensorState() = default;
  // Keeps the tensor and its storage alive.
  explicit TensorState(nb::handle tensor);

  // Whether the tensor has not changed. If this is false, it may not have changed either.
  bool is_current() const;
  nb::handle tensor() const { return tensor_; }
  // Visits the objects that it holds, for the garbage collector.
  template <class Visit>
  int visit(Visit&& visit) const {
    const int stopped = visit(tensor_.ptr());
    return stopped != 0 ? stopped : visit(storage_.ptr());
  }

 private:
  struct Words {
    const std::byte* begin = nullptr;
    std::vector<std::byte> values;

    bool are_current() const;
  };

  nb::object tensor_;
  nb::object storage_;
  const void* object_ = nullptr;
  Words fields_;
  Words memory_;
};

}  // namespace phalanx::bindings
