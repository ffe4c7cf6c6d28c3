// The time for records of operations: the monotonic clock, in a fraction of its cost.
#pragma once

#include <chrono>
#include <cstdint>

namespace phalanx {

// Reads the processor's cycle counter, and compares it with the monotonic clock some ten times a
// second. In between, the two differ by less than a microsecond. Without a counter of constant
// frequency it is the monotonic clock itself.
class RecordClock {
 public:
  // Nanoseconds of the monotonic clock, for the calling thread. May go back by less than a
  // microsecond.
  static std::uint64_t now() {
    thread_local RecordClock clock;
    return clock.read();
  }

 private:
  static std::uint64_t monotonic() {
    return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                          std::chrono::steady_clock::now().time_since_epoch())
                                          .count());
  }

#if defined(__x86_64__)
  std::uint64_t read() {
    const std::uint64_t ticks = __builtin_ia32_rdtsc();
    const std::uint64_t passed = ticks - ticks_;
    return passed < valid_ticks_ ? time_ + (passed * factor_ >> 32) : synchronize(ticks);
  }
  std::uint64_t synchronize(std::uint64_t ticks);

  std::uint64_t ticks_ = 0;        // at the last comparison
  std::uint64_t time_ = 0;         // at the same time, in nanoseconds
  std::uint64_t factor_ = 0;       // nanoseconds per tick, times 2^32
  std::uint64_t valid_ticks_ = 0;  // until the next comparison
#else
  std::uint64_t read() { return monotonic(); }
#endif
};

}  // namespace phalanx
