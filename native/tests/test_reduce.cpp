// The kernels of every instruction set of this CPU, against the oracle in reference.h.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <random>

#include "../src/kernels/kernels.h"
#include "check.h"
#include "reference.h"
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

using phalanx::DType;
using phalanx::ReduceOp;
using phalanx::size_of;
using phalanx::supports;
using phalanx::kernels::Table;
using phalanx::kernels::Variant;

namespace {

std::mt19937_64 make_random() {
  const unsigned seed = std::random_device{}();
  std::printf("seed %u\n", seed);
  return std::mt19937_64(seed);
}
std::mt19937_64 random_bits = make_random();

constexpr std::size_t n_dtypes = 15;
constexpr std::size_t n_ops = 9;
constexpr std::array names = {"bool",     "uint8",   "int8",    "uint16",    "int16",
                              "uint32",   "int32",   "uint64",  "int64",     "float16",
                              "bfloat16", "float32", "float64", "complex64", "complex128"};

std::vector<Variant> usable() {
  std::vector<Variant> all;
  for (const Variant& variant : phalanx::kernels::variants) {
    if (variant.runs_here()) all.push_back(variant);
  }
  return all;
}

auto kernel(const Table& table, DType dtype, ReduceOp op) {
  return table.reduce[static_cast<std::size_t>(dtype)][static_cast<std::size_t>(op)];
}

auto scale_kernel(const Table& table, DType dtype) {
  return table.scale[static_cast<std::size_t>(dtype)];
}

constexpr std::size_t fence = 192;

// Elements between two guards of poison, a few elements off the alignment of vectors. Without the
// second guard, a sanitizer detects reads past the end.
class Buffer {
 public:
  Buffer(std::size_t count, DType dtype, std::size_t fence_after = fence)
      : size_(count * size_of(dtype)),
        start_(fence + random_bits() % 4 * size_of(dtype)),
        bytes_(start_ + size_ + fence_after, poison) {}

  unsigned char* data() { return bytes_.data() + start_; }
  const unsigned char* data() const { return bytes_.data() + start_; }
  std::size_t size() const { return size_; }

  bool fences_stand() const {
    const auto whole = [](unsigned char byte) { return byte == poison; };
    return std::all_of(bytes_.begin(), bytes_.begin() + static_cast<long>(start_), whole) &&
           std::all_of(bytes_.begin() + static_cast<long>(start_ + size_), bytes_.end(), whole);
  }
  bool same(const Buffer& other) const { return std::memcmp(data(), other.data(), size_) == 0; }

 private:
  static constexpr unsigned char poison = 0xa5;
  std::size_t size_;
  std::size_t start_;
  std::vector<unsigned char> bytes_;
};

double tame() { return std::uniform_real_distribution(-4.0, 4.0)(random_bits); }

double special() {
  static constexpr double values[] = {
      0.0,     -0.0,     1.0,     -1.0,    0x1p-24,  -0x1p-24,  0x1p-25, 0x1p-14, 0x3p-25,
      65504.0, -65504.0, 65519.9, 65520.0, 0x1p-126, 1e-40,     -1e-45,  3.4e38,  -3.4e38,
      3.38e38, 1e-310,   1.7e308, 0.1,     INFINITY, -INFINITY, NAN,     -NAN};
  return values[random_bits() % std::size(values)];
}

// One of four elements is an arbitrary bit pattern, one is often special, two are moderate, so that
// not every result is NaN.
template <class Stored, class Encode>
void fill_floats(Buffer& buffer, std::size_t salt, Encode encode) {
  for (std::size_t i = 0; i < buffer.size() / sizeof(Stored); ++i) {
    Stored x = encode(tame());
    const std::uint64_t bits = random_bits();
    if ((i + salt) % 4 == 0) std::memcpy(&x, &bits, sizeof x);
    if ((i + salt) % 4 == 1 && bits % 3 == 0) x = encode(special());
    reference::write(buffer.data(), i, x);
  }
}

void fill(Buffer& buffer, DType dtype, std::size_t salt) {
  const auto as_float = [](double x) { return static_cast<float>(x); };
  switch (dtype) {
    case DType::float16:
      return fill_floats<std::uint16_t>(
          buffer, salt, [&](double x) { return reference::Float16::encode(as_float(x)); });
    case DType::bfloat16:
      return fill_floats<std::uint16_t>(
          buffer, salt, [&](double x) { return reference::BFloat16::encode(as_float(x)); });
    case DType::float32:
    case DType::complex64: return fill_floats<float>(buffer, salt, as_float);
    case DType::float64:
    case DType::complex128: return fill_floats<double>(buffer, salt, [](double x) { return x; });
    default:
      for (std::size_t i = 0; i < buffer.size(); ++i) {
        const std::uint64_t bits = random_bits();
        const bool small = bits % 4 == 0;  // bytes of 0 and -1 make integers near the limits
        const auto byte = static_cast<unsigned char>(bits >> 8);
        buffer.data()[i] = dtype == DType::boolean ? byte & 1 : small ? 0 - (byte & 1) : byte;
      }
  }
}

std::vector<const void*> pointers_to(const std::vector<Buffer>& buffers) {
  std::vector<const void*> pointers(buffers.size());
  std::transform(buffers.begin(), buffers.end(), pointers.begin(),
                 [](const Buffer& buffer) { return buffer.data(); });
  return pointers;
}

// One reduction by one variant; `alias` is the source that is also the output, or past the last
// one.
bool check_once(const Variant& variant, const std::vector<Buffer>& sources, std::size_t alias,
                const Buffer& expected, std::size_t count, DType dtype, ReduceOp op,
                double divisor) {
  Buffer out(count, dtype);
  std::vector<const void*> pointers = pointers_to(sources);
  if (alias < sources.size()) {
    std::memcpy(out.data(), sources[alias].data(), out.size());
    pointers[alias] = out.data();
  }
  const std::vector<Buffer> before(sources.begin(), sources.end());
  kernel(*variant.table, dtype, op)(out.data(), pointers.data(), pointers.size(), count, divisor);
  bool good = CHECK(out.fences_stand());
  good &= CHECK(out.same(expected));
  for (std::size_t s = 0; s < sources.size(); ++s) good &= CHECK(sources[s].same(before[s]));
  if (!good) {
    const auto differs = std::mismatch(out.data(), out.data() + out.size(), expected.data());
    std::fprintf(stderr,
                 "  %s, %s, op %d, %zu sources, %zu elements, alias %zu, first at byte %td\n",
                 variant.name, names[static_cast<std::size_t>(dtype)], static_cast<int>(op),
                 sources.size(), count, alias, differs.first - out.data());
  }
  return good;
}

bool check_all(DType dtype, ReduceOp op, std::size_t n_sources, std::size_t count) {
  const std::size_t salt = random_bits();
  std::vector<Buffer> sources;
  for (std::size_t s = 0; s < n_sources; ++s) {
    fill(sources.emplace_back(count, dtype, 0), dtype, salt);
  }
  const double divisor = op == ReduceOp::avg ? static_cast<double>(n_sources) : NAN;
  Buffer expected(count, dtype);
  reference::reduce(expected.data(), pointers_to(sources).data(), n_sources, count, dtype, op,
                    divisor);
  for (const Variant& variant : usable()) {
    for (std::size_t alias = 0; alias <= n_sources; ++alias) {
      if (!check_once(variant, sources, alias, expected, count, dtype, op, divisor)) return false;
    }
  }
  return true;
}

bool check_scale(DType dtype, const Buffer& in, double factor) {
  Buffer expected(in.size() / size_of(dtype), dtype);
  reference::scale(expected.data(), in.data(), in.size() / size_of(dtype), dtype, factor);
  bool good = true;
  for (const Variant& variant : usable()) {
    Buffer out = in;
    const void* source = in.data();
    scale_kernel(*variant.table, dtype)(out.data(), &source, 1, in.size() / size_of(dtype), factor);
    good &= CHECK(out.same(expected));
    source = (out = in).data();
    scale_kernel(*variant.table, dtype)(out.data(), &source, 1, in.size() / size_of(dtype), factor);
    good &= CHECK(out.same(expected)) && CHECK(out.fences_stand());
    if (!good) {
      std::fprintf(stderr, "  %s, dtype %d, factor %a\n", variant.name, static_cast<int>(dtype),
                   factor);
    }
  }
  return good;
}

Buffer every_half(DType dtype) {
  Buffer all(1 << 16, dtype);
  for (std::size_t i = 0; i < 1 << 16; ++i) {
    reference::write(all.data(), i, static_cast<std::uint16_t>(i));
  }
  return all;
}

template <class T>
T reduced(DType dtype, ReduceOp op, const std::vector<T>& values, double divisor = NAN) {
  std::vector<const void*> pointers(values.size());
  std::transform(values.begin(), values.end(), pointers.begin(), [](const T& x) { return &x; });
  T out;
  phalanx::reduce(&out, pointers.data(), pointers.size(), 1, dtype, op, divisor);
  return out;
}

}  // namespace

// First: the choice is made once per process, so the children must run before any use here.
TEST(the_environment_lowers_the_instruction_set) {
  std::string widest;
  for (const Variant& variant : usable()) widest = variant.name;
  std::vector<std::pair<std::string, std::string>> cases = {{"nonsense", widest}};
  for (const Variant& variant : phalanx::kernels::variants) {
    cases.emplace_back(variant.name, variant.runs_here() ? variant.name : widest);
  }
  for (const auto& [limit, expected] : cases) {
    const pid_t child = fork();
    if (child == 0) {
      setenv("PHALANX_ISA", limit.c_str(), 1);
      _exit(phalanx::instruction_set() == expected ? 0 : 1);
    }
    int status = -1;
    waitpid(child, &status, 0);
    CHECK_EQ(status, 0);
  }
}

TEST(every_operator_matches_the_reference) {
  for (std::size_t d = 0; d < n_dtypes; ++d) {
    for (std::size_t o = 1; o < n_ops; ++o) {
      const auto dtype = static_cast<DType>(d);
      const auto op = static_cast<ReduceOp>(o);
      if (!supports(dtype, op)) continue;
      bool good = true;
      for (std::size_t n_sources = 1; good && n_sources <= 9; ++n_sources) {
        for (std::size_t count : {0u, 1u, 2u, 3u, 7u, 31u, 32u, 33u, 1000u, 4099u}) {
          good = good && check_all(dtype, op, n_sources, count);
        }
      }
    }
  }
}

TEST(scale_matches_the_reference) {
  for (DType dtype : {DType::float16, DType::bfloat16, DType::float32, DType::float64,
                      DType::complex64, DType::complex128}) {
    for (std::size_t count : {0u, 1u, 5u, 33u, 1000u}) {
      Buffer in(count, dtype);
      fill(in, dtype, random_bits());
      check_scale(dtype, in, tame());
    }
  }
}

// Halves that need no change, ties, overflow, subnormals, and values in between.
TEST(every_half_is_converted_and_rounded) {
  for (DType dtype : {DType::float16, DType::bfloat16}) {
    const Buffer all = every_half(dtype);
    for (double factor :
         {1.0, 0.5, 0x1p-8, 0x1p-14, 0x3p-16, 1 / 3.0, 0.1, 3.7, 1e5, 1e-5, 1e30, 1e-38, tame()}) {
      check_scale(dtype, all, factor);
    }
  }
}

#if defined(__x86_64__)
// torch.set_flush_denormal: the conversion of float16 uses no float32 subnormals.
TEST(float16_survives_flush_to_zero) {
  const unsigned before = _mm_getcsr();
  const Buffer all = every_half(DType::float16);
  for (const Variant& variant : usable()) {
    Buffer out = all;
    const void* source = all.data();
    _mm_setcsr(before | 0x8040);
    scale_kernel(*variant.table, DType::float16)(out.data(), &source, 1, 1 << 16, 1.0);
    _mm_setcsr(before);
    for (std::size_t i = 0; i < 1 << 16; ++i) {
      const bool nan = (i & 0x7fff) > 0x7c00;
      const auto expected = static_cast<std::uint16_t>(nan ? 0x7e00 : i);
      if (!CHECK_EQ(reference::read<std::uint16_t>(out.data(), i), expected)) break;
    }
  }
}
#endif

TEST(known_results) {
  using Halves = std::vector<std::uint16_t>;
  const std::uint16_t bf256 = 0x4380, bf1 = 0x3f80, bf264 = 0x4384, f65504 = 0x7bff;
  CHECK_EQ(reduced<std::int8_t>(DType::int8, ReduceOp::sum, {127, 1}), -128);
  CHECK_EQ(reduced<std::int64_t>(DType::int64, ReduceOp::min, {3, -4, 5}), -4);
  CHECK_EQ(reduced<std::uint8_t>(DType::uint8, ReduceOp::max, {3, 250, 5}), 250);
  CHECK_EQ(reduced<float>(DType::float32, ReduceOp::avg, {1, 2}, 2), 1.5f);
  using Pair = std::array<float, 2>;
  const Pair product = reduced<Pair>(DType::complex64, ReduceOp::product, {{1, 2}, {3, 4}});
  CHECK_EQ(product[0], -5.0f);
  CHECK_EQ(product[1], 10.0f);
  CHECK(std::isnan(reduced<float>(DType::float32, ReduceOp::min, {NAN, 1})));
  CHECK(std::isnan(reduced<double>(DType::float64, ReduceOp::max, {1, NAN, 2})));
  // Rounding at each step would yield 256: the sum is rounded once.
  CHECK_EQ(reduced(DType::bfloat16, ReduceOp::sum,
                   Halves{bf256, bf1, bf1, bf1, bf1, bf1, bf1, bf1, bf1}),
           bf264);
  CHECK_EQ(reduced(DType::float16, ReduceOp::sum, Halves{f65504, f65504}), 0x7c00);
  CHECK_EQ(reduced(DType::float16, ReduceOp::avg, Halves{f65504, f65504}, 2), f65504);
}

TEST(supported_combinations) {
  for (std::size_t d = 0; d < n_dtypes; ++d) {
    const bool complex = d >= 13;
    const bool integer = d <= 8;
    const bool expected[n_ops] = {false,   true,    true,    !complex, !complex,
                                  integer, integer, integer, !integer};
    for (std::size_t o = 0; o < n_ops; ++o) {
      const auto dtype = static_cast<DType>(d);
      const auto op = static_cast<ReduceOp>(o);
      CHECK_EQ(supports(dtype, op), expected[o]);
      for (const Variant& variant : phalanx::kernels::variants) {
        CHECK_EQ(kernel(*variant.table, dtype, op) != nullptr, expected[o]);
      }
    }
  }
}

TEST(sizes) {
  for (std::size_t d = 0; d < n_dtypes; ++d) {
    const auto dtype = static_cast<DType>(d);
    reference::with_format(
        dtype, [&]<class Format> { CHECK_EQ(size_of(dtype), sizeof(typename Format::Stored)); });
  }
}
