#include "phalanx/reduce.h"

#include "core.h"

namespace phalanx::bindings {

void bind_reduce(nb::module_& module) {
  nb::dict dtypes;
  const char* dtype_names[] = {"bool",     "uint8",   "int8",    "uint16",    "int16",
                               "uint32",   "int32",   "uint64",  "int64",     "float16",
                               "bfloat16", "float32", "float64", "complex64", "complex128"};
  for (int i = 0; i < 15; ++i) {
    dtypes[dtype_names[i]] = i;
  }
  module.attr("DTYPES") = dtypes;
  nb::dict ops;
  const char* op_names[] = {"none", "sum", "product", "min", "max", "band", "bor", "bxor", "avg"};
  for (int i = 0; i < 9; ++i) {
    ops[op_names[i]] = i;
  }
  module.attr("REDUCE_OPS") = ops;
  module.def(
      "supports",
      [](int dtype, int op) {
        return supports(static_cast<DType>(dtype), static_cast<ReduceOp>(op));
      },
      nb::arg("dtype"), nb::arg("op"));
  module.def("instruction_set", &instruction_set);
}

}  // namespace phalanx::bindings
