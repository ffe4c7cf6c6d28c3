// The encodings of quantization.h. The loops are plain, since compilers vectorize them.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "kernels.h"
#include "phalanx/quantization.h"

namespace phalanx::kernels {
namespace {

constexpr uint32_t kMagnitude = 0x7fffffff;
constexpr uint32_t kInfinity = 0x7f800000;
constexpr uint32_t kNaN = 0x7fc00000;
constexpr float kSmallest = 1e-30F;  // a block below it is 0: the reciprocal of its scale overflows
// Adding it rounds to an integer, which is then in the lowest bits: 1.5 * 2^23.
constexpr float kRounder = 12582912.0F;

inline uint32_t bits_of_float(float x) { return __builtin_bit_cast(uint32_t, x); }
inline float float_of_bits(uint32_t x) { return __builtin_bit_cast(float, x); }

// The largest magnitude of a block, as bits: these are ordered like the numbers, NaN last.
inline uint32_t largest(const float* values, size_t count) {
  uint32_t most = 0;
  for (size_t i = 0; i < count; ++i) {
    const uint32_t bits = bits_of_float(values[i]) & kMagnitude;
    most = bits > most ? bits : most;
  }
  return most;
}

// Adds the residual to the values of a block.
inline void add_residual(float* sum, const float* values, const float* residual, size_t count) {
  if (residual == nullptr) {
    __builtin_memcpy(sum, values, count * sizeof(float));
    return;
  }
  for (size_t i = 0; i < count; ++i) sum[i] = values[i] + residual[i];
}

// The codes of a block, as integers in the lowest bits; returns the scale.
inline float encode_block(uint32_t* codes, const float* values, size_t count, float levels) {
  const uint32_t most = largest(values, count);
  const float magnitude = float_of_bits(most);
  if (most >= kInfinity || magnitude < kSmallest) {
    for (size_t i = 0; i < count; ++i) codes[i] = 0;
    return most >= kInfinity ? float_of_bits(kNaN) : 0.0F;
  }
  const float inverse = levels / magnitude;
  for (size_t i = 0; i < count; ++i) codes[i] = bits_of_float(values[i] * inverse + kRounder);
  return magnitude / levels;
}

// The integer that a code of 8 bits stands for.
inline float value_of(uint32_t code) {
  return static_cast<float>(static_cast<int8_t>(static_cast<uint8_t>(code)));
}

// An element of 4 bits is half a byte: the first half of a block's elements are the low halves.
inline void pack4(uint8_t* out, const uint32_t* codes, size_t count) {
  const size_t half = (count + 1) / 2;
  const size_t pairs = count - half;
  for (size_t i = 0; i < pairs; ++i) {
    out[i] = static_cast<uint8_t>((codes[i] & 15U) | (codes[i + half] & 15U) << 4U);
  }
  if (pairs < half) out[pairs] = static_cast<uint8_t>(codes[pairs] & 15U);
}

inline void unpack4(uint32_t* codes, const uint8_t* in, size_t count) {
  const size_t half = (count + 1) / 2;
  const auto extended = [](uint32_t code) { return (code ^ 8U) - 8U; };
  for (size_t i = 0; i < half; ++i) codes[i] = extended(in[i] & 15U);
  for (size_t i = 0; i < count - half; ++i) codes[i + half] = extended(in[i] >> 4U);
}

template <size_t bits>
void quantize_blocks(void* out, const float* values, float* residual, size_t count) {
  constexpr float levels = bits == 8 ? 127.0F : 7.0F;
  constexpr size_t block = kQuantizationBlock<bits>;
  auto* to = static_cast<uint8_t*>(out);
  for (size_t begin = 0; begin < count; begin += block) {
    const size_t size = count - begin < block ? count - begin : block;
    float sum[block];
    uint32_t codes[block];
    float* rest = residual == nullptr ? nullptr : residual + begin;
    add_residual(sum, values + begin, rest, size);
    const float scale = encode_block(codes, sum, size, levels);
    __builtin_memcpy(to, &scale, sizeof scale);
    to += sizeof scale;
    if constexpr (bits == 8) {
      for (size_t i = 0; i < size; ++i) to[i] = static_cast<uint8_t>(codes[i]);
    } else {
      pack4(to, codes, size);
    }
    to += bits == 8 ? size : (size + 1) / 2;
    if (rest == nullptr) continue;
    const bool is_finite = scale == scale;
    for (size_t i = 0; i < size; ++i) {
      const float lost = sum[i] - value_of(codes[i]) * scale;
      rest[i] = is_finite ? lost : 0.0F;
    }
  }
}

template <size_t bits>
void dequantize_blocks(float* out, const void* encoded, size_t count) {
  constexpr size_t block = kQuantizationBlock<bits>;
  const auto* from = static_cast<const uint8_t*>(encoded);
  for (size_t begin = 0; begin < count; begin += block) {
    const size_t size = count - begin < block ? count - begin : block;
    float scale;
    __builtin_memcpy(&scale, from, sizeof scale);
    from += sizeof scale;
    if constexpr (bits == 8) {
      for (size_t i = 0; i < size; ++i) out[begin + i] = value_of(from[i]) * scale;
    } else {
      uint32_t codes[block];
      unpack4(codes, from, size);
      for (size_t i = 0; i < size; ++i) out[begin + i] = value_of(codes[i]) * scale;
    }
    from += bits == 8 ? size : (size + 1) / 2;
  }
}

// bfloat16 has no blocks; a NaN stays one.
inline uint32_t rounded_half(uint32_t bits) {
  const uint32_t rounded = (bits + 0x7fffU + ((bits >> 16U) & 1U)) >> 16U;
  return (bits & kMagnitude) > kInfinity ? kNaN >> 16U : rounded;
}

void quantize_halves(void* out, const float* values, float* residual, size_t count) {
  auto* to = static_cast<uint8_t*>(out);
  for (size_t i = 0; i < count; ++i) {
    const float sum = residual == nullptr ? values[i] : values[i] + residual[i];
    const uint32_t bits = bits_of_float(sum);
    const auto half = static_cast<uint16_t>(rounded_half(bits));
    __builtin_memcpy(to + 2 * i, &half, sizeof half);
    if (residual == nullptr) continue;
    const float lost = sum - float_of_bits(static_cast<uint32_t>(half) << 16U);
    residual[i] = (bits_of_float(lost) & kMagnitude) < kInfinity ? lost : 0.0F;
  }
}

void dequantize_halves(float* out, const void* encoded, size_t count) {
  const auto* from = static_cast<const uint8_t*>(encoded);
  for (size_t i = 0; i < count; ++i) {
    uint16_t half;
    __builtin_memcpy(&half, from + 2 * i, sizeof half);
    out[i] = float_of_bits(static_cast<uint32_t>(half) << 16U);
  }
}

}  // namespace
}  // namespace phalanx::kernels
