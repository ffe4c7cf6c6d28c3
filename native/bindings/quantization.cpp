#include "phalanx/quantization.h"

#include <array>

#include "core.h"

namespace phalanx::bindings {
namespace {

constexpr std::array kEncodings = {"bfloat16", "int8", "int4"};

void encode(Address out, Address values, Address residual, std::size_t count, int encoding) {
  const WithoutGil released;
  quantize(pointer(out), static_cast<const float*>(pointer(values)),
           static_cast<float*>(pointer(residual)), count, static_cast<Encoding>(encoding));
}

void decode(Address out, Address encoded, std::size_t count, int encoding) {
  const WithoutGil released;
  dequantize(static_cast<float*>(pointer(out)), pointer(encoded), count,
             static_cast<Encoding>(encoding));
}

}  // namespace

void bind_quantization(nb::module_& module) {
  nb::dict encodings;
  for (std::size_t i = 0; i < kEncodings.size(); ++i) encodings[kEncodings[i]] = i;
  module.attr("ENCODINGS") = encodings;
  module.def(
      "quantized_size",
      [](std::size_t count, int encoding) {
        return quantized_size(count, static_cast<Encoding>(encoding));
      },
      nb::arg("count"), nb::arg("encoding"));
  module.def("quantize", &encode, nb::arg("output"), nb::arg("values"), nb::arg("residual"),
             nb::arg("count"), nb::arg("encoding"));
  module.def("dequantize", &decode, nb::arg("output"), nb::arg("encoded"), nb::arg("count"),
             nb::arg("encoding"));
}

}  // namespace phalanx::bindings
