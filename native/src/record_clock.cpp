#include "phalanx/record_clock.h"

#if defined(__x86_64__)

#include <cpuid.h>

namespace phalanx {
namespace {

bool has_constant_frequency() {
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  constexpr unsigned kInvariant = 1U << 8;
  return __get_cpuid(0x80000007, &a, &b, &c, &d) != 0 && (d & kInvariant) != 0;
}

// The shortest time that yields an exact factor, and the time for which it is used.
constexpr std::uint64_t kShortest = 2'000'000;
constexpr std::uint64_t kValid = 100'000'000;

}  // namespace

std::uint64_t RecordClock::synchronize(std::uint64_t ticks) {
  static const bool is_constant = has_constant_frequency();
  const std::uint64_t time = monotonic();
  const std::uint64_t passed = time - time_;
  if (!is_constant || (time_ != 0 && passed < kShortest)) {
    return time;
  }
  if (time_ != 0 && ticks > ticks_) {
    __extension__ using Wide = unsigned __int128;
    factor_ = static_cast<std::uint64_t>((static_cast<Wide>(passed) << 32) / (ticks - ticks_));
    valid_ticks_ = static_cast<std::uint64_t>((static_cast<Wide>(kValid) << 32) / factor_);
  }
  ticks_ = ticks;
  time_ = time;
  return time;
}

}  // namespace phalanx

#endif
