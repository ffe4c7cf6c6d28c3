// Common parts of the bindings.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <memory>
#include <string_view>
#include <utility>

#include "phalanx/collectives.h"
#include "phalanx/group.h"
#include "phalanx/mailbox.h"

namespace phalanx::bindings {

namespace nb = nanobind;

using Address = std::uintptr_t;

// A group and its mailbox. Blocking calls hold a reference of their own, so that close() in one
// thread does not unmap the memory under another.
struct Core {
  Core(std::unique_ptr<Segment> segment, int rank, std::uint16_t entry)
      : group(std::move(segment), rank, entry), mailbox(group) {}
  Group group;
  Mailbox mailbox;
};

// The Python class `Group`.
struct PyGroup {
  std::shared_ptr<Core> core;

  std::shared_ptr<Core> require_core() const {
    if (!core) {
      throw nb::value_error("the group is closed");
    }
    return core;
  }
};

const char* name_of(Code code);
const char* name_of(Kind kind);
// Raise ValueError for an unknown name.
Code code_of(std::string_view name);
Kind kind_of(std::string_view name);
const char* name_of(DType dtype);
const char* name_of(ReduceOp op);

// Parses the bytes of a flight recorder, see _native.pyi. Raises ValueError.
nb::dict recorder_to_python(const std::vector<std::byte>& bytes, std::size_t history);

// Returns None for ok, otherwise a Failure object; raises what a Python signal handler raised.
nb::object to_python(const Failure& failure);
// The same with the group's fingerprints.
nb::object to_python(const Status& status, const Group& group);

// Raises OSError for an errno.
[[noreturn]] void raise_system_error(int error);

// Takes the GIL for a thread that has released it. While the interpreter ends, Python (before 3.14)
// ends other threads there by unwinding their stack, for which the frames of C++ are not made: such
// a thread waits here for the end of the process.
void take_gil(PyThreadState* released) noexcept;

// Releases the GIL for the lifetime of this object.
class WithoutGil {
 public:
  WithoutGil() : released_(PyEval_SaveThread()) {}
  ~WithoutGil() { take_gil(released_); }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* released_;
};

// A call of the core that may wait for `seconds`. It begins with the GIL, and releases it until its
// end if it blocks: most small operations end earlier, and two switches take as long as one of
// them. While it waits, it checks for Python signals.
class BlockingCall {
 public:
  // `runs_ahead`: see Bounds.
  explicit BlockingCall(double seconds, bool runs_ahead = false);
  ~BlockingCall();
  BlockingCall(const BlockingCall&) = delete;
  BlockingCall& operator=(const BlockingCall&) = delete;

  const Bounds& bounds() const { return bounds_; }

 private:
  static void release();
  static bool check_signals();
  bool watch(Clock::time_point now);

  static thread_local BlockingCall* current_;

  Bounds bounds_;
  BlockingCall* outer_;  // that of this thread, if a signal handler makes a call
  PyThreadState* released_ = nullptr;
  Clock::time_point began_;
  Clock::duration next_watch_{};
};

// The number of the call site in the user's code. Requires the GIL.
std::uint32_t find_call_site();
// Sets the call site in the user's code of this thread's next operation.
void mark_call_site();
// The same for a call site that is known.
void mark_call_site(std::uint32_t site);

inline void* pointer(Address address) { return reinterpret_cast<void*>(address); }

// Addresses come from tensors that Python keeps alive for the length of the call.
inline void* const* pointers(const std::vector<Address>& addresses) {
  static_assert(sizeof(Address) == sizeof(void*));
  return reinterpret_cast<void* const*>(addresses.data());
}

// The addresses of the parts of a contiguous tensor: one per rank, of `bytes` each.
std::vector<Address> parts_of(Address whole, std::size_t bytes, int ranks);

// Runs `operation(core, bounds)`.
template <class Operation>
nb::object run(const PyGroup& self, double seconds, Operation&& operation) {
  const std::shared_ptr<Core> core = self.require_core();
  mark_call_site();
  Status status;
  {
    const BlockingCall call(seconds);
    status = operation(*core, call.bounds());
  }
  return status.ok() ? nb::none() : to_python(status, core->group);
}

void bind_status(nb::module_& module);
void bind_call_site(nb::module_& module);
void bind_flight_recorder(nb::module_& module);
void bind_reduce(nb::module_& module);
void bind_quantization(nb::module_& module);
void bind_overlap(nb::module_& module);
void bind_sealed_memory(nb::module_& module);
void bind_arena(nb::module_& module);
void bind_cow_memory(nb::module_& module);
void bind_leases(nb::module_& module);
void bind_rows(nb::module_& module);
void bind_row_gradients(nb::module_& module);
nb::class_<PyGroup> bind_group(nb::module_& module);
void bind_collectives(nb::class_<PyGroup>& group);
void bind_direct_calls(nb::module_& module);
void bind_composite(nb::class_<PyGroup>& group);
void bind_mailbox(nb::module_& module, nb::class_<PyGroup>& group);

}  // namespace phalanx::bindings
