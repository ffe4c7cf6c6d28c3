// Waiting for a peer: a spin whose length follows what was measured, then sleep on a futex.
//
// The hand-shake that loses no wake-up (an event count):
//   waiter:   sleepers += 1; t = ticket; if (!ready()) futex_wait(ticket, t); sleepers -= 1
//   notifier: make ready() true; if (sleepers != 0) { ticket += 1; futex_wake(ticket) }
// All five accesses to shared memory are seq_cst: either the waiter sees ready(), or the notifier
// sees the sleeper, in which case the ticket has changed before the kernel compares it, or the wake
// finds the waiter asleep. A waiter killed in between leaves `sleepers` too high: a needless wake
// from then on, never a missing one.
#pragma once

#include <chrono>
#include <cstdint>

#include "phalanx/hooks.h"
#include "phalanx/segment.h"
#include "phalanx/status.h"

namespace phalanx {

using Clock = std::chrono::steady_clock;

// The limits of one call.
struct Bounds {
  Clock::time_point deadline = Clock::time_point::max();
  // When the call began; unset: when somebody asks.
  Clock::time_point begin = {};
  // Asked while waiting, some ten times a second and when a signal arrives: true ends the wait.
  bool (*interrupted)() = nullptr;
};

// Wakes all who sleep on `event`. The store that makes them ready comes before and is seq_cst.
void notify(Event& event);
// The same, whether or not somebody is known to sleep.
void notify_always(Event& event);

// Processors that this process may run on.
int usable_cores();

// How long to spin before sleep. Three things shorten it: ranks that outnumber the cores; other
// work on the machine, seen by the core being taken away in the middle of a spin (the peer may be
// waiting for this very core); and past waits that outlasted the spin anyway. Belongs to one thread
// at a time.
class SpinPolicy {
 public:
  explicit SpinPolicy(int ranks);
  // Of a thread that stands behind all others: it doesn't spin.
  static SpinPolicy no_spin();

  // True once `ready` is; false when it is time to sleep.
  template <class Ready>
  bool spin(Ready&& ready);

  // A wait begins; it may be over before there is anything to learn from it.
  void begin() { last_wait_ = {}; }
  // Feeds back how long the wait took in all.
  void record_wait(Clock::duration waited);
  // How long the last wait took; zero: no time.
  Clock::duration last_wait() const { return last_wait_; }

 private:
  static constexpr int kPausesPerCheck = 32;
  // Past this the core is offered to others; where nobody wants it, that costs half a microsecond.
  static constexpr Clock::duration kYieldAfter = std::chrono::microseconds(10);
  // No look takes that long unless somebody else was given the core.
  static constexpr Clock::duration kPreempted = std::chrono::microseconds(30);
  // For how many waits that is remembered.
  static constexpr int kContendedWaits = 200;

  static void pause();
  static void yield();
  Clock::duration spin_limit() const;

  bool oversubscribed_;
  bool spins_ = true;
  int contended_waits_ = 0;
  Clock::duration typical_wait_{};
  Clock::duration last_wait_{};
};

enum class WakeReason { by_peer, by_time, by_signal };

// One sleep of at most a slice: after it, the caller looks at peers, deadline and signals.
WakeReason sleep_slice(std::atomic<std::uint32_t>& ticket, std::uint32_t seen);

template <class Ready>
bool SpinPolicy::spin(Ready&& ready) {
  for (int i = 0; i < kPausesPerCheck; ++i) {
    if (ready()) {
      return true;
    }
    pause();
  }
  const auto start = Clock::now();
  const auto limit = start + spin_limit();
  for (auto now = start, before = start; now < limit; before = now, now = Clock::now()) {
    // (Where ranks share cores, a yield takes that long by itself.)
    if (!oversubscribed_ && now - before > kPreempted) {
      contended_waits_ = kContendedWaits;
      break;
    }
    for (int i = 0; i < kPausesPerCheck; ++i) {
      if (ready()) {
        return true;
      }
      pause();
    }
    if (oversubscribed_ || now - start >= kYieldAfter) {
      yield();
    }
  }
  return ready();
}

// Waits until `ready()`. `trouble()` is asked once a slice and returns a status that is not ok when
// the wait is in vain; what a peer published before its end still counts. Returns ok, the trouble,
// `timeout` or `interrupted`.
template <class Ready, class PeerStatus>
Status wait_until(Event& event, SpinPolicy& spin_policy, const Bounds& bounds, Ready&& ready,
                  PeerStatus&& peer_status) {
  constexpr int kSlicesPerSignalCheck = 20;
  spin_policy.begin();
  if (ready()) {
    return {};
  }
  const auto start = Clock::now();
  bool done = spin_policy.spin(ready);
  for (int slice = 1; !done; ++slice) {
    PHALANX_STEP("wait: announce");
    event.sleepers.fetch_add(1, std::memory_order_seq_cst);
    PHALANX_STEP("wait: read the ticket");
    const auto seen = event.ticket.load(std::memory_order_seq_cst);
    PHALANX_STEP("wait: check again");
    done = ready();
    const auto woken = done ? WakeReason::by_peer : sleep_slice(event.ticket, seen);
    PHALANX_STEP("wait: awake");
    event.sleepers.fetch_sub(1, std::memory_order_seq_cst);
    if (done || ready()) {
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
    if (Clock::now() >= bounds.deadline) {
      return Status{.code = Code::timeout};
    }
  }
  spin_policy.record_wait(Clock::now() - start);
  return {};
}

}  // namespace phalanx
