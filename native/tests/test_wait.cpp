// Waiting: no wake-up is lost, and every wait ends when it should.
#include <sys/syscall.h>
#include <unistd.h>

#include <fstream>
#include <string>

#include "ranks.h"

using namespace phalanx;
using namespace std::chrono_literals;
using ranks::within;

namespace {

constexpr auto kPeersAlive = [] { return Status{}; };

struct Counter {
  std::atomic<std::uint64_t> value = 0;
  std::atomic<std::uint64_t> notified = 0;
  Event event{};

  void advance(std::uint64_t to) {
    value.store(to, std::memory_order_seq_cst);
    notify(event);
    notified.store(to, std::memory_order_seq_cst);
  }

  // `ready` is false until the waiter has announced its sleep: no wait ends by spinning.
  bool await(std::uint64_t target, SpinPolicy& spin_policy, const Bounds& bounds) {
    const auto ready = [&] {
      return event.sleepers.load() != 0 && value.load(std::memory_order_seq_cst) >= target;
    };
    return wait_until(event, spin_policy, bounds, ready, kPeersAlive).ok();
  }

  // The handshake of wait_until, step by step. It detects what no clock shows on a busy machine: a
  // notifier that has finished, and has left a waiter asleep that had announced itself before.
  int await_watching(std::uint64_t target) {
    const auto ready = [&] { return value.load(std::memory_order_seq_cst) >= target; };
    int lost = 0;
    while (!ready()) {
      event.sleepers.fetch_add(1, std::memory_order_seq_cst);
      const auto seen = event.ticket.load(std::memory_order_seq_cst);
      if (!ready() && sleep_slice(event.ticket, seen) == WakeReason::by_time) {
        lost += notified.load() >= target && event.ticket.load() == seen;
      }
      event.sleepers.fetch_sub(1, std::memory_order_seq_cst);
    }
    return lost;
  }
};

std::atomic<int> asked;

}  // namespace

// Two threads alternate: up to `rounds` rounds, in the time that a test may take.
template <class Await>
void ping_pong(int rounds, Await&& await) {
  Counter ping, pong;
  const auto end = Clock::now() + 4s;
  std::atomic<int> last = rounds;
  std::thread peer([&] {
    ranks::Random random(1);
    for (int i = 1; i <= last; ++i) {
      await(ping, static_cast<std::uint64_t>(i), 0);
      if (random.one_in(64)) ranks::random_delay(random);
      pong.advance(static_cast<std::uint64_t>(i));
    }
  });
  for (int i = 1; i <= last; ++i) {
    if (Clock::now() > end) last = i;  // before the peer can read it after this round
    ping.advance(static_cast<std::uint64_t>(i));
    await(pong, static_cast<std::uint64_t>(i), 1);
  }
  peer.join();
  CHECK(last >= 10);
  CHECK_EQ(ping.event.sleepers.load() + pong.event.sleepers.load(), 0u);
}

TEST(no_wake_up_is_lost) {
  std::atomic<int> lost = 0;
  ping_pong(100'000, [&](Counter& counter, std::uint64_t target, int) {
    lost += counter.await_watching(target);
  });
  CHECK_EQ(lost.load(), 0);
}

TEST(sleeping_waits_end) {
  SpinPolicy spin_policy[] = {SpinPolicy(2), SpinPolicy(2)};
  for (SpinPolicy& each : spin_policy) {
    for (int i = 0; i < 100; ++i) each.record_wait(1s);  // the shortest possible spins
  }
  ping_pong(100'000, [&](Counter& counter, std::uint64_t target, int player) {
    CHECK(counter.await(target, spin_policy[player], within()));
  });
}

TEST(one_notification_wakes_all) {
  const int rounds = ranks::scaled(300);
  for (int round = 0; round < rounds; ++round) {
    Counter counter;
    std::vector<std::thread> sleepers;
    for (int i = 0; i < 4; ++i) {
      sleepers.emplace_back([&] {
        SpinPolicy spin_policy(kMaxRanks);
        CHECK(counter.await(1, spin_policy, within()));
      });
    }
    CHECK(ranks::eventually([&] { return counter.event.sleepers.load() == 4; }));
    counter.advance(1);
    for (std::thread& thread : sleepers) thread.join();
    CHECK_EQ(counter.event.sleepers.load(), 0u);
  }
}

// Whether the kernel reports that a thread of this process sleeps.
bool asleep(int thread) {
  char path[64];
  std::snprintf(path, sizeof path, "/proc/self/task/%d/stat", thread);
  std::ifstream file(path);
  std::string stat;
  std::getline(file, stat);
  const auto name_end = stat.rfind(')');
  return name_end != std::string::npos && stat.compare(name_end, 3, ") S") == 0;
}

// All threads that were seen asleep are woken by the notification, not because their slice ends. On
// a busy machine a slice may end first, hence several attempts.
void threads_asleep_are_woken(void (*prepare)(Event&), void (*notify_all)(Event&)) {
  constexpr int n_sleepers = 3;
  const auto all_woken = [&] {
    Event event{};
    prepare(event);
    std::atomic<int> woken_by_peer = 0;
    std::atomic<int> ids[n_sleepers] = {};
    std::vector<std::thread> sleepers;
    for (auto& id : ids) {
      sleepers.emplace_back([&] {
        event.sleepers.fetch_add(1);
        const auto seen = event.ticket.load();
        id = static_cast<int>(syscall(SYS_gettid));
        woken_by_peer += sleep_slice(event.ticket, seen) == WakeReason::by_peer;
      });
    }
    bool all_asleep = true;
    for (auto& id : ids) {
      CHECK(ranks::eventually([&] { return id.load() != 0; }));
      const auto end = Clock::now() + 5ms;
      while (!asleep(id) && Clock::now() < end) sched_yield();
      all_asleep = all_asleep && asleep(id);
    }
    notify_all(event);
    for (std::thread& each : sleepers) each.join();
    return all_asleep && woken_by_peer == n_sleepers;
  };
  bool woken = false;
  const auto end = Clock::now() + 30s;
  while (!woken && Clock::now() < end) woken = all_woken();
  CHECK(woken);
}

TEST(threads_asleep_in_the_kernel_are_woken) {
  threads_asleep_are_woken([](Event&) {}, [](Event& event) { notify(event); });
}

TEST(unlocking_wakes_threads_asleep_in_the_kernel) {
  threads_asleep_are_woken([](Event& event) { CHECK(try_lock(event)); },
                           [](Event& event) { unlock_and_notify(event); });
}

TEST(no_sleeper_means_no_wake_up) {
  Event event{};
  notify(event);
  CHECK_EQ(event.ticket.load(), 0u);
  notify_always(event);
  CHECK_EQ(event.ticket.load(), 1u);
}

TEST(a_changed_ticket_prevents_sleep) {
  std::atomic<std::uint32_t> ticket = 7;
  CHECK_EQ(sleep_slice(ticket, 6), WakeReason::by_peer);
  CHECK_EQ(sleep_slice(ticket, 7), WakeReason::by_time);
}

// The time slice of a thread in nanoseconds; 0 if the kernel does not tell it.
std::uint64_t time_slice(int thread) {
  struct {
    std::uint32_t size, policy;
    std::uint64_t flags;
    std::int32_t nice;
    std::uint32_t priority;
    std::uint64_t runtime, deadline, period;
  } attributes{};
  const long failed = syscall(SYS_sched_getattr, thread, &attributes, sizeof attributes, 0);
  return failed == 0 ? attributes.runtime : 0;
}

// Of a thread that other threads keep from its core: once it runs again, its slices are its own.
TEST(time_slices_are_short_only_in_a_sleep) {
  const std::uint64_t usual = time_slice(gettid());
  std::atomic<int> thread = 0;
  std::atomic<bool> over = false;
  std::atomic<std::uint32_t> ticket = 7;
  std::uint64_t afterwards = 0;
  std::thread sleeper([&] {
    SpinPolicy spin_policy(2);
    for (int i = 0; i < 100; ++i) {
      spin_policy.record_wait(1s);
      spin_policy.record_wake_up(1s);
    }
    thread = gettid();
    while (!over) sleep_slice(ticket, 7);
    afterwards = time_slice(gettid());
  });
  CHECK(ranks::eventually([&] { return thread != 0; }));
  if (usual > 100'000) {
    CHECK(ranks::eventually([&] { return time_slice(thread) == 100'000; }));
  }
  over = true;
  sleeper.join();
  CHECK_EQ(afterwards, usual);
}

TEST(the_deadline_ends_a_wait_and_not_too_early) {
  for (const int ranks_given : {1, kMaxRanks}) {
    for (const auto time : {-1ms, 0ms, 3ms, 40ms}) {
      Event event{};
      SpinPolicy spin_policy(ranks_given);
      const auto start = Clock::now();
      const Status status =
          wait_until(event, spin_policy, within(time), [] { return false; }, kPeersAlive);
      CHECK_EQ(status.code, Code::timeout);
      CHECK(Clock::now() - start >= time);
      CHECK_EQ(event.sleepers.load(), 0u);
    }
  }
}

TEST(a_satisfied_condition_needs_no_time) {
  Event event{};
  SpinPolicy spin_policy(2);
  CHECK(wait_until(event, spin_policy, within(-1s), [] { return true; }, kPeersAlive).ok());
}

TEST(a_failed_peer_ends_a_wait) {
  Event event{};
  SpinPolicy spin_policy(2);
  int looks = 0;
  const Status status = wait_until(
      event, spin_policy, within(), [] { return false; },
      [&] { return ++looks < 3 ? Status{} : Status{.code = Code::peer_lost, .peer = 4}; });
  CHECK_EQ(status.code, Code::peer_lost);
  CHECK_EQ(status.peer, 4);
  CHECK_EQ(looks, 3);
}

TEST(actions_of_a_peer_before_its_end_count) {
  Event event{};
  SpinPolicy spin_policy(2);
  bool came = false;
  const Status status = wait_until(
      event, spin_policy, within(), [&] { return came; },
      [&] {
        came = true;
        return Status{.code = Code::left, .peer = 1};
      });
  CHECK(status.ok());
}

// With many peers, or under a sanitizer, a check takes as long as a preemption would.
TEST(slow_checks_do_not_prolong_a_spin) {
  SpinPolicy spin_policy(1);
  const auto end = Clock::now() + 30s;
  const auto slow = [&] {
    const auto until = Clock::now() + 5us;
    while (Clock::now() < until) cpu_relax();
    return until > end;
  };
  CHECK(!spin_policy.spin(slow));
}

TEST(the_caller_can_interrupt_a_wait) {
  Event event{};
  SpinPolicy spin_policy(2);
  asked = 0;
  Bounds bounds = within();
  bounds.interrupted = [] { return ++asked == 3; };
  const Status status = wait_until(event, spin_policy, bounds, [] { return false; }, kPeersAlive);
  CHECK_EQ(status.code, Code::interrupted);
  CHECK_EQ(asked.load(), 3);
}

TEST(a_signal_is_noticed_soon) {
  struct sigaction action{};
  action.sa_handler = [](int) {};
  action.sa_flags = SA_RESTART;  // as Python's handlers do by default
  sigaction(SIGUSR2, &action, nullptr);
  Event event{};
  std::atomic<bool> ended = false;
  asked = 0;
  std::thread sleeper([&] {
    SpinPolicy spin_policy(kMaxRanks);
    Bounds bounds = within();
    bounds.interrupted = [] { return ++asked >= 1; };
    CHECK_EQ(wait_until(
                 event, spin_policy, bounds, [] { return false; }, kPeersAlive)
                 .code,
             Code::interrupted);
    ended = true;
  });
  CHECK(ranks::eventually([&] {
    if (!ended) pthread_kill(sleeper.native_handle(), SIGUSR2);
    return ended.load();
  }));
  sleeper.join();
}

TEST(usable_cores_follow_the_affinity) {
  cpu_set_t all;
  CHECK_EQ(sched_getaffinity(0, sizeof all, &all), 0);
  CHECK_EQ(usable_cores(), CPU_COUNT(&all));
  cpu_set_t one;
  CPU_ZERO(&one);
  int core = 0;
  while (!CPU_ISSET(core, &all)) ++core;
  CPU_SET(core, &one);
  CHECK_EQ(sched_setaffinity(0, sizeof one, &one), 0);
  CHECK_EQ(usable_cores(), 1);
  CHECK_EQ(sched_setaffinity(0, sizeof all, &all), 0);
}
