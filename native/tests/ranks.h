// Ranks as threads over one segment, and common parts of the tests of the core.
//
// Threads may see the segment at one address (Segment::share). ThreadSanitizer, which identifies
// memory by address, then sees what one rank writes and another reads. Or each thread has its own
// mapping, as processes do.
#pragma once

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <barrier>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "check.h"
#include "phalanx/collective.h"
#include "phalanx/collectives.h"
#include "phalanx/hooks.h"
#include "phalanx/mailbox.h"

#if defined(__SANITIZE_THREAD__)
#define PHALANX_TEST_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define PHALANX_TEST_TSAN 1
#endif
#endif

namespace ranks {

using namespace phalanx;
using namespace std::chrono_literals;

// The divisor for the length of tests: sanitizers make everything about ten times slower.
#if defined(PHALANX_TEST_TSAN)
inline constexpr int kShare = 24;
#elif defined(__SANITIZE_ADDRESS__)
inline constexpr int kShare = 8;
#else
inline constexpr int kShare = 1;
#endif

constexpr int scaled(int rounds) { return rounds / kShare; }

// Every run has a new seed; PHALANX_TEST_SEED repeats one.
inline std::uint64_t make_seed() {
  const char* given = std::getenv("PHALANX_TEST_SEED");
  const std::uint64_t seed =
      given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device{}();
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  std::fflush(stdout);
  return seed;
}
inline const std::uint64_t seed = make_seed();

class Random {
 public:
  explicit Random(std::uint64_t stream) : engine_(seed * 1'000'003 + stream) {}
  std::uint64_t bits() { return engine_(); }
  // From 0 to n - 1.
  std::size_t below(std::size_t n) { return engine_() % n; }
  bool one_in(std::size_t n) { return below(n) == 0; }

 private:
  std::mt19937_64 engine_;
};

// No wait of a test is endless: a hang becomes a timeout.
inline Bounds within(Clock::duration time = 60s) { return Bounds{}.within(time); }

// Enters a collective that has no data.
inline Status enter(Group& group, const Fingerprint& own, const Bounds& bounds) {
  Collective collective(group, own, bounds);
  return collective.status().ok() ? collective.enter(Peers::all) : collective.status();
}

// Lets other threads run first, for an unpredictable time; never sleeps.
inline void random_delay(Random& random) {
  switch (random.below(8)) {
    case 0:
      for (std::size_t i = random.below(4); i > 0; --i) {
        sched_yield();
      }
      break;
    case 1: {
      const std::size_t turns = random.below(20'000);
      for (std::size_t i = 0; i < turns; ++i) {
        std::atomic_signal_fence(std::memory_order_seq_cst);
      }
      break;
    }
    default: break;
  }
}

#if defined(PHALANX_HOOKS)
// Yields at random steps of the protocol. That reaches interleavings that whole time slices do not.
inline void give_way(const char*) {
  static std::atomic<std::uint64_t> streams = 1'000;
  thread_local Random random(streams.fetch_add(1));
  if (random.one_in(8)) {
    sched_yield();
  }
}
inline const bool gives_way = (step_hook.store(&give_way), true);
#endif

// Waits until `ready`, up to a minute, after which the test has failed.
template <class Ready>
bool eventually(Ready&& ready) {
  const auto end = Clock::now() + 60s;
  while (!ready()) {
    if (Clock::now() > end) {
      return false;
    }
    sched_yield();
  }
  return true;
}

// The parents of a random tree, from a chain to a star; empty for a flat group.
inline std::vector<int> random_tree(int size, Random& random) {
  std::vector<int> parents;
  if (size > 2 && !random.one_in(3)) {
    const std::size_t reach = 1 + random.below(static_cast<std::size_t>(size));
    for (int rank = 0; rank < size; ++rank) {
      const std::size_t choices = std::min(static_cast<std::size_t>(rank), reach);
      parents.push_back(rank == 0 ? -1 : rank - 1 - static_cast<int>(random.below(choices)));
    }
  }
  return parents;
}

// The first ranks of random caches; often none, which is no chain.
inline std::vector<int> random_caches(int size, Random& random) {
  std::vector<int> caches;
  const std::size_t largest = random.below(static_cast<std::size_t>(size) + 1);
  for (int rank = 0; largest != 0 && rank < size;
       rank += 1 + static_cast<int>(random.below(largest))) {
    caches.push_back(rank);
  }
  return caches;
}

enum class Mapping { same, own };

// The context of a rank's thread.
struct Rank {
  Group& group;
  Mailbox& mailbox;
  std::barrier<>& together;  // for the test's own synchronisation, independent of the tested code
  Random random;
  int self;
  int size;
};

// Pauses ranks at any instruction for some microseconds, by signals whose handler spins. That
// reaches places within an operation where no delay can be inserted from outside.
class SignalSender {
 public:
  explicit SignalSender(std::vector<pthread_t> victims) : victims_(std::move(victims)) {
    struct sigaction action{};
    action.sa_handler = [](int) {
      for (int i = 0; i < 3; ++i) {
        sched_yield();
      }
    };
    sigaction(SIGUSR1, &action, nullptr);
    thread_ = std::thread([this] { run(); });
  }
  void stop() {
    stopped_ = true;
    thread_.join();
  }

 private:
  void run() {
    Random random(999);
    while (!stopped_) {
      pthread_kill(victims_[random.below(victims_.size())], SIGUSR1);
      for (std::size_t i = random.below(3'000); i > 0; --i) {
        std::atomic_signal_fence(std::memory_order_seq_cst);
      }
      sched_yield();
    }
  }

  std::vector<pthread_t> victims_;
  std::atomic<bool> stopped_ = false;
  std::thread thread_;
};

using Body = std::function<void(Rank&)>;

inline std::unique_ptr<Segment> view_of(const Segment& owner, Mapping mapping,
                                        std::uint64_t nonce) {
  if (mapping == Mapping::same) {
    return Segment::share(owner);
  }
  Status status;
  auto view = Segment::open(getpid(), owner.descriptor(), owner.ranks(), nonce, status);
  CHECK(status.ok());
  return view;
}

// Runs `body` in `size` ranks, and returns when all have ended. Each rank leaves the group when its
// body ends, unless it has left before: peers must tolerate that.
inline void run(int size, const Body& body, Mapping mapping = Mapping::same,
                bool send_signals = false) {
  constexpr std::uint64_t nonce = 0x1234567890abcdef;
  Status status;
  const auto owner = Segment::create(size, nonce, kChunkBytes, status);
  if (!CHECK(owner != nullptr)) {
    return;
  }
  static std::uint64_t runs = 0;
  Random random(2'000 + runs++);
  const std::vector<int> tree = random_tree(size, random);
  const std::vector<int> caches = random_caches(size, random);
  std::barrier<> together(size);
  std::barrier<> ended(size + 1);
  std::vector<std::thread> threads;
  for (int self = 0; self < size; ++self) {
    threads.emplace_back([&, self] {
      Group group(view_of(*owner, mapping, nonce), self);
      Mailbox mailbox(group);
      together.arrive_and_wait();
      CHECK(group.connect().ok());
      if (!tree.empty()) group.set_tree(Tree(tree, self, caches));
      Rank rank{group, mailbox, together, Random(static_cast<std::uint64_t>(self)), self, size};
      body(rank);
      group.leave();
      ended.arrive_and_wait();  // the threads must live while signals are sent to them
      ended.arrive_and_wait();
    });
  }
  std::unique_ptr<SignalSender> signal_sender;
  if (send_signals) {
    std::vector<pthread_t> victims;
    for (std::thread& thread : threads) {
      victims.push_back(thread.native_handle());
    }
    signal_sender = std::make_unique<SignalSender>(std::move(victims));
  }
  ended.arrive_and_wait();
  if (signal_sender) {
    signal_sender->stop();
  }
  ended.arrive_and_wait();
  for (std::thread& thread : threads) {
    thread.join();
  }
}

}  // namespace ranks
