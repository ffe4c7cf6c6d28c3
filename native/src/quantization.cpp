#include "phalanx/quantization.h"

#include "kernels/kernels.h"

namespace phalanx {
namespace {

template <std::size_t bits>
std::size_t size_of_blocks(std::size_t count) {
  constexpr std::size_t block = kQuantizationBlock<bits>;
  const auto codes = [](std::size_t elements) { return (elements * bits + 7) / 8; };
  const std::size_t rest = count % block;
  return count / block * (sizeof(float) + codes(block)) +
         (rest == 0 ? 0 : sizeof(float) + codes(rest));
}

}  // namespace

std::size_t quantized_size(std::size_t count, Encoding encoding) {
  switch (encoding) {
    case Encoding::bfloat16: return 2 * count;
    case Encoding::int8: return size_of_blocks<8>(count);
    case Encoding::int4: break;
  }
  return size_of_blocks<4>(count);
}

void quantize(void* out, const float* values, float* residual, std::size_t count,
              Encoding encoding) {
  kernels::in_use().quantize[static_cast<std::size_t>(encoding)](out, values, residual, count);
}

void dequantize(float* out, const void* encoded, std::size_t count, Encoding encoding) {
  kernels::in_use().dequantize[static_cast<std::size_t>(encoding)](out, encoded, count);
}

}  // namespace phalanx
