// Prepared operations: a call of torch.distributed whose arguments are read once, and run many
// times (the persistent operations of MPI-4).
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "environment.h"
#include "phalanx/merged.h"

namespace phalanx::bindings {

// What a prepared operation does in the core.
class Prepared {
 public:
  // `seconds`: its own timeout; negative: that of the group.
  Prepared(nb::object group, nb::object membership, double seconds)
      : group_(std::move(group)), membership_(std::move(membership)), seconds_(seconds) {}
  Prepared(const Prepared&) = delete;
  Prepared& operator=(const Prepared&) = delete;
  virtual ~Prepared() = default;

  const nb::object& group() const { return group_; }
  // The native group, or what takes its place.
  nb::object native() const { return state().native; }
  double seconds() const { return seconds_ < 0 ? state().timeout : seconds_; }
  // The core, if the operation may run in the calling thread now.
  std::shared_ptr<Core> ready_core() const;
  // The core, also while other operations are queued. Null if the rank has left the group.
  std::shared_ptr<Core> open_core() const;

  virtual Status run(Core& core, const Bounds& bounds) = 0;
  // After a run.
  virtual void finish() const {}
  // Raises the error of a run that failed.
  virtual PyObject* fail(const nb::object& status, double seconds, std::uint32_t site) const = 0;
  virtual bool is_message() const { return false; }
  virtual bool is_send() const { return false; }
  // Posts a message; null for a collective. `detached`: as for Mailbox::isend.
  virtual MessagePtr post(Core&, bool /*detached*/) const { return nullptr; }
  // The operation as a part of a merged one, if it can be that.
  virtual std::optional<MergedPart> part() const { return std::nullopt; }
  // Visits the Python objects that it holds, for the garbage collector.
  virtual int visit(const std::function<int(PyObject*)>& visit) const;

 private:
  const OperationState& state() const { return *state_of(membership_.ptr()); }

  nb::object group_;
  nb::object membership_;
  double seconds_;
};

template <class Operation>
class PreparedOperation : public Prepared {
 public:
  // `kept`: objects that own the memory of the operation.
  PreparedOperation(nb::object group, nb::object membership, int rank, Operation operation,
                    double seconds, std::vector<nb::object> kept)
      : Prepared(std::move(group), std::move(membership), seconds),
        operation_(std::move(operation)),
        kept_(std::move(kept)),
        rank_(rank) {}

  Status run(Core& core, const Bounds& bounds) override { return operation_.run(core, bounds); }
  PyObject* fail(const nb::object& status, double seconds, std::uint32_t site) const override {
    return operation_.fail(group().ptr(), status, Operation::kName, seconds, site);
  }
  void finish() const override { operation_.finish(native()); }
  bool is_message() const override {
    return requires(Core& core) { operation_.post(core, true); };
  }
  bool is_send() const override {
    return requires { Operation::kSends; };
  }
  MessagePtr post(Core& core, bool detached) const override {
    if constexpr (requires { operation_.post(core, detached); }) {
      return operation_.post(core, detached);
    }
    return Prepared::post(core, detached);
  }
  std::optional<MergedPart> part() const override {
    if constexpr (requires { operation_.part(rank_); }) {
      return operation_.part(rank_);
    }
    return Prepared::part();
  }
  int visit(const std::function<int(PyObject*)>& visit) const override {
    int stopped = visit(operation_.subject.ptr());
    for (const nb::object& each : kept_) {
      stopped = stopped != 0 ? stopped : visit(each.ptr());
    }
    return stopped != 0 ? stopped : Prepared::visit(visit);
  }

 private:
  Operation operation_;
  std::vector<nb::object> kept_;
  int rank_;
};

// The preparation under way in this thread, if any: methods of groups keep their operation here,
// and do not run it.
struct Preparation {
  std::uint32_t site;  // the call site: a call from elsewhere is that of a signal handler
  std::unique_ptr<Prepared> operation;
  nb::object refused;  // a call that cannot be prepared: (general method, arguments, names)
};
extern thread_local Preparation* preparation;
// The value of `Preparation::refused` for a call of a general method.
nb::object refused_call(PyObject* general, PyObject* const* values, Py_ssize_t count,
                        PyObject* names);

// Makes a prepared operation of Python. `plain`: the object with its general ways; `tensors`: those
// that must not change; `site`: the call site of its runs.
nb::object make_prepared(std::unique_ptr<Prepared> prepared, nb::object plain,
                         const nb::tuple& tensors, std::uint32_t site);
// What a prepared operation of Python does; null if it does not go to the core.
Prepared* prepared_of(nb::handle operation);

void bind_prepared(nb::module_& module);
void bind_plan(nb::module_& module);

}  // namespace phalanx::bindings
