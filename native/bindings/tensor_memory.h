// The memory of torch's tensors as objects, as far as their C table tells nothing of it.
//
// Its layout is not part of any interface, so nothing here is assumed: the position of a field is
// found once per process, by experiment, among tensors that are known to differ in it. If that
// fails, as in a later version of torch, the tensor's methods and the C table are asked instead.
#pragma once

#include <cstdint>
#include <vector>

#include "core.h"

namespace phalanx::bindings {

// Finds where tensors keep the bits of negative and conjugate views. Each list has tensors that
// differ in these only. Returns whether both were found.
bool find_view_bits(const nb::list& plain, const nb::list& negative, const nb::list& conjugate);

// Whether a tensor of a class of torch's own is a negative or conjugate view; -1: unknown.
int is_lazy_view(PyObject* tensor);

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
    const std::uint64_t* begin = nullptr;
    std::vector<std::uint64_t> values;

    bool are_current() const;
  };

  nb::object tensor_;
  nb::object storage_;
  const void* object_ = nullptr;
  Words fields_;
  Words memory_;
};

}  // namespace phalanx::bindings
