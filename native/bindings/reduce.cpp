#include "phalanx/reduce.h"

#include <array>

#include "core.h"

namespace phalanx::bindings {
namespace {

// Indexed by their numbers.
constexpr std::array kDTypes = {"bool",     "uint8",   "int8",    "uint16",    "int16",
                                "uint32",   "int32",   "uint64",  "int64",     "float16",
                                "bfloat16", "float32", "float64", "complex64", "complex128"};
constexpr std::array kOps = {"none", "sum", "product", "min", "max", "band", "bor", "bxor", "avg"};

template <class Names, class Number>
const char* name_in(const Names& names, Number number) {
  const auto index = static_cast<std::size_t>(number);
  return index < names.size() ? names[index] : "unknown";
}

template <class Names>
nb::dict numbers_of(const Names& names) {
  nb::dict numbers;
  for (std::size_t i = 0; i < names.size(); ++i) {
    numbers[names[i]] = i;
  }
  return numbers;
}

void combine(Address output, const std::vector<Address>& sources, std::size_t count, int dtype,
             int op, double divisor) {
  static_assert(sizeof(Address) == sizeof(void*));
  const WithoutGil released;
  reduce(pointer(output), reinterpret_cast<const void* const*>(sources.data()), sources.size(),
         count, static_cast<DType>(dtype), static_cast<ReduceOp>(op), divisor);
}

}  // namespace

const char* name_of(DType dtype) { return name_in(kDTypes, dtype); }
const char* name_of(ReduceOp op) { return name_in(kOps, op); }

void bind_reduce(nb::module_& module) {
  module.attr("DTYPES") = numbers_of(kDTypes);
  module.attr("REDUCE_OPS") = numbers_of(kOps);
  module.def(
      "supports",
      [](int dtype, int op) {
        return supports(static_cast<DType>(dtype), static_cast<ReduceOp>(op));
      },
      nb::arg("dtype"), nb::arg("op"));
  module.def("instruction_set", &instruction_set);
  module.def("reduce", &combine, nb::arg("output"), nb::arg("sources"), nb::arg("count"),
             nb::arg("dtype"), nb::arg("op"), nb::arg("divisor"));
}

}  // namespace phalanx::bindings
