// The operators on packs: `combine` takes two, `finish` ends a reduction.
#pragma once

namespace phalanx::kernels {
namespace {

struct Operator {
  template <class Pack>
  static Pack finish(Pack x, double) {
    return x;
  }
};

struct Sum : Operator {
  template <class Pack>
  static Pack combine(Pack a, Pack b) {
    return a + b;
  }
};

struct Product : Operator {
  template <class Pack>
  static Pack combine(Pack a, Pack b) {
    return a * b;
  }
};

// A NaN in b makes the comparison false, which chooses b.
struct Min : Operator {
  template <class Pack>
  static Pack combine(Pack a, Pack b) {
    return ((a < b) | (a != a)) ? a : b;
  }
};

struct Max : Operator {
  template <class Pack>
  static Pack combine(Pack a, Pack b) {
    return ((a > b) | (a != a)) ? a : b;
  }
};

struct And : Operator {
  template <class Pack>
  static Pack combine(Pack a, Pack b) {
    return a & b;
  }
};

struct Or : Operator {
  template <class Pack>
  static Pack combine(Pack a, Pack b) {
    return a | b;
  }
};

struct Xor : Operator {
  template <class Pack>
  static Pack combine(Pack a, Pack b) {
    return a ^ b;
  }
};

struct Avg : Sum {
  template <class Pack>
  static Pack finish(Pack x, double divisor) {
    return x / static_cast<decltype(+x[0])>(divisor);
  }
};

// On packs of alternating real and imaginary parts. Uses only sums of whole vectors: if GCC 12 sees
// alternating sums and differences, it fuses them with the products, even with -ffp-contract=off.
struct ComplexProduct : Operator {
  template <class Pack>
  static Pack combine(Pack a, Pack b) {
    Pack real, imaginary, sign, swapped;
    for (size_t i = 0; i < sizeof(Pack) / sizeof(a[0]); i += 2) {
      real[i] = real[i + 1] = a[i];
      imaginary[i] = imaginary[i + 1] = a[i + 1];
      sign[i] = -1;
      sign[i + 1] = 1;
      swapped[i] = b[i + 1];
      swapped[i + 1] = b[i];
    }
    return real * b + sign * (imaginary * swapped);
  }
};

// For a single source.
struct Scale : Operator {
  template <class Pack>
  static Pack combine(Pack, Pack b) {
    return b;
  }
  template <class Pack>
  static Pack finish(Pack x, double factor) {
    return x * static_cast<decltype(+x[0])>(factor);
  }
};

}  // namespace
}  // namespace phalanx::kernels
