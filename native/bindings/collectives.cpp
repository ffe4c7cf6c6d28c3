#include "phalanx/collectives.h"

#include "core.h"

namespace phalanx::bindings {
namespace {

// The addresses of the parts of a contiguous tensor: one per rank, of `count` elements each.
std::vector<Address> elements_of(const PyGroup& self, Address whole, std::size_t count, int dtype) {
  return parts_of(whole, count * size_of(static_cast<DType>(dtype)),
                  self.require_core()->group.ranks());
}

nb::object py_barrier(const PyGroup& self, double timeout) {
  return run(self, timeout,
             [](Core& core, const Bounds& bounds) { return barrier(core.group, bounds); });
}

nb::object py_broadcast(const PyGroup& self, Address data, std::size_t count, int dtype, int root,
                        double timeout) {
  return run(self, timeout, [&](Core& core, const Bounds& bounds) {
    return broadcast(core.group, pointer(data), count, static_cast<DType>(dtype), root, bounds);
  });
}

nb::object py_all_reduce(const PyGroup& self, Address data, std::size_t count, int dtype, int op,
                         double timeout) {
  return run(self, timeout, [&](Core& core, const Bounds& bounds) {
    return all_reduce(core.group, pointer(data), count, static_cast<DType>(dtype),
                      static_cast<ReduceOp>(op), bounds);
  });
}

nb::object py_reduce(const PyGroup& self, Address data, std::size_t count, int dtype, int op,
                     int root, double timeout) {
  return run(self, timeout, [&](Core& core, const Bounds& bounds) {
    return reduce(core.group, pointer(data), count, static_cast<DType>(dtype),
                  static_cast<ReduceOp>(op), root, bounds);
  });
}

nb::object py_gather(const PyGroup& self, Address input, const std::vector<Address>& outputs,
                     std::size_t count, int dtype, int root, double timeout) {
  return run(self, timeout, [&](Core& core, const Bounds& bounds) {
    return gather(core.group, pointer(input), pointers(outputs), count, static_cast<DType>(dtype),
                  root, bounds);
  });
}

nb::object py_scatter(const PyGroup& self, const std::vector<Address>& inputs, Address output,
                      std::size_t count, int dtype, int root, double timeout) {
  return run(self, timeout, [&](Core& core, const Bounds& bounds) {
    return scatter(core.group, pointers(inputs), pointer(output), count, static_cast<DType>(dtype),
                   root, bounds);
  });
}

nb::object py_all_gather(const PyGroup& self, Address input, const std::vector<Address>& outputs,
                         std::size_t count, int dtype, double timeout) {
  return run(self, timeout, [&](Core& core, const Bounds& bounds) {
    return all_gather(core.group, pointer(input), pointers(outputs), count,
                      static_cast<DType>(dtype), bounds);
  });
}

nb::object py_reduce_scatter(const PyGroup& self, const std::vector<Address>& inputs,
                             Address output, std::size_t count, int dtype, int op, double timeout) {
  return run(self, timeout, [&](Core& core, const Bounds& bounds) {
    return reduce_scatter(core.group, pointers(inputs), pointer(output), count,
                          static_cast<DType>(dtype), static_cast<ReduceOp>(op), bounds);
  });
}

nb::object py_all_to_all(const PyGroup& self, const std::vector<Address>& inputs,
                         const std::vector<std::uint64_t>& input_counts,
                         const std::vector<Address>& outputs,
                         const std::vector<std::uint64_t>& output_counts, int dtype,
                         double timeout) {
  return run(self, timeout, [&](Core& core, const Bounds& bounds) {
    const Splits own{.inputs = pointers(inputs),
                     .input_counts = input_counts.data(),
                     .outputs = pointers(outputs),
                     .output_counts = output_counts.data()};
    return all_to_all(core.group, own, static_cast<DType>(dtype), bounds);
  });
}

nb::object py_all_gather_single(const PyGroup& self, Address input, Address output,
                                std::size_t count, int dtype, double timeout) {
  return py_all_gather(self, input, elements_of(self, output, count, dtype), count, dtype, timeout);
}

nb::object py_reduce_scatter_single(const PyGroup& self, Address input, Address output,
                                    std::size_t count, int dtype, int op, double timeout) {
  return py_reduce_scatter(self, elements_of(self, input, count, dtype), output, count, dtype, op,
                           timeout);
}

nb::object py_all_to_all_single(const PyGroup& self, Address input, Address output,
                                std::size_t count, int dtype, double timeout) {
  const std::vector<Address> inputs = elements_of(self, input, count, dtype);
  const std::vector<std::uint64_t> counts(inputs.size(), count);
  return py_all_to_all(self, inputs, counts, elements_of(self, output, count, dtype), counts, dtype,
                       timeout);
}

}  // namespace

std::vector<Address> parts_of(Address whole, std::size_t bytes, int ranks) {
  std::vector<Address> parts(static_cast<std::size_t>(ranks));
  for (std::size_t rank = 0; rank < parts.size(); ++rank) {
    parts[rank] = whole + rank * bytes;
  }
  return parts;
}

void bind_collectives(nb::class_<PyGroup>& group) {
  group.def("barrier", &py_barrier, nb::arg("timeout"))
      .def("broadcast", &py_broadcast, nb::arg("data"), nb::arg("count"), nb::arg("dtype"),
           nb::arg("root"), nb::arg("timeout"))
      .def("all_reduce", &py_all_reduce, nb::arg("data"), nb::arg("count"), nb::arg("dtype"),
           nb::arg("op"), nb::arg("timeout"))
      .def("reduce", &py_reduce, nb::arg("data"), nb::arg("count"), nb::arg("dtype"), nb::arg("op"),
           nb::arg("root"), nb::arg("timeout"))
      .def("gather", &py_gather, nb::arg("input"), nb::arg("outputs"), nb::arg("count"),
           nb::arg("dtype"), nb::arg("root"), nb::arg("timeout"))
      .def("scatter", &py_scatter, nb::arg("inputs"), nb::arg("output"), nb::arg("count"),
           nb::arg("dtype"), nb::arg("root"), nb::arg("timeout"))
      .def("all_gather", &py_all_gather, nb::arg("input"), nb::arg("outputs"), nb::arg("count"),
           nb::arg("dtype"), nb::arg("timeout"))
      .def("reduce_scatter", &py_reduce_scatter, nb::arg("inputs"), nb::arg("output"),
           nb::arg("count"), nb::arg("dtype"), nb::arg("op"), nb::arg("timeout"))
      .def("all_gather_single", &py_all_gather_single, nb::arg("input"), nb::arg("output"),
           nb::arg("count"), nb::arg("dtype"), nb::arg("timeout"))
      .def("reduce_scatter_single", &py_reduce_scatter_single, nb::arg("input"), nb::arg("output"),
           nb::arg("count"), nb::arg("dtype"), nb::arg("op"), nb::arg("timeout"))
      .def("all_to_all_single", &py_all_to_all_single, nb::arg("input"), nb::arg("output"),
           nb::arg("count"), nb::arg("dtype"), nb::arg("timeout"))
      .def("all_to_all", &py_all_to_all, nb::arg("inputs"), nb::arg("input_counts"),
           nb::arg("outputs"), nb::arg("output_counts"), nb::arg("dtype"), nb::arg("timeout"));
}

}  // namespace phalanx::bindings
