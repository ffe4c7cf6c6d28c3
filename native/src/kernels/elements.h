// Element types of the kernels.
//
// An element type has the type `Stored` in memory. `load` and `store` convert between `lanes` of
// those and a `Pack`: a vector of the type in which they are combined. Vectors are the compiler's
// vector types, as wide as the instruction set provides.
#pragma once

#include <stddef.h>
#include <stdint.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace phalanx::kernels {
namespace {

#if defined(__AVX512F__)
constexpr size_t pack_bytes = 64;
#elif defined(__AVX2__)
constexpr size_t pack_bytes = 32;
#else
constexpr size_t pack_bytes = 16;
#endif

template <class T, size_t lanes>
struct VectorOf {
  typedef T type __attribute__((vector_size(lanes * sizeof(T))));
};
template <class T, size_t lanes = pack_bytes / sizeof(T)>
using Vector = typename VectorOf<T, lanes>::type;

template <class T>
struct Integer {
  using Stored = T;
  using Pack = Vector<T>;
  static constexpr size_t lanes = pack_bytes / sizeof(T);

  static Pack load(const Stored* from) {
    Pack x;
    __builtin_memcpy(&x, from, sizeof x);
    return x;
  }
  static void store(Stored* to, Pack x) { __builtin_memcpy(to, &x, sizeof x); }
};

// The NaN that results from an operation depends on the CPU and on the order of its operands, which
// the compiler may swap. Storing always the same NaN keeps the bits equal.
template <class T>
struct Real : Integer<T> {
  using typename Integer<T>::Pack;
  static constexpr T nan = static_cast<T>(__builtin_nanf(""));

  static Pack one_nan(Pack x) { return x == x ? x : Pack{} + nan; }
  static void store(T* to, Pack x) { Integer<T>::store(to, one_nan(x)); }
};

// The 16-bit floats are combined as float32. If no instruction converts them, words of 32 bits are
// loaded that hold two each: the halves go to the same lane of two vectors, which needs no shuffle.
using Floats = Vector<float>;
using Words = Vector<int32_t>;  // signed: SSE2 compares no others
using UnsignedWords = Vector<uint32_t>;

struct Pair {
  Floats low;
  Floats high;
};

inline Words bits_of(Floats x) { return reinterpret_cast<Words>(x); }
inline Floats floats_of(Words x) { return reinterpret_cast<Floats>(x); }

// `Half` converts from and to the upper halves of words. The lower halves are zero on input, and
// ignored on output.
template <class Half>
struct HalfPair {
  using Stored = uint16_t;
  using Pack = Pair;
  static constexpr size_t lanes = sizeof(Words) / sizeof(uint16_t);

  static Pack load(const Stored* from) {
    Words words;
    __builtin_memcpy(&words, from, sizeof words);
    return {Half::load(words << 16), Half::load(words & ~0xffff)};
  }
  static void store(Stored* to, Pack x) {
    const auto low = reinterpret_cast<UnsignedWords>(Half::store(x.low)) >> 16;
    const Words words = reinterpret_cast<Words>(low) | (Half::store(x.high) & ~0xffff);
    __builtin_memcpy(to, &words, sizeof words);
  }
};

// The summand before the lower `n` bits are dropped, to round to nearest, ties to even.
template <int n>
inline Words rounding(Words x) {
  return ((x >> n) & 1) + ((1 << (n - 1)) - 1);
}

struct BFloat16Half {
  static Floats load(Words half) { return floats_of(half); }
  static Words store(Floats x) {
    const Words bits = bits_of(Real<float>::one_nan(x));
    return bits + rounding<16>(bits);
  }
};
using BFloat16 = HalfPair<BFloat16Half>;

#if defined(__AVX512F__)

struct Float16 {
  using Stored = uint16_t;
  using Pack = Floats;
  static constexpr size_t lanes = 16;
  static constexpr __mmask16 all = 0xffff;  // without a mask, GCC 12 warns inside the intrinsics

  static Pack load(const Stored* from) {
    return _mm512_maskz_cvtph_ps(all, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
  static void store(Stored* to, Pack x) {
    const __m256i halves =
        _mm512_maskz_cvtps_ph(all, Real<float>::one_nan(x), _MM_FROUND_TO_NEAREST_INT);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), halves);
  }
};

#elif defined(__F16C__)

struct Float16 {
  using Stored = uint16_t;
  using Pack = Floats;
  static constexpr size_t lanes = 8;

  static Pack load(const Stored* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  static void store(Stored* to, Pack x) {
    const __m128i halves = _mm256_cvtps_ph(Real<float>::one_nan(x), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), halves);
  }
};

#elif defined(__aarch64__)

struct Float16 {
  using Stored = uint16_t;
  using Pack = Floats;
  static constexpr size_t lanes = 4;

  static Pack load(const Stored* from) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from)));
  }
  static void store(Stored* to, Pack x) {
    vst1_u16(to, vreinterpret_u16_f16(vcvt_f16_f32(Real<float>::one_nan(x))));
  }
};

#else

// Float32 has 8 exponent bits with bias 127 and 23 mantissa bits; float16 has 5 with bias 15 and
// 10. Shifted by 3, a half has its exponent and mantissa at the positions of float32.
struct Float16Half {
  static constexpr int32_t rebias = (127 - 15) << 23;
  static constexpr int32_t least_normal = rebias + (1 << 23);  // 2^-14
  static constexpr int32_t too_large = rebias + (31 << 23);    // 2^16

  static Floats load(Words half) {
    const Words magnitude = (half & 0x7fffffff) >> 3;
    const Words not_finite = (magnitude >= (31 << 23)) & rebias;
    const Words normal = magnitude + rebias + not_finite;
    // 2^-14 + x has x as its mantissa. Programs may disable float32 subnormals; none occurs here.
    const Floats offset = floats_of(Words{} + least_normal);
    const Words subnormal = bits_of(floats_of(magnitude + least_normal) - offset);
    return floats_of((magnitude < (1 << 23) ? subnormal : normal) | (half & ~0x7fffffff));
  }

  static Words store(Floats x) {
    const Floats absolute = floats_of(bits_of(x) & 0x7fffffff);
    const Floats limit = floats_of(Words{} + too_large);         // becomes infinity
    const Floats limited = absolute < limit ? absolute : limit;  // also for NaN
    const Words shifted = bits_of(limited) - rebias;
    const Words normal = (shifted + rounding<13>(shifted)) << 3;
    // The last bit of 0.5 is that of a subnormal half: the sum rounds to it.
    const Words subnormal = (bits_of(limited + 0.5f) - bits_of(Floats{} + 0.5f)) << 16;
    const Words magnitude = bits_of(limited) < least_normal ? subnormal : normal;
    return magnitude | (x == x ? bits_of(x) & ~0x7fffffff : Words{} + (1 << 25));
  }
};
using Float16 = HalfPair<Float16Half>;

#endif

}  // namespace
}  // namespace phalanx::kernels
