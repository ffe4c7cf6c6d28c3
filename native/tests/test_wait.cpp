// Waiting: no wake-up is lost, and every wait ends when it should.
#include "ranks.h"

using namespace phalanx;
using namespace std::chrono_literals;
using ranks::within;

namespace {

constexpr auto kNoTrouble = [] { return Status{}; };

struct Ball {
  std::atomic<std::uint64_t> value = 0;
  Event event{};
  std::atomic<int> late = 0;

  void hit(std::uint64_t to) {
    value.store(to, std::memory_order_seq_cst);
    notify(event);
  }

  // A wait that never ends before it has announced that it sleeps: `ready` is false until then.
  bool await(std::uint64_t target, Patience& patience, const Bounds& bounds) {
    const auto start = Clock::now();
    const auto ready = [&] {
      return event.sleepers.load() != 0 && value.load(std::memory_order_seq_cst) >= target;
    };
    const bool met = wait_until(event, patience, bounds, ready, kNoTrouble).ok();
    late += Clock::now() - start >= 5ms;  // a whole slice
    return met;
  }
};

std::atomic<int> asked;

}  // namespace

TEST(no_wake_up_is_lost) {
  const int rounds = ranks::scaled(100'000);
  Ball ping, pong;
  const Bounds bounds = within(100s);  // were each second wake-up lost, it would take 250
  Patience first(2), second(2);
  for (Patience* patience : {&first, &second}) {
    for (int i = 0; i < 100; ++i) patience->learn(1s);  // the shortest spins there are
  }
  std::thread peer([&] {
    ranks::Random random(1);
    for (int i = 1; i <= rounds; ++i) {
      if (!CHECK(ping.await(static_cast<std::uint64_t>(i), second, bounds))) return;
      if (random.one_in(64)) ranks::dawdle(random);
      pong.hit(static_cast<std::uint64_t>(i));
    }
  });
  for (int i = 1; i <= rounds; ++i) {
    ping.hit(static_cast<std::uint64_t>(i));
    if (!CHECK(pong.await(static_cast<std::uint64_t>(i), first, bounds))) break;
  }
  peer.join();
  // Some may be late on a busy machine, where a thread waits for its turn. Lost ones all are.
  if (!CHECK(ping.late + pong.late <= rounds / 20 + 20)) {
    std::printf("%d + %d late of %d\n", ping.late.load(), pong.late.load(), rounds);
  }
  CHECK_EQ(ping.event.sleepers.load(), 0u);
  CHECK_EQ(pong.event.sleepers.load(), 0u);
}

TEST(one_notification_wakes_all) {
  const int rounds = ranks::scaled(300);
  for (int round = 0; round < rounds; ++round) {
    Ball ball;
    std::vector<std::thread> sleepers;
    for (int i = 0; i < 4; ++i) {
      sleepers.emplace_back([&] {
        Patience patience(kMaxRanks);
        CHECK(ball.await(1, patience, within()));
      });
    }
    CHECK(ranks::eventually([&] { return ball.event.sleepers.load() == 4; }));
    ball.hit(1);
    for (std::thread& thread : sleepers) thread.join();
    CHECK_EQ(ball.event.sleepers.load(), 0u);
  }
}

TEST(nobody_asleep_costs_no_wake_up) {
  Event event{};
  notify(event);
  CHECK_EQ(event.ticket.load(), 0u);
  notify_always(event);
  CHECK_EQ(event.ticket.load(), 1u);
}

TEST(a_ticket_that_changed_is_not_slept_on) {
  std::atomic<std::uint32_t> ticket = 7;
  CHECK_EQ(sleep_slice(ticket, 6), Woken::by_peer);
  CHECK_EQ(sleep_slice(ticket, 7), Woken::by_time);
}

TEST(deadline_ends_a_wait_and_not_too_early) {
  for (const int ranks_given : {1, kMaxRanks}) {
    for (const auto time : {-1ms, 0ms, 3ms, 40ms}) {
      Event event{};
      Patience patience(ranks_given);
      const auto start = Clock::now();
      const Status status =
          wait_until(event, patience, within(time), [] { return false; }, kNoTrouble);
      CHECK_EQ(status.code, Code::timeout);
      const auto took = Clock::now() - start;
      CHECK(took >= time);
      CHECK(took < time + 20s);  // bounded, on a machine that may be busy
      CHECK_EQ(event.sleepers.load(), 0u);
    }
  }
}

TEST(what_is_ready_needs_no_time) {
  Event event{};
  Patience patience(2);
  CHECK(wait_until(event, patience, within(-1s), [] { return true; }, kNoTrouble).ok());
}

TEST(trouble_ends_a_wait) {
  Event event{};
  Patience patience(2);
  int looks = 0;
  const Status status = wait_until(
      event, patience, within(), [] { return false; },
      [&] {
        return ++looks < 3 ? Status{} : Status{.code = Code::peer_lost, .peer = 4};
      });
  CHECK_EQ(status.code, Code::peer_lost);
  CHECK_EQ(status.peer, 4);
  CHECK_EQ(looks, 3);
}

TEST(what_a_peer_did_before_its_end_counts) {
  Event event{};
  Patience patience(2);
  bool came = false;
  const Status status = wait_until(
      event, patience, within(), [&] { return came; },
      [&] {
        came = true;
        return Status{.code = Code::left, .peer = 1};
      });
  CHECK(status.ok());
}

TEST(caller_can_interrupt) {
  Event event{};
  Patience patience(2);
  asked = 0;
  Bounds bounds = within();
  bounds.interrupted = [] { return ++asked == 3; };
  const Status status = wait_until(event, patience, bounds, [] { return false; }, kNoTrouble);
  CHECK_EQ(status.code, Code::interrupted);
  CHECK_EQ(asked.load(), 3);
}

TEST(a_signal_is_looked_at_soon) {
  struct sigaction action{};
  action.sa_handler = [](int) {};
  action.sa_flags = SA_RESTART;  // as Python's handlers have it, unless told otherwise
  sigaction(SIGUSR2, &action, nullptr);
  Event event{};
  std::atomic<bool> ended = false;
  asked = 0;
  std::thread sleeper([&] {
    Patience patience(kMaxRanks);
    Bounds bounds = within();
    bounds.interrupted = [] { return ++asked >= 1; };
    CHECK_EQ(wait_until(event, patience, bounds, [] { return false; }, kNoTrouble).code,
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
