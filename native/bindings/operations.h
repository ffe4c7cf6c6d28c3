// The operations of a process group, as direct calls and prepared operations run them: each parses
// the arguments of its method, and calls the core.
//
// Only what needs no preparation is accepted: plain tensors, torch's own options, an operator that
// the core has. `parse` returns false for all else, for which the general method of the same name,
// in Python, has a slower way or an error.
#pragma once

#include <algorithm>
#include <optional>
#include <utility>

#include "environment.h"
#include "frames.h"
#include "options.h"
#include "overlap.h"
#include "phalanx/merged.h"
#include "tensor.h"
#include "tensor_memory.h"

namespace phalanx::bindings {

// The tensors that an operation writes, borrowed from its arguments: their versions count its runs.
class Written {
 public:
  // Returns true.
  bool add(PyObject* tensor) {
    if (first_ == nullptr) {
      first_ = tensor;
    } else {
      others_.push_back(tensor);
    }
    return true;
  }
  // Requires the GIL.
  void count_run() const {
    if (first_ != nullptr) {
      count(first_);
    }
    std::ranges::for_each(others_, &count);
  }

 private:
  static void count(PyObject* tensor) {
    if (VersionCounter* counter = version_counter(tensor)) {
      counter->fetch_add(1, std::memory_order_relaxed);  // as torch does it: it orders nothing
    }
  }

  PyObject* first_ = nullptr;  // most operations write one, which needs no allocation
  std::vector<PyObject*> others_;
};

// The arguments of a method. Each function returns false if the argument is not of the plain kind.
// Keeps the tensors of lists alive, which another thread may change while an operation runs.
class Arguments {
 public:
  // `prepares`: the operation is prepared, not run: whether its caller waits for it is open.
  Arguments(const Core& core, PyObject* const* values, Py_ssize_t count, bool prepares = false)
      : core_(core), values_(values), count_(count), prepares_(prepares) {}

  bool count_is(Py_ssize_t count) const { return count_ == count; }
  PyObject* operator[](int index) const { return values_[index]; }
  bool prepares() const { return prepares_; }
  int ranks() const { return core_.group.ranks(); }
  int rank() const { return core_.group.rank(); }

  bool read(PyObject* tensor, Operand& operand) const {
    return read_tensor(tensor, operand) && (prepares_ || !is_followed(tensor));
  }
  bool tensor(int index, Operand& operand) const { return read(values_[index], operand); }

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
    return single(index, tensor) && read(tensor.ptr(), operand);
  }

  // A list with a tensor of `dtype` for every rank; if `dtype` is unknown, that of the first.
  bool tensors(PyObject* list, std::optional<DType>& dtype, std::vector<Address>& addresses,
               std::vector<std::uint64_t>& counts, Written* written = nullptr) {
    if (PyList_CheckExact(list) == 0 || PyList_Size(list) != ranks()) {
      return false;
    }
    for (int rank = 0; rank < ranks(); ++rank) {
      Operand operand;
      kept_.push_back(nb::borrow(PyList_GetItem(list, rank)));
      if (!read(kept_.back().ptr(), operand) || operand.dtype != dtype.value_or(operand.dtype)) {
        return false;
      }
      dtype = operand.dtype;
      addresses.push_back(operand.address);
      counts.push_back(operand.count);
      if (written != nullptr) {
        written->add(kept_.back().ptr());
      }
    }
    return true;
  }

  // A list of one list with a tensor like `like` for every rank.
  bool tensor_per_rank(int index, const Operand& like, std::vector<Address>& addresses,
                       Written* written = nullptr) {
    nb::object list;
    std::optional<DType> dtype = like.dtype;
    std::vector<std::uint64_t> counts;
    return single(index, list) && tensors(list.ptr(), dtype, addresses, counts, written) &&
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

  // The objects that own the tensors: all arguments, and the elements of their lists.
  std::vector<nb::object> keep() {
    for (Py_ssize_t i = 0; i < count_; ++i) {
      kept_.push_back(nb::borrow(values_[i]));
    }
    return std::exchange(kept_, {});
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
  bool prepares_;
  const std::byte* memory_ = nullptr;  // of the options
  const OptionsLayout* layout_ = nullptr;
  std::vector<nb::object> kept_;
};

// The parts of every operation. `subject`: the tensor that stands for it in errors.
struct CollectiveOperation {
  // The only argument that torch passes by its name; null if there is none.
  static constexpr const char* kKeyword = nullptr;
  nb::object subject = nb::none();
  ReduceOp op = ReduceOp::none;
  int root = -1;
  Written written;

  // After a run that succeeded.
  void finish(const nb::object& /*group*/) const { written.count_run(); }
  static double timeout(const Arguments& arguments, double unset) {
    return arguments.timeout(unset);
  }
  // Raises the error of a failed operation. `site`: its call site; 0: the current one.
  PyObject* fail(PyObject* group, const nb::object& status, const char* name, double timeout,
                 std::uint32_t site) const {
    return PyObject_CallFunction(environment().fail_collective.ptr(), "OOsOiidI", group,
                                 status.ptr(), name, subject.ptr(), static_cast<int>(op), root,
                                 timeout, site);
  }

  // The operation as a part of a merged one.
  MergedPart merged_part(Kind kind, std::size_t count, DType dtype,
                         const std::vector<Address>& inputs,
                         const std::vector<Address>& outputs) const {
    MergedPart part{.own = {.count = count, .root = root, .kind = kind, .dtype = dtype, .op = op},
                    .inputs = {},
                    .outputs = {}};
    for (const Address each : inputs) {
      part.inputs.push_back(static_cast<const std::byte*>(pointer(each)));
    }
    for (const Address each : outputs) {
      part.outputs.push_back(static_cast<std::byte*>(pointer(each)));
    }
    return part;
  }
};

struct BarrierOperation : CollectiveOperation {
  static constexpr const char* kName = "barrier";
  static inline OptionsLayout layout;
  static constexpr const char* kKeyword = "opts";

  bool parse(Arguments& arguments) { return arguments.count_is(1) && arguments.options(0, layout); }
  Status run(Core& core, const Bounds& bounds) const { return barrier(core.group, bounds); }
  MergedPart part(int) const { return merged_part(Kind::barrier, 0, DType::uint8, {}, {}); }
};

struct BroadcastOperation : CollectiveOperation {
  static constexpr const char* kName = "broadcast";
  static inline OptionsLayout layout;
  Operand data;

  bool parse(Arguments& arguments) {
    return arguments.count_is(2) && arguments.options(1, layout) &&
           arguments.single_tensor(0, subject, data) && arguments.root(root) &&
           (arguments.rank() == root || written.add(subject.ptr()));
  }
  Status run(Core& core, const Bounds& bounds) const {
    return broadcast(core.group, pointer(data.address), data.count, data.dtype, root, bounds);
  }
  MergedPart part(int rank) const {
    const std::vector<Address> all = {data.address};
    const std::vector<Address> none;
    return merged_part(Kind::broadcast, data.count, data.dtype, rank == root ? all : none,
                       rank == root ? none : all);
  }
};

struct AllReduceOperation : CollectiveOperation {
  static constexpr const char* kName = "all_reduce";
  static inline OptionsLayout layout;
  Operand data;

  bool parse(Arguments& arguments) {
    return arguments.count_is(2) && arguments.options(1, layout) &&
           arguments.single_tensor(0, subject, data) && arguments.reduction(data.dtype, op) &&
           written.add(subject.ptr());
  }
  Status run(Core& core, const Bounds& bounds) const {
    return all_reduce(core.group, pointer(data.address), data.count, data.dtype, op, bounds);
  }
  MergedPart part(int) const {
    return merged_part(Kind::all_reduce, data.count, data.dtype, {data.address}, {data.address});
  }
};

struct ReduceOperation : CollectiveOperation {
  static constexpr const char* kName = "reduce";
  static inline OptionsLayout layout;
  Operand data;

  bool parse(Arguments& arguments) {
    return arguments.count_is(2) && arguments.options(1, layout) &&
           arguments.single_tensor(0, subject, data) && arguments.root(root) &&
           arguments.reduction(data.dtype, op) &&
           (arguments.rank() != root || written.add(subject.ptr()));
  }
  Status run(Core& core, const Bounds& bounds) const {
    return reduce(core.group, pointer(data.address), data.count, data.dtype, op, root, bounds);
  }
  MergedPart part(int rank) const {
    const std::vector<Address> result = {data.address};
    return merged_part(Kind::reduce, data.count, data.dtype, {data.address},
                       rank == root ? result : std::vector<Address>());
  }
};

struct AllGatherOperation : CollectiveOperation {
  static constexpr const char* kName = "all_gather";
  static inline OptionsLayout layout;
  Operand input;
  std::vector<Address> outputs;

  std::vector<std::uint64_t> equal_counts() const {
    return std::vector<std::uint64_t>(outputs.size(), input.count);
  }
  bool parse(Arguments& arguments) {
    return arguments.count_is(3) && arguments.options(2, layout) &&
           arguments.single_tensor(1, subject, input) &&
           arguments.tensor_per_rank(0, input, outputs, &written) &&
           !is_misplaced(input.address, outputs, input.bytes(), arguments.rank()) &&
           !have_common_memory(outputs, equal_counts(), size_of(input.dtype));
  }
  Status run(Core& core, const Bounds& bounds) const {
    return all_gather(core.group, pointer(input.address), pointers(outputs), input.count,
                      input.dtype, bounds);
  }
  MergedPart part(int) const {
    return merged_part(Kind::all_gather, input.count, input.dtype, {input.address}, outputs);
  }
};

struct GatherOperation : CollectiveOperation {
  static constexpr const char* kName = "gather";
  static inline OptionsLayout layout;
  Operand input;
  std::vector<Address> outputs;

  std::vector<std::uint64_t> equal_counts() const {
    return std::vector<std::uint64_t>(outputs.size(), input.count);
  }
  bool parse(Arguments& arguments) {
    return arguments.count_is(3) && arguments.options(2, layout) && arguments.root(root) &&
           arguments.single_tensor(1, subject, input) &&
           (root != arguments.rank() ||
            (arguments.tensor_per_rank(0, input, outputs, &written) &&
             !is_misplaced(input.address, outputs, input.bytes(), root) &&
             !have_common_memory(outputs, equal_counts(), size_of(input.dtype))));
  }
  Status run(Core& core, const Bounds& bounds) const {
    return gather(core.group, pointer(input.address), pointers(outputs), input.count, input.dtype,
                  root, bounds);
  }
  MergedPart part(int) const {
    return merged_part(Kind::gather, input.count, input.dtype, {input.address}, outputs);
  }
};

struct ScatterOperation : CollectiveOperation {
  static constexpr const char* kName = "scatter";
  static inline OptionsLayout layout;
  Operand output;
  std::vector<Address> inputs;

  bool parse(Arguments& arguments) {
    return arguments.count_is(3) && arguments.options(2, layout) && arguments.root(root) &&
           arguments.single_tensor(0, subject, output) && written.add(subject.ptr()) &&
           (root != arguments.rank() ||
            (arguments.tensor_per_rank(1, output, inputs) &&
             !is_misplaced(output.address, inputs, output.bytes(), root)));
  }
  Status run(Core& core, const Bounds& bounds) const {
    return scatter(core.group, pointers(inputs), pointer(output.address), output.count,
                   output.dtype, root, bounds);
  }
  MergedPart part(int) const {
    return merged_part(Kind::scatter, output.count, output.dtype, inputs, {output.address});
  }
};

struct ReduceScatterOperation : CollectiveOperation {
  static constexpr const char* kName = "reduce_scatter";
  static inline OptionsLayout layout;
  Operand output;
  std::vector<Address> inputs;

  bool parse(Arguments& arguments) {
    return arguments.count_is(3) && arguments.options(2, layout) &&
           arguments.single_tensor(0, subject, output) && written.add(subject.ptr()) &&
           arguments.tensor_per_rank(1, output, inputs) && arguments.reduction(output.dtype, op) &&
           !is_misplaced(output.address, inputs, output.bytes(), arguments.rank());
  }
  Status run(Core& core, const Bounds& bounds) const {
    return reduce_scatter(core.group, pointers(inputs), pointer(output.address), output.count,
                          output.dtype, op, bounds);
  }
  MergedPart part(int) const {
    return merged_part(Kind::reduce_scatter, output.count, output.dtype, inputs, {output.address});
  }
};

// An operation of an output and an input, one of which has a part for every rank.
struct PairOperation : CollectiveOperation {
  Operand output;
  Operand input;

  bool parse_pair(Arguments& arguments) {
    subject = nb::borrow(arguments[1]);
    return arguments.tensor(0, output) && written.add(arguments[0]) && arguments.tensor(1, input) &&
           output.dtype == input.dtype;
  }
};

struct AllGatherSingleOperation : PairOperation {
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
  MergedPart part(int) const {
    return merged_part(Kind::all_gather, input.count, input.dtype, {input.address}, parts);
  }
};

struct ReduceScatterSingleOperation : PairOperation {
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
  MergedPart part(int) const {
    return merged_part(Kind::reduce_scatter, output.count, output.dtype, parts, {output.address});
  }
};

struct AllToAllSingleOperation : PairOperation {
  static constexpr const char* kName = "all_to_all_single";
  static inline OptionsLayout layout;
  // One side: the parts for, or from, every rank.
  struct Side {
    std::vector<Address> parts;
    std::vector<std::uint64_t> counts;
    bool are_equal = false;

    // From the numbers of rows of all parts, or an empty list for equal ones.
    bool parse(PyObject* sizes, const Operand& whole, int ranks);
  };
  Side inputs;
  Side outputs;

  bool parse(Arguments& arguments) {
    const int ranks = arguments.ranks();
    const auto own = static_cast<std::size_t>(arguments.rank());
    return arguments.count_is(5) && arguments.options(4, layout) && parse_pair(arguments) &&
           inputs.parse(arguments[3], input, ranks) && outputs.parse(arguments[2], output, ranks) &&
           inputs.counts[own] == outputs.counts[own] &&
           (output.address >= input.address + input.bytes() ||
            input.address >= output.address + output.bytes());
  }
  Status run(Core& core, const Bounds& bounds) const {
    const Splits own{.inputs = pointers(inputs.parts),
                     .input_counts = inputs.counts.data(),
                     .outputs = pointers(outputs.parts),
                     .output_counts = outputs.counts.data()};
    return all_to_all(core.group, own, input.dtype, bounds);
  }

  std::optional<MergedPart> part(int) const {
    if (!inputs.are_equal || !outputs.are_equal) {
      return std::nullopt;
    }
    return merged_part(Kind::all_to_all, inputs.counts[0], input.dtype, inputs.parts,
                       outputs.parts);
  }
};

inline bool AllToAllSingleOperation::Side::parse(PyObject* sizes, const Operand& whole, int ranks) {
  if (PyList_CheckExact(sizes) == 0) {
    return false;
  }
  const auto count = static_cast<std::size_t>(ranks);
  are_equal = PyList_Size(sizes) == 0;
  if (are_equal && !whole.has_rows_for(count)) {
    return false;
  }
  const std::size_t row = whole.rows == 0 ? 0 : whole.count / whole.rows;
  std::size_t begin = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    int rows = static_cast<int>(whole.rows / count);
    if (!are_equal && (PyList_Size(sizes) != ranks ||
                       !Arguments::integer(PyList_GetItem(sizes, rank), INT32_MAX, rows))) {
      return false;
    }
    parts.push_back(whole.address + begin * row * size_of(whole.dtype));
    counts.push_back(static_cast<std::size_t>(rows) * row);
    begin += static_cast<std::size_t>(rows);
  }
  return begin == whole.rows;
}

struct AllToAllOperation : CollectiveOperation {
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
        !arguments.tensors(arguments[0], dtype, outputs, output_counts, &written)) {
      return false;
    }
    subject = nb::borrow(PyList_GetItem(arguments[1], 0));
    const auto own = static_cast<std::size_t>(arguments.rank());
    return input_counts[own] == output_counts[own] &&
           !overlap(inputs, input_counts, outputs, output_counts, *dtype) &&
           !have_common_memory(outputs, output_counts, size_of(*dtype));
  }
  Status run(Core& core, const Bounds& bounds) const {
    const Splits own{.inputs = pointers(inputs),
                     .input_counts = input_counts.data(),
                     .outputs = pointers(outputs),
                     .output_counts = output_counts.data()};
    return all_to_all(core.group, own, *dtype, bounds);
  }
};

struct MessageOperation {
  static constexpr const char* kKeyword = nullptr;
  nb::object subject;
  Operand data;
  int peer = -1;
  int tag = 0;

  bool parse_message(Arguments& arguments) {
    constexpr long kTags = 1L << 31;
    return arguments.count_is(3) && (arguments.prepares() || caller_waits()) &&
           arguments.single_tensor(0, subject, data) &&
           Arguments::integer(arguments[1], arguments.ranks(), peer) &&
           Arguments::integer(arguments[2], kTags, tag);
  }
  static double timeout(const Arguments&, double unset) { return unset; }
  PyObject* fail(PyObject* group, const nb::object& status, const char* name, double timeout,
                 std::uint32_t site) const {
    return PyObject_CallFunction(environment().fail_message.ptr(), "OOsOiidI", group, status.ptr(),
                                 name, subject.ptr(), peer, tag, timeout, site);
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

struct SendOperation : MessageOperation {
  static constexpr const char* kName = "send";
  static constexpr bool kSends = true;

  bool parse(Arguments& arguments) { return parse_message(arguments); }
  Status run(Core& core, const Bounds& bounds) const {
    return core.mailbox.send(pointer(data.address), data.count, data.dtype, peer, tag, bounds);
  }
  MessagePtr post(Core& core, bool detached) const {
    return core.mailbox.isend(pointer(data.address), data.count, data.dtype, peer, tag, detached);
  }
  void finish(const nb::object& /*group*/) const {}
};

struct RecvOperation : MessageOperation {
  static constexpr const char* kName = "recv";

  Written written;

  bool parse(Arguments& arguments) {
    return parse_message(arguments) && written.add(subject.ptr());
  }
  Status run(Core& core, const Bounds& bounds) const {
    return core.mailbox.recv(pointer(data.address), data.count, data.dtype, peer, tag, bounds);
  }
  MessagePtr post(Core& core, bool detached) const {
    return core.mailbox.irecv(pointer(data.address), data.count, data.dtype, peer, tag, detached);
  }
  void finish(const nb::object& group) const {
    written.count_run();
    constexpr std::size_t kChecked = std::size_t{1} << 20;
    const PyGroup& native = *nb::inst_ptr<PyGroup>(group);
    if (native.core && native.core->mailbox.unexpected_peak() > kChecked) {
      environment().check_unexpected(group);
    }
  }
};

}  // namespace phalanx::bindings
