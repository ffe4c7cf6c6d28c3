#include "phalanx/wait.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <ctime>
#include <utility>

namespace phalanx {
namespace {

using namespace std::chrono_literals;

// Limits the delay until a sleeping rank notices a death, an abort or a deadline.
constexpr long kSliceNanoseconds = 5'000'000;
constexpr auto kLongestSpin = 1000us;
constexpr auto kShortestSpin = 20us;
// With a yield at every check: the peer is most likely waiting for this very core.
constexpr auto kOversubscribedSpin = 50us;
// The longest spin for a wake-up: two time slices of the kernel.
constexpr auto kLongestWakeUp = 6000us;
constexpr auto kShortWait = 20us;
// A wake-up takes longer than this only if other threads have the cores.
constexpr auto kDelayedWakeUp = 200us;
// The shortest time slice that the kernel grants.
constexpr std::uint64_t kShortSlice = 100'000;

long futex(std::atomic<std::uint32_t>& word, int operation, std::uint32_t value,
           const timespec* timeout) {
  return syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), operation, value, timeout,
                 nullptr, 0);
}

}  // namespace

namespace {

// The kernel's struct sched_attr, which the C library lacks.
struct SchedulingAttributes {
  std::uint32_t size, policy;
  std::uint64_t flags;
  std::int32_t nice;
  std::uint32_t priority;
  std::uint64_t runtime, deadline, period;
};

// Whether the calling thread has been woken late, as other threads had the cores.
thread_local bool wakes_late = false;

// Short time slices for the calling thread while it sleeps, if it is woken late: since Linux 6.12,
// a thread that wakes up then runs before others in the middle of longer slices. Its share of the
// processor stays the same. Only the wake-up needs them. So the thread runs with its own again, and
// so do the threads and processes that it starts, which inherit them. Kernels and containers that
// do not allow that change nothing.
class ShortSlices {
 public:
  ShortSlices() {
    usual_.size = sizeof usual_;
    if (!wakes_late || syscall(SYS_sched_getattr, 0, &usual_, sizeof usual_, 0) != 0 ||
        usual_.policy != SCHED_OTHER || usual_.runtime <= kShortSlice) {
      return;
    }
    SchedulingAttributes shorter = usual_;
    shorter.runtime = kShortSlice;
    are_set_ = syscall(SYS_sched_setattr, 0, &shorter, 0) == 0;
  }
  ~ShortSlices() {
    if (are_set_) {
      (void)syscall(SYS_sched_setattr, 0, &usual_, 0);
    }
  }
  ShortSlices(const ShortSlices&) = delete;
  ShortSlices& operator=(const ShortSlices&) = delete;

 private:
  SchedulingAttributes usual_{};
  bool are_set_ = false;
};

}  // namespace

void notify_always(Event& event) {
  // relaxed: it is only a measurement.
  event.woken_at.store(static_cast<std::uint64_t>(Clock::now().time_since_epoch().count()),
                       std::memory_order_relaxed);
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
  if (oversubscribed_) {
    return spins_ ? kOversubscribedSpin : 0us;
  }
  if (!spins_ || same_core_) {
    return {};
  }
  if (typical_wait_ < kShortWait) {
    return kLongestWakeUp;
  }
  // A few times the typical wait covers nearly all waits.
  const Clock::duration usual =
      typical_wait_ > kLongestSpin
          ? Clock::duration(kShortestSpin)
          : std::clamp<Clock::duration>(4 * typical_wait_, 5 * kShortestSpin, kLongestSpin);
  return std::max(usual, wake_up_);
}

void SpinPolicy::record_wake_up(Clock::duration delay) {
  const auto shown = std::clamp<Clock::duration>(delay, 0us, kLongestWakeUp);
  wake_up_ += (shown - wake_up_) / 8;
  if (wake_up_ > kDelayedWakeUp && typical_wait_ > kShortWait) {
    wakes_late = true;
  }
}

void SpinPolicy::record_wait(Clock::duration waited) {
  last_wait_ = waited;
  typical_wait_ += (std::min<Clock::duration>(waited, 4 * kLongestSpin) - typical_wait_) / 8;
  if (typical_wait_ < kShortWait) {
    wakes_late = false;
  }
}

void SpinPolicy::yield() { sched_yield(); }

WakeReason sleep_slice(std::atomic<std::uint32_t>& ticket, std::uint32_t seen) {
  PHALANX_STEP("wait: sleep");
  const timespec slice{.tv_sec = 0, .tv_nsec = kSliceNanoseconds};
  int error = 0;
  {
    const ShortSlices short_slices;
    error = futex(ticket, FUTEX_WAIT, seen, &slice) == 0 ? 0 : errno;
  }
  if (error == 0 || error == EAGAIN) {
    return WakeReason::by_peer;
  }
  return error == EINTR ? WakeReason::by_signal : WakeReason::by_time;
}

}  // namespace phalanx
