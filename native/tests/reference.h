// A slow oracle for the reductions, independent of the kernels: element by element, floats computed
// in a wider type and rounded after each step, 16-bit formats decoded and encoded by arithmetic.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "phalanx/reduce.h"

namespace reference {

using phalanx::DType;
using phalanx::ReduceOp;

// More than twice the precision of the type, so that double rounding equals single rounding.
#if defined(__x86_64__)
__extension__ using Quad = __float128;
#else
using Quad = long double;
#endif
template <class T>
using Wider = std::conditional_t<std::is_same_v<T, float>, double, Quad>;

template <class T>
struct Ordinary {
  using Stored = T;
  using Value = T;
  static Value decode(Stored x) { return x; }
  static Stored encode(Value x) {
    if constexpr (std::is_floating_point_v<T>) {
      if (std::isnan(x)) return std::numeric_limits<T>::quiet_NaN();
    }
    return x;
  }
};

template <int mantissa, int bias>
struct Short {
  using Stored = std::uint16_t;
  using Value = float;
  static constexpr int last_exponent = 2 * bias + 1;

  static float decode(Stored bits) {
    const int exponent = (bits & 0x7fff) >> mantissa;
    const int fraction = bits & ((1 << mantissa) - 1);
    float x = INFINITY;
    if (exponent == last_exponent && fraction != 0) x = NAN;
    if (exponent == 0) x = std::ldexp(static_cast<float>(fraction), 1 - bias - mantissa);
    if (exponent != 0 && exponent != last_exponent) {
      x = std::ldexp(static_cast<float>(fraction + (1 << mantissa)), exponent - bias - mantissa);
    }
    return (bits & 0x8000) != 0 ? -x : x;
  }

  static Stored encode(float x) {
    const int infinity = last_exponent << mantissa;
    if (std::isnan(x)) return static_cast<Stored>(infinity | 1 << (mantissa - 1));
    int bits = infinity;
    if (!std::isinf(x)) {
      const int exponent = x == 0 ? 1 - bias : std::max(std::ilogb(x), 1 - bias);
      const double units = std::ldexp(static_cast<double>(std::fabs(x)), mantissa - exponent);
      bits = ((exponent + bias - 1) << mantissa) + static_cast<int>(std::nearbyint(units));
      bits = std::min(bits, infinity);
    }
    return static_cast<Stored>(bits | (std::signbit(x) ? 0x8000 : 0));
  }
};

using Float16 = Short<10, 15>;
using BFloat16 = Short<7, 127>;

template <class T>
T rounded(T a, ReduceOp op, T b) {
  const Wider<T> x = a, y = b;
  return static_cast<T>(op == ReduceOp::product ? x * y : x + y);
}

template <class T>
T combine(T a, ReduceOp op, T b) {
  if (op == ReduceOp::min) {
    if constexpr (std::is_floating_point_v<T>) {
      if (std::isnan(a) || std::isnan(b)) return NAN;
    }
    return a < b ? a : b;
  }
  if (op == ReduceOp::max) {
    if constexpr (std::is_floating_point_v<T>) {
      if (std::isnan(a) || std::isnan(b)) return NAN;
    }
    return a > b ? a : b;
  }
  if constexpr (std::is_floating_point_v<T>) {
    return rounded(a, op, b);
  } else {
    const auto x = static_cast<std::uint64_t>(+a), y = static_cast<std::uint64_t>(+b);
    std::uint64_t result = 0;
    if (op == ReduceOp::sum) result = x + y;
    if (op == ReduceOp::product) result = x * y;
    if (op == ReduceOp::band) result = x & y;
    if (op == ReduceOp::bor) result = x | y;
    if (op == ReduceOp::bxor) result = x ^ y;
    return static_cast<T>(result);
  }
}

inline bool combine(bool a, ReduceOp op, bool b) {
  if (op == ReduceOp::bxor) return a != b;
  const bool any = op == ReduceOp::sum || op == ReduceOp::max || op == ReduceOp::bor;
  return any ? a || b : a && b;
}

template <class T>
struct Parts {
  T real, imaginary;
};

template <class T>
Parts<T> combine(Parts<T> a, ReduceOp op, Parts<T> b) {
  if (op != ReduceOp::product) {
    return {rounded(a.real, op, b.real), rounded(a.imaginary, op, b.imaginary)};
  }
  const T minus = -rounded(a.imaginary, op, b.imaginary);
  return {
      rounded(rounded(a.real, op, b.real), ReduceOp::sum, minus),
      rounded(rounded(a.real, op, b.imaginary), ReduceOp::sum, rounded(a.imaginary, op, b.real))};
}

template <class T>
T divided(T x, double divisor) {
  return static_cast<T>(static_cast<Wider<T>>(x) / static_cast<T>(divisor));
}
template <class T>
Parts<T> divided(Parts<T> x, double divisor) {
  return {divided(x.real, divisor), divided(x.imaginary, divisor)};
}

template <class T>
T multiplied(T x, double factor) {
  return rounded(x, ReduceOp::product, static_cast<T>(factor));
}
template <class T>
Parts<T> multiplied(Parts<T> x, double factor) {
  return {multiplied(x.real, factor), multiplied(x.imaginary, factor)};
}

template <class T>
struct Complex {
  using Stored = Parts<T>;
  using Value = Parts<T>;
  static Value decode(Stored x) { return x; }
  static Stored encode(Value x) {
    return {Ordinary<T>::encode(x.real), Ordinary<T>::encode(x.imaginary)};
  }
};

// Calls f<Format>() for the format of `dtype`.
template <class F>
void with_format(DType dtype, F f) {
  switch (dtype) {
    case DType::boolean: return f.template operator()<Ordinary<bool>>();
    case DType::uint8: return f.template operator()<Ordinary<std::uint8_t>>();
    case DType::int8: return f.template operator()<Ordinary<std::int8_t>>();
    case DType::uint16: return f.template operator()<Ordinary<std::uint16_t>>();
    case DType::int16: return f.template operator()<Ordinary<std::int16_t>>();
    case DType::uint32: return f.template operator()<Ordinary<std::uint32_t>>();
    case DType::int32: return f.template operator()<Ordinary<std::int32_t>>();
    case DType::uint64: return f.template operator()<Ordinary<std::uint64_t>>();
    case DType::int64: return f.template operator()<Ordinary<std::int64_t>>();
    case DType::float16: return f.template operator()<Float16>();
    case DType::bfloat16: return f.template operator()<BFloat16>();
    case DType::float32: return f.template operator()<Ordinary<float>>();
    case DType::float64: return f.template operator()<Ordinary<double>>();
    case DType::complex64: return f.template operator()<Complex<float>>();
    case DType::complex128: return f.template operator()<Complex<double>>();
  }
}

template <class Stored>
Stored read(const void* from, std::size_t i) {
  Stored x;
  std::memcpy(&x, static_cast<const char*>(from) + i * sizeof x, sizeof x);
  return x;
}

template <class Stored>
void write(void* to, std::size_t i, Stored x) {
  std::memcpy(static_cast<char*>(to) + i * sizeof x, &x, sizeof x);
}

inline void reduce(void* out, const void* const* sources, std::size_t n_sources, std::size_t count,
                   DType dtype, ReduceOp op, double divisor) {
  with_format(dtype, [&]<class Format> {
    using Stored = typename Format::Stored;
    for (std::size_t i = 0; i < count; ++i) {
      auto value = Format::decode(read<Stored>(sources[0], i));
      for (std::size_t s = 1; s < n_sources; ++s) {
        value = combine(value, op, Format::decode(read<Stored>(sources[s], i)));
      }
      if constexpr (!std::is_integral_v<typename Format::Value>) {
        if (op == ReduceOp::avg) value = divided(value, divisor);
      }
      write<Stored>(out, i, Format::encode(value));
    }
  });
}

// For floats and complex numbers.
inline void scale(void* out, const void* in, std::size_t count, DType dtype, double factor) {
  with_format(dtype, [&]<class Format> {
    using Stored = typename Format::Stored;
    using Value = typename Format::Value;
    for (std::size_t i = 0; i < count; ++i) {
      if constexpr (!std::is_integral_v<Value>) {
        write<Stored>(out, i,
                      Format::encode(multiplied(Format::decode(read<Stored>(in, i)), factor)));
      }
    }
  });
}

}  // namespace reference
