// Plans: several prepared operations in one call.
#include <algorithm>

#include "prepared.h"

namespace phalanx::bindings {
namespace {

// Some operations in a row: collectives with one meeting, messages that move at the same time, or
// one operation.
struct Step {
  explicit Step(int ranks) : merged(ranks) {}

  MergedCollectives merged;
  std::vector<Prepared*> operations;
  bool are_messages = false;

  // Sends come before recvs: a rank that took the message of its peer first would keep the peer
  // waiting for its own.
  void join(Prepared& operation) {
    const auto recv = std::ranges::find_if(
        operations, [](const Prepared* each) { return each->is_message() && !each->is_send(); });
    operations.insert(operation.is_send() ? recv : operations.end(), &operation);
  }

  Status run(Core& core, const Bounds& bounds) {
    if (merged.size() > 1) {
      return merged.run(core.group, bounds);
    }
    return are_messages ? exchange(core, bounds) : operations[0]->run(core, bounds);
  }

 private:
  Status exchange(Core& core, const Bounds& bounds) {
    bounds.block();
    std::vector<MessagePtr> messages;
    for (Prepared* each : operations) {
      messages.push_back(each->post(core, false));
    }
    Status status;
    for (std::size_t i = 0; status.ok() && i < messages.size(); ++i) {
      status = core.mailbox.wait(*messages[i], bounds);
    }
    return status;
  }
};

class Plan : public Prepared {
 public:
  Plan(nb::object group, nb::object membership, int ranks, std::vector<nb::object> operations)
      : Prepared(std::move(group), std::move(membership), -1), kept_(std::move(operations)) {
    for (const nb::object& each : kept_) {
      add(*prepared_of(each), ranks);
    }
  }

  Status run(Core& core, const Bounds& bounds) override {
    for (Step& step : steps_) {
      if (const Status status = step.run(core, bounds); !status.ok()) {
        failed_ = &step;
        return status;
      }
    }
    return {};
  }
  void finish() const override {
    for (const nb::object& each : kept_) {
      prepared_of(each)->finish();
    }
  }
  PyObject* fail(const nb::object& status, double seconds, std::uint32_t site) const override {
    if (failed_->operations.size() == 1) {
      return failed_->operations[0]->fail(status, seconds, site);
    }
    return PyObject_CallFunction(environment().fail_collective.ptr(), "OOsOiidI", group().ptr(),
                                 status.ptr(), "plan", Py_None, 0, -1, seconds, site);
  }
  int visit(const std::function<int(PyObject*)>& visit) const override {
    int stopped = 0;
    for (const nb::object& each : kept_) {
      stopped = stopped != 0 ? stopped : visit(each.ptr());
    }
    return stopped != 0 ? stopped : Prepared::visit(visit);
  }
  std::vector<std::size_t> sizes() const {
    std::vector<std::size_t> all;
    for (const Step& step : steps_) {
      all.push_back(step.operations.size());
    }
    return all;
  }

 private:
  void add(Prepared& operation, int ranks) {
    std::optional<MergedPart> part = operation.part();
    const bool is_message = !part && operation.is_message();
    if (!steps_.empty()) {
      Step& last = steps_.back();
      const bool joins = is_message ? last.are_messages
                                    : part && last.merged.size() != 0 && last.merged.add(*part);
      if (joins) {
        last.join(operation);
        return;
      }
    }
    Step step(ranks);
    step.operations = {&operation};
    step.are_messages = is_message;
    if (part) {
      (void)step.merged.add(std::move(*part));
    }
    steps_.push_back(std::move(step));
  }

  std::vector<nb::object> kept_;
  std::vector<Step> steps_;
  const Step* failed_ = nullptr;
};

// Returns the plan, and the number of operations in each of its steps.
nb::object make_plan(nb::object plain, nb::object group, nb::object membership, int ranks,
                     const nb::list& operations, const nb::tuple& tensors, std::uint32_t site) {
  std::vector<nb::object> kept;
  for (const nb::handle each : operations) {
    kept.push_back(nb::borrow(each));
  }
  auto plan =
      std::make_unique<Plan>(std::move(group), std::move(membership), ranks, std::move(kept));
  const std::vector<std::size_t> sizes = plan->sizes();
  nb::object object = make_prepared(std::move(plan), std::move(plain), tensors, site);
  return nb::make_tuple(object, sizes);
}

}  // namespace

void bind_plan(nb::module_& module) {
  module.def("make_plan", &make_plan, nb::arg("plain"), nb::arg("group"), nb::arg("membership"),
             nb::arg("ranks"), nb::arg("operations"), nb::arg("tensors"), nb::arg("site"));
}

}  // namespace phalanx::bindings
