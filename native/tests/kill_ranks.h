// One case of the tests that kill ranks: ranks as processes, of which one or two end themselves by
// SIGKILL before their n-th step (hooks.h), and the reaction of the others.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <fstream>
#include <string>

#include "kill_operations.h"
#include "phalanx/hooks.h"

#if !defined(PHALANX_HOOKS)
#error "These tests need the core with hooks."
#endif

namespace kills {

using namespace std::chrono_literals;

// The order in which ranks begin. `victim_first`: the others begin when the victim has died, sleeps
// or is done. `victim_last`: the victim begins when all others sleep or are done. `last_alone`: as
// victim_first, and the last survivor begins when the others have returned, if they cannot need it.
enum class Order : std::uint8_t { free, victim_first, victim_last, last_alone };
inline constexpr std::array kOrderNames = {"free", "victim_first", "victim_last", "lonely"};

struct Case {
  Task task;
  int victim = 0;
  std::uint32_t fatal = 0;  // the step of the task before which it dies, from 1
  int second = -1;          // a second victim, or -1
  std::uint32_t second_fatal = 0;
  Order order = Order::free;
  bool yields = false;      // ranks yield to others at random steps
  bool every_word = false;  // die at every word of a record, otherwise at one of eight

  bool is_victim(int rank) const { return rank == victim || rank == second; }
  int last_survivor() const {
    int rank = task.size - 1;
    while (is_victim(rank)) --rank;
    return rank;
  }
};

inline constexpr int kMaxRanksOfACase = 5;
inline constexpr auto kHang = 20s;

// Counts how often each step was passed, and how often it was a rank's last. Literals have the same
// address in all processes of a test, as they are forks of one.
struct Steps {
  struct Entry {
    std::atomic<const char*> step;
    std::atomic<std::uint64_t> passed, deaths;
  };
  Entry& entry_for(const char* step) {
    for (auto i = reinterpret_cast<std::uintptr_t>(step) / 8;; ++i) {
      Entry& entry = entries[i % entries.size()];
      const char* known = nullptr;
      if (entry.step.compare_exchange_strong(known, step) || known == step) return entry;
    }
  }
  std::array<Entry, 256> entries;
};

// The state that a rank shows to the others and to the judge.
struct RankState {
  std::atomic<const char*> step;  // the last one
  std::atomic<std::uint32_t> steps;
  std::atomic<bool> present, entered, asleep, done;
  std::atomic<std::int64_t> died, began, returned, began_after, returned_after;  // ns
  Status task, after;
  bool ready, right, clean, missed;
};
using RankStates = std::array<RankState, kMaxRanksOfACase>;

inline std::int64_t now_ns() {
  return std::chrono::nanoseconds(Clock::now().time_since_epoch()).count();
}

// Waits until `ready`, up to the limit after which a rank is considered to hang.
template <class Ready>
bool eventually(Ready&& ready, Clock::duration limit = kHang) {
  const auto end = Clock::now() + limit;
  while (!ready()) {
    if (Clock::now() > end) return false;
    sched_yield();
  }
  return true;
}

// The state of this process's hook.
struct FaultInjector {
  RankState* state = nullptr;
  Steps* steps = nullptr;
  std::atomic<std::uint32_t> fatal = 0;  // enabled if not 0
  std::uint64_t yields = 0;              // a random state; 0: never yields
  std::array<std::atomic<const char*>, 16> checks{};
  std::atomic<std::uint64_t> words = 0;  // of records; the start of the count selects the words
  bool every_word = false;

  // A spinning thread repeats the same checks. A death before the second check is equivalent to one
  // before the first, unless something was written in between.
  bool counts(const char* step) {
    if (std::strcmp(step, "record: write") == 0 && !every_word && words.fetch_add(1) % 8 != 0) {
      return false;
    }
    if (std::strstr(step, "check") == nullptr) {
      for (auto& check : checks) check.store(nullptr);
      return true;
    }
    for (auto& check : checks) {
      const char* known = nullptr;
      if (check.compare_exchange_strong(known, step)) return true;
      if (known == step) return false;
    }
    return true;
  }
};
inline FaultInjector injector;

inline void on_step(const char* step) {
  RankState& state = *injector.state;
  state.step.store(step, std::memory_order_relaxed);
  if (std::strcmp(step, "wait: sleep") == 0) state.asleep.store(true);
  if (const std::uint32_t fatal = injector.fatal.load(std::memory_order_relaxed); fatal != 0) {
    auto& entry = injector.steps->entry_for(step);
    entry.passed.fetch_add(1, std::memory_order_relaxed);
    if (injector.counts(step) && state.steps.fetch_add(1) + 1 == fatal) {
      entry.deaths.fetch_add(1, std::memory_order_relaxed);
      state.died.store(now_ns());
      kill(getpid(), SIGKILL);
    }
  }
  if (injector.yields != 0) {
    injector.yields = injector.yields * 6364136223846793005 + 1442695040888963407;
    if (injector.yields >> 61 == 0) sched_yield();
  }
}

// Descriptors, and mappings of memory that groups share. A process keeps its own arena.
struct Resources {
  std::size_t files = 0, maps = 0;
  friend bool operator==(const Resources&, const Resources&) = default;

  static Resources now() {
    Resources all;
    for (int fd = 0; fd < 64; ++fd) all.files += fcntl(fd, F_GETFD) >= 0;
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line);) {
      all.maps += line.find("memfd:phalanx") != std::string::npos;
    }
    return all;
  }
};

// The life of a process as a rank.
class Rank {
 public:
  Rank(const Case& its_case, int self, RankStates& states, Steps& steps)
      : case_(its_case),
        self_(self),
        states_(states),
        state_(states[static_cast<std::size_t>(self)]) {
    injector.state = &state_;
    injector.steps = &steps;
    injector.words = case_.task.salt;
    injector.every_word = case_.every_word;
    if (case_.yields) injector.yields = case_.task.salt * 64 + static_cast<std::uint64_t>(self) + 1;
    step_hook.store(&on_step);
  }

  // `owner`: the process that holds the segment; `recorder`: the file of the rank's flight
  // recorder.
  void live(int owner, int descriptor, std::uint64_t nonce, int recorder) {
    Status status;
    FlightRecorder::install(FlightRecorder::open(recorder, RecorderIdentity{}, status));
    if (case_.task.path == Path::zero_copy) (void)Arena::own(status);
    const Resources before = Resources::now();
    {
      Group group(Segment::open(owner, descriptor, case_.task.size, nonce, status), self_);
      group.set_tree(case_.task.tree_of(self_));
      Mailbox mailbox(group);
      state_.present.store(true);
      state_.ready =
          eventually([this] { return all(&RankState::present); }) && group.connect().ok();
      if (state_.ready) take_part(group, mailbox);
    }
    state_.clean = Resources::now() == before;
  }

 private:
  RankState& state(int rank) const { return states_[static_cast<std::size_t>(rank)]; }
  Bounds bounds() const { return Bounds{}.within(kHang / 2); }
  bool all(std::atomic<bool> RankState::* flag) const {
    for (int rank = 0; rank < case_.task.size; ++rank) {
      if (!(state(rank).*flag).load()) return false;
    }
    return true;
  }
  // Whether all ranks but `one` sleep, are done or are dead.
  bool others_settled(int one) const {
    for (int rank = 0; rank < case_.task.size; ++rank) {
      const RankState& each = state(rank);
      if (rank != one && !each.asleep.load() && !each.done.load() && each.died.load() == 0) {
        return false;
      }
    }
    return true;
  }
  bool others_done(int one) const {
    for (int rank = 0; rank < case_.task.size; ++rank) {
      if (rank != one && !case_.is_victim(rank) && !state(rank).done.load()) return false;
    }
    return true;
  }

  void take_part(Group& group, Mailbox& mailbox);
  void run_task(Group& group, Mailbox& mailbox);
  void await_order(const Group& group);
  void come_last(const Group& group, const Process& victim);

  const Case& case_;
  int self_;
  RankStates& states_;
  RankState& state_;
  std::atomic<std::size_t> reported_ = 0;  // writer: the service thread
};

// Runs the task once without a death, then with it, then an operation that cannot succeed any more.
inline void Rank::take_part(Group& group, Mailbox& mailbox) {
  Task usual = case_.task;
  ++usual.salt;
  // So that no rank has mapped the arenas of the others yet.
  if (usual.path == Path::zero_copy) usual.path = Path::staged;
  RankTask before(usual, self_, case_.victim);
  std::thread server;
  if (case_.task.operation == Operation::served) {
    server = std::thread([this, &mailbox] {
      for (auto done = mailbox.serve(); !done.empty(); done = mailbox.serve()) {
        reported_.fetch_add(done.size());
        reported_.notify_one();
      }
    });
  }
  state_.ready = before.run(group, mailbox, bounds(), reported_).ok() && before.right() &&
                 barrier(group, bounds()).ok();
  if (state_.ready) run_task(group, mailbox);
  state_.began_after.store(now_ns());
  state_.after = barrier(group, bounds());
  state_.returned_after.store(now_ns());
  mailbox.stop();
  if (server.joinable()) server.join();
  mailbox.close();
  group.leave();
}

inline void Rank::run_task(Group& group, Mailbox& mailbox) {
  RankTask work(case_.task, self_, case_.victim);
  state_.asleep.store(false);
  state_.entered.store(true);
  state_.ready = eventually([this] { return all(&RankState::entered); });
  await_order(group);
  state_.began.store(now_ns());
  injector.fatal = self_ == case_.victim   ? case_.fatal
                   : self_ == case_.second ? case_.second_fatal
                                           : 0;
  if (case_.task.operation == Operation::leaving && self_ == case_.victim) {
    group.leave();
  } else {
    state_.task = work.run(group, mailbox, bounds(), reported_);
  }
  state_.returned.store(now_ns());
  state_.right = !state_.task.ok() || work.right();
  state_.done.store(true);
  if (case_.is_victim(self_)) {
    state_.died.store(now_ns());
    kill(getpid(), SIGKILL);
  }
}

inline void Rank::await_order(const Group& group) {
  if (self_ == case_.victim) {
    if (case_.order == Order::victim_last) {
      state_.ready = eventually([this] { return others_settled(self_); });
    }
    return;
  }
  if (case_.order != Order::victim_first && case_.order != Order::last_alone) return;
  Process victim;
  if (victim.open(group.pid(case_.victim)) != 0) return;  // it has died and was reaped
  const RankState& its = state(case_.victim);
  const auto gone = [&] { return victim.ended() || its.asleep.load() || its.done.load(); };
  state_.ready = eventually(gone);
  if (case_.order == Order::last_alone && self_ == case_.last_survivor()) come_last(group, victim);
}

// A rank that died before it entered the collective, or that has left, cannot take part any more.
// The others must not wait for this rank to report that. (Messages have no entry.)
inline void Rank::come_last(const Group& group, const Process& victim) {
  const std::uint64_t begun = group.segment().control(self_).step.load();
  const bool meets =
      case_.task.operation != Operation::messages && case_.task.operation != Operation::served;
  const bool absent = group.segment().control(case_.victim).step.load() == begun;
  if (meets && absent && victim.ended()) {
    state_.missed = !eventually([this] { return others_done(self_); }, kHang / 2);
  } else {
    state_.ready = eventually([this] { return others_settled(self_); });
  }
}

}  // namespace kills
