// Direct calls: the methods of the process group, for the operations that need no preparation.
//
// Such an operation blocks, and has plain tensors, torch's own options and no observer (a dispatch
// mode, the profiler, queued operations before it). Everything else goes to the general method of
// the same name, in Python: other tensors and options, and arguments that are wrong, for which it
// has the errors. So a method here refuses whatever it does not fully understand.
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <array>
#include <exception>
#include <optional>

#include "core.h"
#include "direct_method.h"
#include "frames.h"
#include "options.h"
#include "overlap.h"
#include "tensor.h"
#include "tensor_memory.h"

namespace phalanx::bindings {
namespace {

// The Python class `OperationState`, the base of a membership: what direct calls need of it.
struct OperationState {
  nb::object native;      // the `Group`, or what takes its place
  double timeout;         // in seconds
  int pending = 0;        // operations queued in the group's thread
  bool is_direct = true;  // false: all operations use the general methods
};

// The objects of Python that direct calls use; set once, guarded by the GIL.
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

Environment& environment() {
  static Environment* const only = new Environment;  // it holds Python objects, see codes()
  return *only;
}

// The arguments of a method. Each function returns false if the argument is not of the plain kind.
// Keeps the tensors of lists alive, which another thread may change while an operation runs.
class Arguments {
 public:
  Arguments(const Core& core, PyObject* const* values, Py_ssize_t count)
      : core_(core), values_(values), count_(count) {}

  bool count_is(Py_ssize_t count) const { return count_ == count; }
  PyObject* operator[](int index) const { return values_[index]; }
  int ranks() const { return core_.group.ranks(); }
  int rank() const { return core_.group.rank(); }

  bool tensor(int index, Operand& operand) const { return read_tensor(values_[index], operand); }

  // A list of one element.
  bool single(int index, nb::object& element) const {
    PyObject* list = values_[index];
    if (PyList_CheckExact(list) == 0 || PyList_Size(list) != 1) {
      return false;
    }
    element = nb::borrow(PyList_GetItem(list, 0));
    return true;
  }
  bool single_tensor(int index, nb::object& tensor, Operand& operand) const {
    return single(index, tensor) && read_tensor(tensor.ptr(), operand);
  }

  // A list with a tensor of `dtype` for every rank; if `dtype` is unknown, that of the first.
  bool tensors(PyObject* list, std::optional<DType>& dtype, std::vector<Address>& addresses,
               std::vector<std::uint64_t>& counts) {
    if (PyList_CheckExact(list) == 0 || PyList_Size(list) != ranks()) {
      return false;
    }
    for (int rank = 0; rank < ranks(); ++rank) {
      Operand operand;
      kept_.push_back(nb::borrow(PyList_GetItem(list, rank)));
      if (!read_tensor(kept_.back().ptr(), operand) ||
          operand.dtype != dtype.value_or(operand.dtype)) {
        return false;
      }
      dtype = operand.dtype;
      addresses.push_back(operand.address);
      counts.push_back(operand.count);
    }
    return true;
  }

  // A list of one list with a tensor like `like` for every rank.
  bool tensor_per_rank(int index, const Operand& like, std::vector<Address>& addresses) {
    nb::object list;
    std::optional<DType> dtype = like.dtype;
    std::vector<std::uint64_t> counts;
    return single(index, list) && tensors(list.ptr(), dtype, addresses, counts) &&
           std::ranges::all_of(counts, [&](std::uint64_t count) { return count == like.count; });
  }

  // Options of a blocking operation of the class that the layout describes.
  bool options(int index, const OptionsLayout& layout) {
    if (Py_TYPE(values_[index]) != layout.type) {
      return false;
    }
    memory_ = memory_of(values_[index]);
    layout_ = &layout;
    return memory_ != nullptr && field_at<std::uint8_t>(memory_, layout.async_op) == 0;
  }
  // The rest is of the options. The timeout in seconds, or `unset`:
  double timeout(double unset) const {
    const auto milliseconds = field_at<std::int64_t>(memory_, layout_->timeout);
    return milliseconds > 0 ? static_cast<double>(milliseconds) / 1000 : unset;
  }
  bool root(int& root) const {
    const auto value = field_at<std::int64_t>(memory_, layout_->root);
    root = static_cast<int>(value);
    return value >= 0 && value < ranks();
  }
  // The operator, if the core has it for `dtype`.
  bool reduction(DType dtype, ReduceOp& op) const {
    const auto number = field_at<std::uint8_t>(memory_, layout_->op);
    const auto& ops = environment().ops;
    if (number >= ops.size() || ops[number] < 0) {
      return false;
    }
    op = static_cast<ReduceOp>(ops[number]);
    return supports(dtype, op);
  }

  // An integer from 0 to `end` - 1.
  static bool integer(PyObject* object, long end, int& result) {
    if (object == nullptr || PyLong_CheckExact(object) == 0) {
      return false;
    }
    const long value = PyLong_AsLong(object);
    result = static_cast<int>(value);
    return value >= 0 && value < end;  // -1 if it does not fit
  }

 private:
  const Core& core_;
  PyObject* const* values_;
  Py_ssize_t count_;
  const std::byte* memory_ = nullptr;  // of the options
  const OptionsLayout* layout_ = nullptr;
  std::vector<nb::object> kept_;
};

// The operations. Each parses the arguments of its method, and calls the core. `subject` is the
// tensor that stands for the operation in errors.

struct Collective {
  // The only argument that torch passes by its name; null if there is none.
  static constexpr const char* kKeyword = nullptr;
  nb::object subject = nb::none();
  ReduceOp op = ReduceOp::none;
  int root = -1;

  static double timeout(const Arguments& arguments, double unset) {
    return arguments.timeout(unset);
  }
  PyObject* fail(PyObject* group, const nb::object& status, const char* name,
                 double timeout) const {
    return PyObject_CallFunction(environment().fail_collective.ptr(), "OOsOiid", group,
                                 status.ptr(), name, subject.ptr(), static_cast<int>(op), root,
                                 timeout);
  }
};

struct Barrier : Collective {
  static constexpr const char* kName = "barrier";
  static inline OptionsLayout layout;
  static constexpr const char* kKeyword = "opts";

  bool parse(Arguments& arguments) { return arguments.count_is(1) && arguments.options(0, layout); }
  Status run(Core& core, const Bounds& bounds) const { return barrier(core.group, bounds); }
};

struct Broadcast : Collective {
  static constexpr const char* kName = "broadcast";
  static inline OptionsLayout layout;
  Operand data;

  bool parse(Arguments& arguments) {
    return arguments.count_is(2) && arguments.options(1, layout) &&
           arguments.single_tensor(0, subject, data) && arguments.root(root);
  }
  Status run(Core& core, const Bounds& bounds) const {
    return broadcast(core.group, pointer(data.address), data.count, data.dtype, root, bounds);
  }
};

struct AllReduce : Collective {
  static constexpr const char* kName = "all_reduce";
  static inline OptionsLayout layout;
  Operand data;

  bool parse(Arguments& arguments) {
    return arguments.count_is(2) && arguments.options(1, layout) &&
           arguments.single_tensor(0, subject, data) && arguments.reduction(data.dtype, op);
  }
  Status run(Core& core, const Bounds& bounds) const {
    return all_reduce(core.group, pointer(data.address), data.count, data.dtype, op, bounds);
  }
};

struct Reduce : Collective {
  static constexpr const char* kName = "reduce";
  static inline OptionsLayout layout;
  Operand data;

  bool parse(Arguments& arguments) {
    return arguments.count_is(2) && arguments.options(1, layout) &&
           arguments.single_tensor(0, subject, data) && arguments.root(root) &&
           arguments.reduction(data.dtype, op);
  }
  Status run(Core& core, const Bounds& bounds) const {
    return reduce(core.group, pointer(data.address), data.count, data.dtype, op, root, bounds);
  }
};

struct AllGather : Collective {
  static constexpr const char* kName = "all_gather";
  static inline OptionsLayout layout;
  Operand input;
  std::vector<Address> outputs;

  bool parse(Arguments& arguments) {
    return arguments.count_is(3) && arguments.options(2, layout) &&
           arguments.single_tensor(1, subject, input) &&
           arguments.tensor_per_rank(0, input, outputs) &&
           !is_misplaced(input.address, outputs, input.bytes(), arguments.rank());
  }
  Status run(Core& core, const Bounds& bounds) const {
    return all_gather(core.group, pointer(input.address), pointers(outputs), input.count,
                      input.dtype, bounds);
  }
};

struct Gather : Collective {
  static constexpr const char* kName = "gather";
  static inline OptionsLayout layout;
  Operand input;
  std::vector<Address> outputs;

  bool parse(Arguments& arguments) {
    return arguments.count_is(3) && arguments.options(2, layout) && arguments.root(root) &&
           arguments.single_tensor(1, subject, input) &&
           (root != arguments.rank() ||
            (arguments.tensor_per_rank(0, input, outputs) &&
             !is_misplaced(input.address, outputs, input.bytes(), root)));
  }
  Status run(Core& core, const Bounds& bounds) const {
    return gather(core.group, pointer(input.address), pointers(outputs), input.count, input.dtype,
                  root, bounds);
  }
};

struct Scatter : Collective {
  static constexpr const char* kName = "scatter";
  static inline OptionsLayout layout;
  Operand output;
  std::vector<Address> inputs;

  bool parse(Arguments& arguments) {
    return arguments.count_is(3) && arguments.options(2, layout) && arguments.root(root) &&
           arguments.single_tensor(0, subject, output) &&
           (root != arguments.rank() ||
            (arguments.tensor_per_rank(1, output, inputs) &&
             !is_misplaced(output.address, inputs, output.bytes(), root)));
  }
  Status run(Core& core, const Bounds& bounds) const {
    return scatter(core.group, pointers(inputs), pointer(output.address), output.count,
                   output.dtype, root, bounds);
  }
};

struct ReduceScatter : Collective {
  static constexpr const char* kName = "reduce_scatter";
  static inline OptionsLayout layout;
  Operand output;
  std::vector<Address> inputs;

  bool parse(Arguments& arguments) {
    return arguments.count_is(3) && arguments.options(2, layout) &&
           arguments.single_tensor(0, subject, output) &&
           arguments.tensor_per_rank(1, output, inputs) && arguments.reduction(output.dtype, op) &&
           !is_misplaced(output.address, inputs, output.bytes(), arguments.rank());
  }
  Status run(Core& core, const Bounds& bounds) const {
    return reduce_scatter(core.group, pointers(inputs), pointer(output.address), output.count,
                          output.dtype, op, bounds);
  }
};

// An operation of an output and an input, one of which has a part for every rank.
struct PairCollective : Collective {
  Operand output;
  Operand input;

  bool parse_pair(Arguments& arguments) {
    subject = nb::borrow(arguments[1]);
    return arguments.tensor(0, output) && arguments.tensor(1, input) && output.dtype == input.dtype;
  }
};

struct AllGatherSingle : PairCollective {
  static constexpr const char* kName = "all_gather_single";
  static inline OptionsLayout layout;
  std::vector<Address> parts;

  bool parse(Arguments& arguments) {
    if (!arguments.count_is(3) || !arguments.options(2, layout) || !parse_pair(arguments) ||
        output.count != input.count * static_cast<std::size_t>(arguments.ranks())) {
      return false;
    }
    parts = parts_of(output.address, input.bytes(), arguments.ranks());
    return !is_misplaced(input.address, parts, input.bytes(), arguments.rank());
  }
  Status run(Core& core, const Bounds& bounds) const {
    return all_gather(core.group, pointer(input.address), pointers(parts), input.count, input.dtype,
                      bounds);
  }
};

struct ReduceScatterSingle : PairCollective {
  static constexpr const char* kName = "reduce_scatter_single";
  static inline OptionsLayout layout;
  std::vector<Address> parts;

  bool parse(Arguments& arguments) {
    if (!arguments.count_is(3) || !arguments.options(2, layout) || !parse_pair(arguments) ||
        input.count != output.count * static_cast<std::size_t>(arguments.ranks()) ||
        !arguments.reduction(output.dtype, op)) {
      return false;
    }
    parts = parts_of(input.address, output.bytes(), arguments.ranks());
    return !is_misplaced(output.address, parts, output.bytes(), arguments.rank());
  }
  Status run(Core& core, const Bounds& bounds) const {
    return reduce_scatter(core.group, pointers(parts), pointer(output.address), output.count,
                          output.dtype, op, bounds);
  }
};

struct AllToAllSingle : PairCollective {
  static constexpr const char* kName = "all_to_all_single";
  static inline OptionsLayout layout;
  std::vector<Address> inputs;
  std::vector<Address> outputs;
  std::vector<std::uint64_t> counts;

  // Equal parts only: no split sizes.
  bool parse(Arguments& arguments) {
    const auto ranks = static_cast<std::size_t>(arguments.ranks());
    if (!arguments.count_is(5) || !is_empty(arguments[2]) || !is_empty(arguments[3]) ||
        !arguments.options(4, layout) || !parse_pair(arguments) || output.count != input.count ||
        !input.has_rows_for(ranks) || !output.has_rows_for(ranks) ||
        (output.address < input.address + input.bytes() &&
         input.address < output.address + output.bytes())) {
      return false;
    }
    counts.assign(ranks, input.count / ranks);
    inputs = parts_of(input.address, input.bytes() / ranks, arguments.ranks());
    outputs = parts_of(output.address, output.bytes() / ranks, arguments.ranks());
    return true;
  }
  Status run(Core& core, const Bounds& bounds) const {
    const Splits own{.inputs = pointers(inputs),
                     .input_counts = counts.data(),
                     .outputs = pointers(outputs),
                     .output_counts = counts.data()};
    return all_to_all(core.group, own, input.dtype, bounds);
  }

 private:
  static bool is_empty(PyObject* list) {
    return PyList_CheckExact(list) != 0 && PyList_Size(list) == 0;
  }
};

struct AllToAll : Collective {
  static constexpr const char* kName = "all_to_all";
  static inline OptionsLayout layout;
  std::optional<DType> dtype;
  std::vector<Address> inputs;
  std::vector<Address> outputs;
  std::vector<std::uint64_t> input_counts;
  std::vector<std::uint64_t> output_counts;

  bool parse(Arguments& arguments) {
    if (!arguments.count_is(3) || !arguments.options(2, layout) ||
        !arguments.tensors(arguments[1], dtype, inputs, input_counts) ||
        !arguments.tensors(arguments[0], dtype, outputs, output_counts)) {
      return false;
    }
    subject = nb::borrow(PyList_GetItem(arguments[1], 0));
    const auto own = static_cast<std::size_t>(arguments.rank());
    return input_counts[own] == output_counts[own] &&
           !overlap(inputs, input_counts, outputs, output_counts, *dtype);
  }
  Status run(Core& core, const Bounds& bounds) const {
    const Splits own{.inputs = pointers(inputs),
                     .input_counts = input_counts.data(),
                     .outputs = pointers(outputs),
                     .output_counts = output_counts.data()};
    return all_to_all(core.group, own, *dtype, bounds);
  }
};

struct SingleMessage {
  static constexpr const char* kKeyword = nullptr;
  nb::object subject;
  Operand data;
  int peer = -1;
  int tag = 0;

  bool parse_message(Arguments& arguments) {
    constexpr long kTags = 1L << 31;
    return arguments.count_is(3) && caller_waits() && arguments.single_tensor(0, subject, data) &&
           Arguments::integer(arguments[1], arguments.ranks(), peer) &&
           Arguments::integer(arguments[2], kTags, tag);
  }
  static double timeout(const Arguments&, double unset) { return unset; }
  PyObject* fail(PyObject* group, const nb::object& status, const char* name,
                 double timeout) const {
    return PyObject_CallFunction(environment().fail_message.ptr(), "OOsOiid", group, status.ptr(),
                                 name, subject.ptr(), peer, tag, timeout);
  }

 private:
  // torch.distributed posts a message by isend and irecv. Their callers wait at once if they are
  // send and recv.
  static bool caller_waits() {
    Frames at;
    if (at.end()) {
      return false;
    }
    at.next();
    return !at.end() && std::ranges::any_of(environment().blocking, [&](const nb::object& code) {
      return code.ptr() == reinterpret_cast<PyObject*>(at.code());
    });
  }
};

struct Send : SingleMessage {
  static constexpr const char* kName = "send";

  bool parse(Arguments& arguments) { return parse_message(arguments); }
  Status run(Core& core, const Bounds& bounds) const {
    return core.mailbox.send(pointer(data.address), data.count, data.dtype, peer, tag, bounds);
  }
};

struct Recv : SingleMessage {
  static constexpr const char* kName = "recv";

  bool parse(Arguments& arguments) { return parse_message(arguments); }
  Status run(Core& core, const Bounds& bounds) const {
    return core.mailbox.recv(pointer(data.address), data.count, data.dtype, peer, tag, bounds);
  }
  static void finish(const nb::object& group) {
    constexpr std::size_t kChecked = std::size_t{1} << 20;
    const PyGroup& native = *nb::inst_ptr<PyGroup>(group);
    if (native.core && native.core->mailbox.unexpected_peak() > kChecked) {
      environment().check_unexpected(group);
    }
  }
};

// ---- the methods ----

bool is_observed() {
  const auto& flags = environment().observer_flags;
  const bool none = !flags.empty() && std::ranges::all_of(flags, [](const auto& flag) {
    return PyDict_GetItem(flag.first.ptr(), flag.second.ptr()) == Py_False;
  });
  return !none && std::ranges::any_of(environment().observers, [](const nb::object& count) {
    const nb::object answer = nb::steal(PyObject_CallNoArgs(count.ptr()));
    return !answer.is_valid() || PyObject_IsTrue(answer.ptr()) != 0;
  });
}

// Null for an object of another class.
const OperationState* state_of(PyObject* membership) {
  static const PyTypeObject* known = nullptr;  // the class of memberships
  if (membership == nullptr) {
    return nullptr;
  }
  if (Py_TYPE(membership) != known) {
    if (!nb::isinstance<OperationState>(membership)) {
      return nullptr;
    }
    known = Py_TYPE(membership);
  }
  return nb::inst_ptr<OperationState>(membership);
}

// Whether the names are those of the only argument that an operation may have by name.
template <class Operation>
bool are_expected(PyObject* names) {
  return names == nullptr || PyTuple_Size(names) == 0 ||
         (Operation::kKeyword != nullptr && PyTuple_Size(names) == 1 &&
          PyUnicode_CompareWithASCIIString(PyTuple_GetItem(names, 0), Operation::kKeyword) == 0);
}

// Runs the operation if it needs no preparation. Returns its work, or null: with `refused`, the
// general method has to run it (Python's error may be set), else Python's error is set.
template <class Operation>
PyObject* call_directly(PyObject* self, PyObject* const* values, Py_ssize_t count, PyObject* names,
                        bool& refused) {
  static PyObject* const name = PyUnicode_InternFromString("_membership");
  static const auto* const group_type = reinterpret_cast<PyTypeObject*>(nb::type<PyGroup>().ptr());
  const nb::object membership = nb::steal(PyObject_GetAttr(self, name));
  const OperationState* state = state_of(membership.ptr());
  if (state == nullptr || !state->is_direct || state->pending != 0 ||
      Py_TYPE(state->native.ptr()) != group_type || !are_expected<Operation>(names)) {
    return nullptr;
  }
  const nb::object native = state->native;  // another thread may leave the group meanwhile
  const PyGroup& group = *nb::inst_ptr<PyGroup>(native);
  const std::shared_ptr<Core> core = group.core;
  if (!core) {
    return nullptr;
  }
  const Py_ssize_t all = count + (names == nullptr ? 0 : PyTuple_Size(names));
  Arguments arguments(*core, values, all);
  Operation operation;
  if (!operation.parse(arguments) || is_observed()) {
    return nullptr;
  }
  const double seconds = operation.timeout(arguments, state->timeout);
  refused = false;
  const nb::object status = run(group, seconds, [&](Core& core, const Bounds& bounds) {
    return operation.run(core, bounds);
  });
  if (!status.is_none()) {
    return operation.fail(self, status, Operation::kName, seconds);
  }
  if constexpr (requires { Operation::finish(native); }) {
    Operation::finish(native);
  }
  return nb::object(environment().done).release().ptr();
}

template <class Operation>
PyObject* call_method(PyObject* method, PyObject* const* values, std::size_t flags,
                      PyObject* names) {
  try {
    bool refused = true;
    const Py_ssize_t count = PyVectorcall_NARGS(flags);
    PyObject* work =
        count == 0 ? nullptr
                   : call_directly<Operation>(values[0], values + 1, count - 1, names, refused);
    if (!refused) {
      return work;
    }
    PyErr_Clear();
    return PyObject_Vectorcall(general_method(method), values, flags, names);
  } catch (nb::python_error& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

// Puts a direct method before the one of the class, under all its names.
template <class Operation>
void install(nb::handle group_class, std::initializer_list<const char*> method_names) {
  const nb::object method =
      make_direct_method(group_class.attr(*method_names.begin()), &call_method<Operation>);
  for (const char* name : method_names) {
    nb::setattr(group_class, name, method);
  }
}

// The same for an operation whose options are known: [class, positions of the fields].
template <class Operation>
void install(nb::handle group_class, const nb::dict& layouts,
             std::initializer_list<const char*> method_names) {
  if (!layouts.contains(Operation::kName)) {
    return;
  }
  const auto [type, timeout, async_op, root, op] =
      nb::cast<std::tuple<nb::object, int, int, int, int>>(layouts[Operation::kName]);
  Operation::layout = {.type = reinterpret_cast<PyTypeObject*>(nb::object(type).release().ptr()),
                       .timeout = timeout,
                       .async_op = async_op,
                       .root = root,
                       .op = op};
  install<Operation>(group_class, method_names);
}

void install_direct_calls(nb::handle group_class, const nb::dict& layouts) {
  install<Barrier>(group_class, layouts, {"barrier"});
  install<Broadcast>(group_class, layouts, {"broadcast"});
  install<AllReduce>(group_class, layouts, {"allreduce"});
  install<Reduce>(group_class, layouts, {"reduce"});
  install<AllGather>(group_class, layouts, {"allgather"});
  install<Gather>(group_class, layouts, {"gather"});
  install<Scatter>(group_class, layouts, {"scatter"});
  install<ReduceScatter>(group_class, layouts, {"reduce_scatter"});
  install<AllGatherSingle>(group_class, layouts, {"all_gather_single", "_allgather_base"});
  install<ReduceScatterSingle>(group_class, layouts,
                               {"reduce_scatter_single", "_reduce_scatter_base"});
  install<AllToAllSingle>(group_class, layouts, {"all_to_all_single", "alltoall_base"});
  install<AllToAll>(group_class, layouts, {"alltoall"});
  install<Send>(group_class, {"send"});
  install<Recv>(group_class, {"recv"});
}

void set_environment(const nb::list& observer_flags, const nb::list& observers, const std::vector<int>& ops, nb::object done,
                     const nb::list& blocking, nb::object check_unexpected,
                     nb::object fail_collective, nb::object fail_message) {
  Environment& all = environment();
  for (const nb::handle each : observer_flags) {
    all.observer_flags.emplace_back(nb::cast<nb::dict>(each[0].attr("__dict__")),
                                    nb::steal<nb::str>(PyUnicode_InternFromString(
                                        nb::cast<nb::str>(each[1]).c_str())));
  }
  for (const nb::handle each : observers) {
    all.observers.push_back(nb::borrow(each));
  }
  for (const nb::handle each : blocking) {
    all.blocking.push_back(nb::borrow(each));
  }
  all.ops.fill(-1);
  for (std::size_t i = 0; i < std::min(ops.size(), all.ops.size()); ++i) {
    all.ops[i] = static_cast<std::int8_t>(ops[i]);
  }
  all.done = std::move(done);
  all.check_unexpected = std::move(check_unexpected);
  all.fail_collective = std::move(fail_collective);
  all.fail_message = std::move(fail_message);
}

}  // namespace

void bind_direct_calls(nb::module_& module) {
  nb::class_<OperationState>(module, "OperationState", "The state that direct calls need.")
      .def(nb::init<nb::object, double>(), nb::arg("native"), nb::arg("timeout"))
      .def_rw("native", &OperationState::native)
      .def_rw("timeout", &OperationState::timeout)
      .def_rw("pending", &OperationState::pending)
      .def_rw("is_direct", &OperationState::is_direct);
  module.def("find_field", &find_field, nb::arg("objects"), nb::arg("values"), nb::arg("size"));
  module.def("set_tensor_api", &set_tensor_api, nb::arg("table"), nb::arg("types"),
             nb::arg("is_neg"), nb::arg("is_conj"));
  module.def("find_view_bits", &find_view_bits, nb::arg("plain"), nb::arg("negative"),
             nb::arg("conjugate"));
  module.def("set_direct_call_environment", &set_environment, nb::arg("observer_flags"),
             nb::arg("observers"), nb::arg("ops"),
             nb::arg("done"), nb::arg("blocking"), nb::arg("check_unexpected"),
             nb::arg("fail_collective"), nb::arg("fail_message"));
  module.def("install_direct_calls", &install_direct_calls, nb::arg("group_class"),
             nb::arg("layouts"));
}

}  // namespace phalanx::bindings
