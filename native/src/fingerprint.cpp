#include "phalanx/fingerprint.h"

namespace phalanx {
namespace {

// The positions of the fields in the second word, from the lowest bit on.
constexpr int kRoot = 42;  // after the count; plus one, so that none fits
constexpr int kKind = 52;
constexpr int kDType = 56;
constexpr int kOp = 60;
static_assert(static_cast<int>(Kind::plan) < 16 && static_cast<int>(DType::complex128) < 16 &&
              static_cast<int>(ReduceOp::avg) < 16);

std::uint64_t field(std::uint64_t word, int position, int end) {
  return word << (64 - end) >> (64 - end + position);
}

}  // namespace

PackedFingerprint::PackedFingerprint(const Fingerprint& value)
    : sequence(value.sequence),
      rest(field(value.count, 0, kRoot) | static_cast<std::uint64_t>(value.root + 1) << kRoot |
           static_cast<std::uint64_t>(value.kind) << kKind |
           static_cast<std::uint64_t>(value.dtype) << kDType |
           static_cast<std::uint64_t>(value.op) << kOp) {}

Fingerprint PackedFingerprint::unpack() const {
  return {.sequence = sequence,
          .count = field(rest, 0, kRoot),
          .root = static_cast<std::int32_t>(field(rest, kRoot, kKind)) - 1,
          .kind = static_cast<Kind>(field(rest, kKind, kDType)),
          .dtype = static_cast<DType>(field(rest, kDType, kOp)),
          .op = static_cast<ReduceOp>(field(rest, kOp, 64))};
}

std::uint64_t extend_history(std::uint64_t history, const PackedFingerprint& next) {
  // The multiplication of MurmurHash's finalizer; two rounds, one for each word.
  constexpr std::uint64_t kFactor = 0xff51afd7ed558ccd;
  history = (history ^ next.sequence) * kFactor;
  history ^= history >> 32;
  history = (history ^ next.rest) * kFactor;
  return history ^ history >> 32;
}

}  // namespace phalanx
