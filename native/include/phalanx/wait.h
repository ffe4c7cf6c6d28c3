// Waiting for a peer: a spin with an adaptive length, then sleep on a futex.
//
// The handshake that loses no wake-up (an event count):
//   waiter:   sleepers += 1; t = ticket; if (!ready()) futex_wait(ticket, t); sleepers -= 1
//   notifier: make ready() true; if (sleepers += 0) { ticket += 1; futex_wake(ticket) }
// Waiter and notifier both write `sleepers`, so one of the two writes is first. If the waiter's is,
// the notifier sees the sleeper. If the notifier's is, the waiter sees all that came before it, and
// ready() is true. In the former case the ticket has changed before the kernel compares it, or the
// wake-up finds the waiter asleep. A waiter killed in between leaves `sleepers` too high, which
// causes needless wake-ups from then on, but never a lost one.
//
// A notifier that does not own the event would take its cache line from the owner with each of
// these writes. It may only read `sleepers` (notify_peer), if the store that makes ready() true,
// and the load in ready(), are seq_cst: each side then writes its own word and reads the other's.
#pragma once

#include <chrono>
#include <cstdint>

#include "phalanx/hooks.h"
#include "phalanx/segment.h"
#include "phalanx/status.h"

namespace phalanx {

using Clock = std::chrono::steady_clock;

// The limits of one call, and its environment.
class Bounds {
 public:
  // The time that the call may wait, counted from its first wait that is not short.
  Clock::duration timeout = Clock::duration::max();
  // Called while waiting, some ten times a second and when a signal arrives; true ends the wait.
  bool (*interrupted)() = nullptr;
  // Called before waits that are not short, and before long copies: other threads of the process
  // should be able to run meanwhile. A further call does nothing.
  void (*blocks)() = nullptr;
  // Whether a rank that only gives data in a collective may return before its peers have entered
  // it.
  bool runs_ahead = false;

  Bounds within(Clock::duration time) const {
    Bounds other = *this;
    other.timeout = time;
    return other;
  }
  void block() const {
    if (blocks != nullptr) {
      blocks();
    }
  }
  Clock::time_point deadline(Clock::time_point now) const {
    if (deadline_ == Clock::time_point{}) {
      const bool endless = timeout >= Clock::time_point::max() - now;
      deadline_ = endless ? Clock::time_point::max() : now + timeout;
    }
    return deadline_;
  }

 private:
  mutable Clock::time_point deadline_;
};

// Wakes all sleepers on `event`. The store that makes them ready comes before.
inline void notify(Event& event);
// The same for an event of another rank. The store that makes sleepers ready was seq_cst, and so is
// the load by which they find that.
inline void notify_peer(Event& event);
// The same, even if no sleeper is known.
void notify_always(Event& event);

// A lock of the process that owns an event, in the word that counts its sleepers: a thread that
// unlocks it learns of sleepers by the same access. It means nothing to other processes.
inline constexpr std::uint32_t kLocked = std::uint32_t{1} << 31;
inline bool try_lock(Event& event) {
  return (event.sleepers.fetch_or(kLocked, std::memory_order_acquire) & kLocked) == 0;
}
inline void unlock_and_notify(Event& event);

// The number of processors that this process may run on.
int usable_cores();

// Lets the processor do something else for some nanoseconds.
inline void cpu_relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

// Checks `ready` for about a microsecond.
template <class Ready>
bool look_briefly(Ready&& ready) {
  constexpr int kChecks = 32;
  for (int i = 0; i < kChecks; ++i) {
    if (ready()) {
      return true;
    }
    cpu_relax();
  }
  return false;
}

// Decides how long to spin before sleep. With a core for each rank, a thread spins at least for as
// long as a wake-up takes, which it measures: so a wait never costs more than twice the best
// (Karlin et al. 1991, competitive algorithms for spinning). On a machine with other work that is
// some time slices, since a thread that is woken waits for a core. Without other work it is some
// microseconds; a thread spins for longer then, since nobody wants the core. With more ranks than
// cores, the peer is most likely waiting for this very core: so a thread yields, and sleeps soon.
// Used by one thread at a time.
class SpinPolicy {
 public:
  explicit SpinPolicy(int ranks);
  // For a thread of low priority, which does not spin.
  static SpinPolicy no_spin();

  // Returns true once `ready` is; false when it is time to sleep.
  template <class Ready>
  bool spin(Ready&& ready);

  // Whether the awaited rank has last been seen on the core of this thread: a spin would delay it.
  void set_same_core(bool same) { same_core_ = same; }
  // Records that a sleeping thread has been woken, and the time from the notification until now.
  void record_wake_up(Clock::duration delay);
  // Marks the begin of a wait, which may end before there is anything to record.
  void begin() { last_wait_ = {}; }
  // Records the total length of a wait.
  void record_wait(Clock::duration waited);
  // The same of a wait that ended before a spin.
  void record_short_wait() { typical_wait_ -= typical_wait_ / 8; }
  // The length of the last wait; zero if it was satisfied at once.
  Clock::duration last_wait() const { return last_wait_; }

 private:
  // Checks take this long if the thread was preempted. That happens a few times in a spin, which is
  // not longer than two time slices; more such delays are due to `ready`.
  static constexpr Clock::duration kPreempted = std::chrono::microseconds(30);
  static constexpr int kMostPreemptions = 4;

  static void yield();
  Clock::duration spin_limit() const;

  bool oversubscribed_;
  bool spins_ = true;
  bool same_core_ = false;
  Clock::duration typical_wait_{};
  Clock::duration wake_up_{};  // the typical time from a notification until the thread runs
  Clock::duration last_wait_{};
};

inline void notify(Event& event) {
  PHALANX_STEP("notify: check for sleepers");
  // acq_rel: pairs with the waiter's fetch_add in wait_until.
  if ((event.sleepers.fetch_add(0, std::memory_order_acq_rel) & ~kLocked) != 0) {
    notify_always(event);
  }
}

inline void notify_peer(Event& event) {
  PHALANX_STEP("notify: check for sleepers");
  // Pairs with the waiter's fetch_add in wait_until.
  if (event.sleepers.load(std::memory_order_seq_cst) != 0) {
    notify_always(event);
  }
}

inline void unlock_and_notify(Event& event) {
  PHALANX_STEP("notify: check for sleepers");
  // acq_rel: pairs with the waiter's fetch_add in wait_until, and with try_lock.
  if (event.sleepers.fetch_sub(kLocked, std::memory_order_acq_rel) != kLocked) {
    notify_always(event);
  }
}

enum class WakeReason { by_peer, by_time, by_signal };

// Sleeps for at most one slice. Afterwards the caller checks peers, deadline and signals.
WakeReason sleep_slice(std::atomic<std::uint32_t>& ticket, std::uint32_t seen);

template <class Ready>
bool SpinPolicy::spin(Ready&& ready) {
  if (look_briefly(ready)) {
    return true;
  }
  const auto start = Clock::now();
  auto limit = start + spin_limit();
  int preemptions = 0;
  for (auto now = start, before = start; now < limit; before = now, now = Clock::now()) {
    if (look_briefly(ready)) {
      return true;
    }
    if (oversubscribed_) {
      yield();
    } else if (now - before > kPreempted && ++preemptions <= kMostPreemptions) {
      limit += now - before;  // that was no spin
    }
  }
  return ready();
}

// The time since the last wake-up on `event`.
inline Clock::duration time_since_notification(const Event& event) {
  // relaxed: the kernel's wake-up orders it. Another notification may have come since.
  const std::uint64_t then = event.woken_at.load(std::memory_order_relaxed);
  return Clock::now().time_since_epoch() - std::chrono::nanoseconds(then);
}

// Waits until `ready()`. `peer_status()` is called once per slice and returns a status that is not
// ok if waiting is futile; what a peer published before its end still counts. Returns ok, the
// peer's status, `timeout` or `interrupted`.
template <class Ready, class PeerStatus>
Status wait_until(Event& event, SpinPolicy& spin_policy, const Bounds& bounds, Ready&& ready,
                  PeerStatus&& peer_status) {
  constexpr int kSlicesPerSignalCheck = 20;
  spin_policy.begin();
  if (ready()) {
    return {};
  }
  bounds.block();
  const auto start = Clock::now();
  const auto deadline = bounds.deadline(start);
  bool done = spin_policy.spin(ready);
  for (int slice = 1; !done; ++slice) {
    PHALANX_STEP("wait: announce");
    // Pairs with the read-modify-write in notify, and with the load in notify_peer.
    event.sleepers.fetch_add(1, std::memory_order_seq_cst);
    PHALANX_STEP("wait: read the ticket");
    // acquire: the check comes after it.
    const auto seen = event.ticket.load(std::memory_order_acquire);
    PHALANX_STEP("wait: check again");
    done = ready();
    const auto woken = done ? WakeReason::by_peer : sleep_slice(event.ticket, seen);
    PHALANX_STEP("wait: awake");
    event.sleepers.fetch_sub(1, std::memory_order_acq_rel);
    if (done || ready()) {
      if (!done && woken == WakeReason::by_peer) {
        spin_policy.record_wake_up(time_since_notification(event));
      }
      break;
    }
    if (woken == WakeReason::by_signal || slice % kSlicesPerSignalCheck == 0) {
      if (bounds.interrupted != nullptr && bounds.interrupted()) {
        return Status{.code = Code::interrupted};
      }
    }
    PHALANX_STEP("wait: check the peers");
    const Status status = peer_status();
    if (!status.ok()) {
      PHALANX_STEP("wait: last check");
      if (!ready()) {
        return status;
      }
      break;
    }
    if (Clock::now() >= deadline) {
      return Status{.code = Code::timeout};
    }
  }
  spin_policy.record_wait(Clock::now() - start);
  return {};
}

}  // namespace phalanx
