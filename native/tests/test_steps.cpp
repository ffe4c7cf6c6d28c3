// A hook runs one rank between two steps of another: however a waiter and a notifier interleave, no
// wake-up is lost. The tests depend on neither time nor luck: each interleaving is tried once.
#include <array>
#include <functional>
#include <memory>
#include <string_view>

#include "phalanx/hooks.h"
#include "ranks.h"

using namespace phalanx;
using ranks::within;

namespace {

// Runs an action before each step of this process, during its lifetime.
class Hook {
 public:
  explicit Hook(std::function<void(std::string_view)> action)
      : action_(std::move(action)), before_(step_hook.load()) {
    current = this;
    step_hook.store([](const char* step) { current->action_(step); });
  }
  ~Hook() { step_hook.store(before_); }
  Hook(const Hook&) = delete;
  Hook& operator=(const Hook&) = delete;

 private:
  static inline Hook* current;
  std::function<void(std::string_view)> action_;
  void (*before_)(const char*);
};

// Ranks in one thread.
struct Pair {
  explicit Pair(int size = 2) {
    Status status;
    segment = Segment::create(size, 1, kChunkBytes, status);
    CHECK(status.ok());
    for (int rank = 0; rank < size; ++rank) {
      groups.push_back(std::make_unique<Group>(Segment::share(*segment), rank));
      mailboxes.push_back(std::make_unique<Mailbox>(*groups.back()));
    }
    for (const auto& group : groups) {
      CHECK(group->connect().ok());
    }
  }
  RankControl& control(int rank) const { return segment->control(rank); }

  std::unique_ptr<Segment> segment;
  std::vector<std::unique_ptr<Group>> groups;
  std::vector<std::unique_ptr<Mailbox>> mailboxes;
};

// Does what wait_until does before its sleep. If the ticket has changed since, the kernel does not
// let the thread sleep, or wakes it.
class Sleeper {
 public:
  explicit Sleeper(Event& event) : event_(event) {
    event.sleepers.fetch_add(1);
    seen_ = event.ticket.load();
  }
  bool woken() const { return event_.ticket.load() != seen_; }

 private:
  Event& event_;
  std::uint32_t seen_;
};

constexpr auto kPeersAlive = [] { return Status{}; };

// Runs `work`. Before its step `at_step` a waiter arrives, which goes to sleep unless it is
// `ready`. Returns whether the step was reached and the waiter is not asleep when `work` is done.
bool wakes(std::string_view at_step, Event& event, const std::function<bool()>& ready,
           const std::function<void()>& work) {
  bool reached = false;
  std::unique_ptr<Sleeper> sleeper;
  {
    const Hook hook([&](std::string_view step) {
      if (step != at_step || reached) return;
      reached = true;
      sleeper = std::make_unique<Sleeper>(event);
      if (ready()) sleeper = nullptr;
    });
    work();
  }
  const bool good = reached && (sleeper == nullptr || sleeper->woken());
  if (!good) std::fprintf(stderr, "  a waiter before '%s'\n", std::string(at_step).c_str());
  return good;
}

}  // namespace

TEST(a_notification_at_any_step_of_a_wait_keeps_it_from_sleeping) {
  for (const std::string_view at_step :
       {"wait: announce", "wait: read the ticket", "wait: check again", "wait: sleep"}) {
    Event event{};
    bool ready = false;
    bool slept = false;
    std::uint32_t seen = 0;
    const Hook hook([&](std::string_view step) {
      if (step == at_step && !ready) {
        ready = true;
        notify(event);
      }
      if (step == "wait: read the ticket") seen = event.ticket.load();
      if (step == "wait: sleep" && ready && event.ticket.load() == seen) slept = true;
    });
    SpinPolicy spin_policy = SpinPolicy::no_spin();
    const auto look = [&] { return ready; };
    CHECK(wait_until(event, spin_policy, within(), look, kPeersAlive).ok());
    if (!CHECK(ready) || !CHECK(!slept)) {
      std::fprintf(stderr, "  notified before '%s'\n", std::string(at_step).c_str());
    }
  }
}

TEST(a_waiter_at_any_step_of_an_advance_is_woken) {
  for (const std::string_view at_step :
       {"advance: publish the step", "notify: check for sleepers"}) {
    const Pair pair;
    RankControl& control = pair.control(0);
    CHECK(wakes(
        at_step, control.step_event, [&] { return control.step.load() == 1; },
        [&] { pair.groups[0]->advance(); }));
  }
}

// While a waiter detects that a peer has left, it also sees what that peer did before.
TEST(a_step_that_was_published_before_a_rank_left_counts) {
  const Pair pair;
  bool left = false;
  const Hook hook([&](std::string_view step) {
    if (step != "wait: check the peers" || left) return;
    left = true;
    pair.groups[0]->advance();
    pair.groups[0]->leave();
  });
  CHECK(pair.groups[1]->wait_step(0, 1, within()).ok());
  CHECK(left);
}

TEST(a_rank_that_has_left_is_not_awaited) {
  const Pair pair;
  pair.groups[0]->leave();
  CHECK_EQ(pair.groups[1]->wait_step(0, 1, within(std::chrono::seconds(1))).code, Code::left);
}

// Rank 2 waits for a message of rank 0, which sends other messages all the time. Rank 2 also has a
// recv from rank 1. While rank 2 checks its peers, rank 1 sends that message and leaves, which must
// not end the wait.
TEST(a_message_that_was_sent_before_a_rank_left_arrives) {
  const Pair three(3);
  const std::byte sent{7};
  std::byte first{};
  std::byte second{};
  int checks = 0;
  bool in_slice = false;
  const auto send = [&](std::size_t from, std::int32_t tag) {
    (void)three.mailboxes[from]->isend(&sent, 1, DType::uint8, 2, tag, false);
  };
  const auto received = three.mailboxes[2]->irecv(&first, 1, DType::uint8, 0, 0, false);
  const auto other = three.mailboxes[2]->irecv(&second, 1, DType::uint8, 1, 0, false);
  const Hook hook([&](std::string_view step) {
    if (step == "wait: announce") {
      in_slice = false;
      usleep(1000);
      send(0, checks < 2 ? 9 : 0);
    } else if (step == "wait: check the peers") {
      in_slice = true;
    } else if (step == "peer_status: check the presence" && !in_slice && checks++ == 1) {
      send(1, 0);  // the first check is of rank 0
      three.groups[1]->leave();
    }
  });
  CHECK(three.mailboxes[2]->wait(*received, within()).ok());
  CHECK(checks > 1 && other->done() && first == sent && second == sent);
}

// Rank 2 has checked for the message of rank 0, and now checks for that of rank 1. At this moment
// the first one arrives, and the group breaks.
TEST(a_message_that_was_sent_before_the_group_broke_arrives) {
  const Pair three(3);
  const std::byte sent{7};
  std::byte first{};
  std::byte second{};
  const auto there = three.mailboxes[2]->irecv(&first, 1, DType::uint8, 0, 0, false);
  const auto missing = three.mailboxes[2]->irecv(&second, 1, DType::uint8, 1, 0, false);
  int checks = 0;
  const Hook hook([&](std::string_view step) {
    if (step != "recv: check for a message" || ++checks != 2) return;
    (void)three.mailboxes[0]->isend(&sent, 1, DType::uint8, 2, 0, false);
    (void)three.groups[0]->abort(Status{.code = Code::peer_lost, .peer = 1, .reporter = 0});
  });
  (void)three.mailboxes[2]->test(*there);
  CHECK(there->done() && there->status().ok() && first == sent);
  CHECK(missing->done());
  CHECK_EQ(missing->status().code, Code::peer_lost);
}

TEST(a_waiter_at_any_step_of_leaving_is_woken) {
  for (const std::string_view at_step :
       {"leave: publish the presence", "notify: check for sleepers"}) {
    for (const bool messages : {false, true}) {
      const Pair pair;
      Event& event = messages ? pair.control(1).message_event : pair.control(0).step_event;
      CHECK(wakes(
          at_step, event, [&] { return pair.control(0).presence.load() == Presence::left; },
          [&] { pair.groups[0]->leave(); }));
    }
  }
}

TEST(a_waiter_at_any_step_of_an_abort_is_woken) {
  for (const std::string_view at_step :
       {"abort: publish the fingerprints", "abort: claim the abort word", "abort: wake all"}) {
    for (const bool messages : {false, true}) {
      const Pair pair;
      Event& event = messages ? pair.control(1).message_event : pair.control(1).step_event;
      CHECK(wakes(
          at_step, event, [] { return false; },
          [&] { (void)pair.groups[0]->abort(Status{.code = Code::aborted, .reporter = 0}); }));
    }
  }
}

TEST(a_rank_that_sees_a_broken_group_sees_the_reason) {
  for (const std::string_view at_step : {"abort: wake all", "notify: change the ticket"}) {
    const Pair pair;
    std::uint64_t seen = 0;
    const Hook hook([&](std::string_view step) {
      if (step == at_step) seen = pair.groups[1]->failure_report().mine.count;
    });
    (void)pair.groups[0]->abort({{.code = Code::mismatch, .peer = 1, .reporter = 0}, {.count = 5}});
    CHECK_EQ(seen, 5u);
  }
}

TEST(the_first_of_two_interleaved_failures_wins) {
  for (const std::string_view at_step :
       {"abort: publish the fingerprints", "abort: claim the abort word"}) {
    const Pair pair;
    bool failed = false;
    const Hook hook([&](std::string_view step) {
      if (step != at_step || failed) return;
      failed = true;
      (void)pair.groups[1]->abort(Status{.code = Code::timeout, .peer = 0, .reporter = 1});
    });
    const Status seen =
        pair.groups[0]->abort(Status{.code = Code::mismatch, .peer = 1, .reporter = 0});
    CHECK_EQ(seen.code, Code::timeout);
    CHECK_EQ(pair.groups[1]->failure().code, Code::timeout);
  }
}

TEST(a_receiver_at_any_step_of_a_send_is_woken) {
  for (const std::string_view at_step : {"send: publish the slot", "notify: check for sleepers"}) {
    const Pair pair;
    const Channel& channel = pair.segment->channel(0, 1);
    const std::byte data{};
    CHECK(wakes(
        at_step, pair.control(1).message_event, [&] { return channel.slots[0].number.load() != 0; },
        [&] { (void)pair.mailboxes[0]->isend(&data, 1, DType::uint8, 1, 0, false); }));
  }
}

TEST(a_sender_at_any_step_of_a_receive_is_woken) {
  for (const std::string_view at_step : {"recv: return the slot", "notify: check for sleepers"}) {
    const Pair pair;
    const Channel& channel = pair.segment->channel(0, 1);
    std::byte data{};
    (void)pair.mailboxes[0]->isend(&data, 1, DType::uint8, 1, 0, false);
    CHECK(wakes(
        at_step, pair.control(0).message_event, [&] { return channel.taken.load() != 0; },
        [&] { (void)pair.mailboxes[1]->irecv(&data, 1, DType::uint8, 0, 0, false); }));
  }
}

// A thread that finds the mutex of its mailbox locked sleeps, and the holder wakes it.
TEST(a_thread_that_finds_the_mailbox_locked_is_woken) {
  const Pair pair;
  std::array<std::byte, 2> data{};
  const auto first = pair.mailboxes[1]->irecv(&data[0], 1, DType::uint8, 0, 1, false);
  std::unique_ptr<Sleeper> sleeper;
  bool done = false;
  const Hook hook([&](std::string_view step) {
    if (step != "recv: check for a message" || sleeper != nullptr) return;
    // In another thread, since this one holds the mutex.
    sleeper = std::make_unique<Sleeper>(pair.control(1).message_event);
    std::thread([&] { done = pair.mailboxes[1]->test(*first); }).join();
  });
  (void)pair.mailboxes[1]->irecv(&data[1], 1, DType::uint8, 0, 2, false);
  CHECK(sleeper != nullptr && !done && sleeper->woken());
}
