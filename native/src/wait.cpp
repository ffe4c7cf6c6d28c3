#include "phalanx/wait.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <ctime>

namespace phalanx {
namespace {

using namespace std::chrono_literals;

// Limits the delay until a sleeping rank notices a death, an abort or a deadline.
constexpr long kSliceNanoseconds = 5'000'000;
constexpr auto kLongestSpin = 1000us;
constexpr auto kShortestSpin = 20us;
// With a yield at every check: the peer is most likely waiting for this very core.
constexpr auto kOversubscribedSpin = 50us;
constexpr auto kContendedSpin = 5us;

long futex(std::atomic<std::uint32_t>& word, int operation, std::uint32_t value,
           const timespec* timeout) {
  return syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), operation, value, timeout,
                 nullptr, 0);
}

}  // namespace

void notify_always(Event& event) {
  PHALANX_STEP("notify: change the ticket");
  // acq_rel: pairs with the waiter's load of the ticket, and with the kernel's comparison.
  event.ticket.fetch_add(1, std::memory_order_acq_rel);
  PHALANX_STEP("notify: wake");
  futex(event.ticket, FUTEX_WAKE, INT_MAX, nullptr);
}

int usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) != 0) {
    // There are more than CPU_SETSIZE processors.
    return static_cast<int>(std::max(1L, sysconf(_SC_NPROCESSORS_ONLN)));
  }
  return std::max(1, CPU_COUNT(&set));
}

SpinPolicy::SpinPolicy(int ranks) : oversubscribed_(ranks > usable_cores()) {}

SpinPolicy SpinPolicy::no_spin() {
  SpinPolicy spin_policy(1);
  spin_policy.spins_ = false;
  return spin_policy;
}

Clock::duration SpinPolicy::spin_limit() const {
  if (!spins_) {
    return {};
  }
  if (oversubscribed_) {
    return kOversubscribedSpin;
  }
  if (contended_waits_ > 0) {
    return kContendedSpin;
  }
  // A spin that ends in sleep wastes the core; a spin that ends just before the peer comes costs a
  // wake-up. A few times the typical wait covers nearly all waits.
  return typical_wait_ > kLongestSpin
             ? Clock::duration(kShortestSpin)
             : std::clamp<Clock::duration>(4 * typical_wait_, 5 * kShortestSpin, kLongestSpin);
}

void SpinPolicy::record_wait(Clock::duration waited) {
  last_wait_ = waited;
  contended_waits_ = std::max(0, contended_waits_ - 1);
  typical_wait_ += (std::min<Clock::duration>(waited, 4 * kLongestSpin) - typical_wait_) / 8;
}

void SpinPolicy::yield() { sched_yield(); }

WakeReason sleep_slice(std::atomic<std::uint32_t>& ticket, std::uint32_t seen) {
  PHALANX_STEP("wait: sleep");
  const timespec slice{.tv_sec = 0, .tv_nsec = kSliceNanoseconds};
  if (futex(ticket, FUTEX_WAIT, seen, &slice) == 0 || errno == EAGAIN) {
    return WakeReason::by_peer;
  }
  return errno == EINTR ? WakeReason::by_signal : WakeReason::by_time;
}

}  // namespace phalanx
