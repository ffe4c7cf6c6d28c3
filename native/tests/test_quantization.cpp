// The encodings of every instruction set of this CPU: errors, error feedback, equal bits.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "../src/kernels/kernels.h"
#include "check.h"
#include "phalanx/quantization.h"

using phalanx::Encoding;
using phalanx::kQuantizationBlock;
using phalanx::quantized_size;
using phalanx::kernels::Variant;

namespace {

constexpr Encoding encodings[] = {Encoding::bfloat16, Encoding::int8, Encoding::int4};
constexpr std::size_t counts[] = {0, 1, 2, 3, 63, 64, 65, 127, 255, 256, 257, 1000, 4099};
constexpr unsigned char poison = 0xA5;

std::mt19937_64 make_random() {
  const unsigned seed = std::random_device{}();
  std::printf("seed %u\n", seed);
  return std::mt19937_64(seed);
}
std::mt19937_64 random_bits = make_random();

std::vector<float> random_values(std::size_t count) {
  std::normal_distribution<float> normal;
  std::uniform_int_distribution<int> exponent(-20, 20);
  std::vector<float> values(count);
  for (std::size_t i = 0; i < count; ++i) {
    const float factor = i % 97 == 0 ? std::ldexp(1.0F, exponent(random_bits)) : 1.0F;
    values[i] = normal(random_bits) * factor;
  }
  return values;
}

struct Encoded {
  std::vector<unsigned char> bytes;
  std::vector<float> decoded;
};

// Encodes with guards behind the output, and decodes.
Encoded code(const Variant& variant, Encoding encoding, const std::vector<float>& values,
             std::vector<float>* residual) {
  const std::size_t size = quantized_size(values.size(), encoding);
  const auto kind = static_cast<std::size_t>(encoding);
  Encoded result{std::vector<unsigned char>(size + 16, poison),
                 std::vector<float>(values.size() + 4, -7.0F)};
  variant.table->quantize[kind](result.bytes.data(), values.data(),
                                residual == nullptr ? nullptr : residual->data(), values.size());
  for (std::size_t i = size; i < result.bytes.size(); ++i) CHECK(result.bytes[i] == poison);
  variant.table->dequantize[kind](result.decoded.data(), result.bytes.data(), values.size());
  for (std::size_t i = values.size(); i < result.decoded.size(); ++i) {
    CHECK(result.decoded[i] == -7.0F);
  }
  result.decoded.resize(values.size());
  return result;
}

std::size_t block_of(Encoding encoding) {
  return encoding == Encoding::int8 ? kQuantizationBlock<8> : kQuantizationBlock<4>;
}

// The largest error that the encoding of an element may have.
double most_error(Encoding encoding, const std::vector<float>& values, std::size_t index) {
  if (encoding == Encoding::bfloat16) return std::abs(double{values[index]}) / 256;
  const std::size_t begin = index - index % block_of(encoding);
  const std::size_t end = std::min(values.size(), begin + block_of(encoding));
  double most = 0;
  for (std::size_t i = begin; i < end; ++i) most = std::max(most, std::abs(double{values[i]}));
  return most / (encoding == Encoding::int8 ? 127 : 7) * 0.5001;
}

void test_errors(const Variant& variant, Encoding encoding) {
  for (const std::size_t count : counts) {
    const std::vector<float> values = random_values(count);
    std::vector<float> residual(count, 0.0F);
    const Encoded coded = code(variant, encoding, values, &residual);
    const Encoded without = code(variant, encoding, values, nullptr);
    CHECK(coded.bytes == without.bytes);
    for (std::size_t i = 0; i < count; ++i) {
      const double error = double{values[i]} - double{coded.decoded[i]};
      CHECK(std::abs(error) <= most_error(encoding, values, i));
      CHECK(residual[i] == static_cast<float>(error) || std::abs(error) < 1e-30);
    }
  }
}

// The sum of what is decoded stays within one error of the sum of the values.
void test_feedback(const Variant& variant, Encoding encoding) {
  constexpr std::size_t count = 777;
  constexpr int rounds = 50;
  std::vector<float> residual(count, 0.0F);
  std::vector<double> sum(count);
  std::vector<double> decoded_sum(count);
  for (int round = 0; round < rounds; ++round) {
    const std::vector<float> values = random_values(count);
    const Encoded coded = code(variant, encoding, values, &residual);
    for (std::size_t i = 0; i < count; ++i) {
      sum[i] += double{values[i]};
      decoded_sum[i] += double{coded.decoded[i]};
    }
  }
  for (std::size_t i = 0; i < count; ++i) {
    const double scale = std::abs(sum[i]) + std::abs(double{residual[i]}) + 100;
    CHECK(std::abs(sum[i] - decoded_sum[i] - double{residual[i]}) <= 1e-4 * scale);
  }
}

void test_special_values(const Variant& variant, Encoding encoding) {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  for (const float special : {infinity, -infinity, std::nanf("")}) {
    std::vector<float> values = random_values(600);
    values[70] = special;
    std::vector<float> residual(values.size(), 0.0F);
    const Encoded coded = code(variant, encoding, values, &residual);
    CHECK(!std::isfinite(coded.decoded[70]));
    for (std::size_t i = 0; i < values.size(); ++i) {
      CHECK(std::isfinite(residual[i]));
      const bool same_block = i / block_of(encoding) == 70 / block_of(encoding);
      const bool is_lost = encoding == Encoding::bfloat16 ? i == 70 : same_block;
      CHECK(std::isfinite(coded.decoded[i]) == !is_lost);
    }
  }
  std::vector<float> tiny(300, 1e-38F);
  std::vector<float> residual(tiny.size(), 0.0F);
  const Encoded coded = code(variant, encoding, tiny, &residual);
  for (std::size_t i = 0; i < tiny.size(); ++i) CHECK(coded.decoded[i] + residual[i] == tiny[i]);
}

// All ranks decode the same bytes, on whichever CPU; and all encode alike.
void test_equal_bits(const std::vector<Variant>& usable, Encoding encoding) {
  const std::vector<float> values = random_values(5000);
  std::vector<float> first_residual = random_values(5000);
  const std::vector<float> begin = first_residual;
  const Encoded first = code(usable.front(), encoding, values, &first_residual);
  for (const Variant& variant : usable) {
    std::vector<float> residual = begin;
    const Encoded coded = code(variant, encoding, values, &residual);
    CHECK(coded.bytes == first.bytes);
    CHECK(std::memcmp(coded.decoded.data(), first.decoded.data(), 4 * values.size()) == 0);
    CHECK(std::memcmp(residual.data(), first_residual.data(), 4 * values.size()) == 0);
  }
}

std::vector<Variant> usable() {
  std::vector<Variant> all;
  for (const Variant& variant : phalanx::kernels::variants) {
    if (variant.runs_here()) all.push_back(variant);
  }
  return all;
}

void for_all(void (*test)(const Variant&, Encoding)) {
  for (const Variant& variant : usable()) {
    for (const Encoding encoding : encodings) test(variant, encoding);
  }
}

TEST(errors_are_bounded) { for_all(test_errors); }
TEST(what_is_lost_is_added_later) { for_all(test_feedback); }
TEST(special_values) { for_all(test_special_values); }
TEST(equal_bits) {
  for (const Encoding encoding : encodings) test_equal_bits(usable(), encoding);
}

}  // namespace
