// Encodings of float32 in fewer bits, for links whose bandwidth is scarce.
//
// int8 and int4 have a scale for each block of elements (Dettmers, "8-bit approximations for
// parallelism in deep learning", 2015, and QSGD, 2017, use such blocks): an element is its block's
// scale times an integer of 8 or 4 bits. What an encoding loses is kept and added to the next
// values that are encoded (error feedback: Seide et al., "1-bit stochastic gradient descent", 2014;
// Karimireddy et al., 2019). All kernels give the same bits on all CPUs.
#pragma once

#include <cstddef>
#include <cstdint>

namespace phalanx {

// The numbers are part of what ranks agree on: append only.
enum class Encoding : std::uint8_t {
  bfloat16 = 0,
  int8 = 1,
  int4 = 2,
};

// The number of elements with a common scale, for encodings of 8 and 4 bits.
template <std::size_t bits>
constexpr std::size_t kQuantizationBlock = bits == 8 ? 256 : 64;

// The size of `count` encoded elements in bytes.
std::size_t quantized_size(std::size_t count, Encoding encoding);

// Encodes values + residual, and replaces the residual by what is lost; it may be null. A block
// with a value that is not finite becomes NaN as a whole with int8 and int4, and has no residual.
void quantize(void* out, const float* values, float* residual, std::size_t count,
              Encoding encoding);

void dequantize(float* out, const void* encoded, std::size_t count, Encoding encoding);

}  // namespace phalanx
