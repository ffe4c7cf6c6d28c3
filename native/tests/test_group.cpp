// Entering, breaking and leaving: every mistake is reported on every rank, and nothing hangs.
#include <sys/mman.h>

#include <array>
#include <cerrno>
#include <mutex>

#include "ranks.h"

using namespace phalanx;
using namespace std::chrono_literals;
using ranks::Mapping;
using ranks::Rank;
using ranks::within;

namespace {

// The status of each rank.
class Statuses {
 public:
  explicit Statuses(int size) : all_(static_cast<std::size_t>(size)) {}
  Status& operator[](int rank) { return all_[static_cast<std::size_t>(rank)]; }

  // The first failure wins, and all ranks report it.
  void check_same(Code code) {
    for (const Status& each : all_) {
      CHECK_EQ(each.code, code);
      CHECK_EQ(each.peer, all_[0].peer);
      CHECK_EQ(each.reporter, all_[0].reporter);
    }
  }

 private:
  std::vector<Status> all_;
};

// Waits until all other ranks sleep.
void others_sleep(Rank& rank) {
  const auto all_asleep = [&rank] {
    std::uint32_t asleep = 0;
    for (int each = 0; each < rank.size; ++each) {
      asleep += rank.group.segment().control(each).step_event.sleepers.load() & ~kLocked;
    }
    return asleep >= static_cast<std::uint32_t>(rank.size - 1);
  };
  CHECK(ranks::eventually(all_asleep));
}

// Runs all operations on a broken group: each returns `code` at once.
void check_refused(Rank& rank, Code code) {
  const std::uint64_t step = rank.group.step();
  for (const std::size_t count : {std::size_t{0}, std::size_t{3}, kSmallBytes + 1}) {
    std::vector<std::byte> data(count), more(count * static_cast<std::size_t>(rank.size));
    std::vector<void*> parts;
    for (int i = 0; i < rank.size; ++i) {
      parts.push_back(more.data() + static_cast<std::size_t>(i) * count);
    }
    const auto bounds = within();
    constexpr DType u8 = DType::uint8;
    constexpr ReduceOp op = ReduceOp::bor;
    CHECK_EQ(barrier(rank.group, bounds).code, code);
    CHECK_EQ(broadcast(rank.group, data.data(), count, u8, 0, bounds).code, code);
    CHECK_EQ(all_reduce(rank.group, data.data(), count, u8, op, bounds).code, code);
    CHECK_EQ(reduce(rank.group, data.data(), count, u8, op, 0, bounds).code, code);
    CHECK_EQ(gather(rank.group, data.data(), parts.data(), count, u8, 0, bounds).code, code);
    CHECK_EQ(scatter(rank.group, parts.data(), data.data(), count, u8, 0, bounds).code, code);
    CHECK_EQ(all_gather(rank.group, data.data(), parts.data(), count, u8, bounds).code, code);
    for (int peer = 0; peer < rank.size; ++peer) {
      const auto sent = rank.mailbox.isend(data.data(), count, u8, peer, 0, false);
      CHECK_EQ(rank.mailbox.wait(*sent, bounds).code, code);
      const auto received = rank.mailbox.irecv(data.data(), count, u8, peer, 0, false);
      CHECK_EQ(rank.mailbox.wait(*received, bounds).code, code);
    }
  }
  CHECK_EQ(rank.group.step(), step);
  CHECK_EQ(rank.mailbox.outstanding(), 0u);
}

std::atomic<bool> interrupt_now;

}  // namespace

TEST(ranks_that_agree_enter_together) {
  for (const int size : {1, 2, 3, 4, 5}) {
    ranks::run(size, [](Rank& rank) {
      for (std::uint64_t i = 1; i <= 300; ++i) {
        const Fingerprint own{.count = i, .root = 0, .kind = Kind::broadcast};
        CHECK(ranks::enter(rank.group, own, within()).ok());
        CHECK_EQ(rank.group.sequence(), i);
        CHECK_EQ(rank.group.step(), 2 * i);
        ranks::random_delay(rank.random);
      }
    });
  }
}

TEST(the_last_rank_is_awaited) {
  for (const int size : {1, 2, 3, 5}) {
    ranks::run(size, [](Rank& rank) {
      for (int last = 0; last < rank.size; ++last) {
        const auto is_awaited = [&] { return rank.group.is_awaited(); };
        CHECK(rank.self == last ? ranks::eventually(is_awaited) : !is_awaited());
        CHECK(barrier(rank.group, within()).ok());
      }
    });
  }
}

TEST(every_difference_is_reported_on_every_rank) {
  const Fingerprint usual{
      .count = 1000, .root = 0, .kind = Kind::reduce, .dtype = DType::float32, .op = ReduceOp::sum};
  std::array<Fingerprint, 6> others;
  others.fill(usual);
  others[0].count = 1001;
  others[1].count = usual.count + (std::uint64_t{1} << 32);
  others[2].root = 1;
  others[3].kind = Kind::all_reduce;
  others[4].dtype = DType::int32;
  others[5].op = ReduceOp::max;
  for (const int size : {2, 3, 5}) {
    for (const Fingerprint& other : others) {
      for (const int odd : {0, size - 1}) {
        Statuses statuses(size);
        std::vector<Failure> failures(static_cast<std::size_t>(size), Status{});
        ranks::run(size, [&](Rank& rank) {
          CHECK(barrier(rank.group, within()).ok());
          // Only now has the barrier ended everywhere: over a tree, a rank whose parent has not yet
          // passed it down fails it too if the group breaks in the next operation.
          rank.together.arrive_and_wait();
          ranks::random_delay(rank.random);
          statuses[rank.self] =
              ranks::enter(rank.group, rank.self == odd ? other : usual, within());
          failures[static_cast<std::size_t>(rank.self)] = rank.group.failure_report();
          rank.together.arrive_and_wait();
          check_refused(rank, Code::mismatch);
        });
        statuses.check_same(Code::mismatch);
        const Status& status = statuses[0];
        CHECK((status.reporter == odd) != (status.peer == odd));
        const Failure& failure = failures[0];
        Fingerprint odd_one = status.reporter == odd ? failure.mine : failure.theirs;
        Fingerprint usual_one = status.reporter == odd ? failure.theirs : failure.mine;
        CHECK_EQ(odd_one.sequence, 2u);
        CHECK_EQ(usual_one.sequence, 2u);
        odd_one.sequence = usual_one.sequence = 0;
        CHECK(odd_one == other);
        CHECK(usual_one == usual);
      }
    }
  }
}

TEST(collectives_that_differ_are_reported_before_data_moves) {
  ranks::run(3, [](Rank& rank) {
    constexpr std::size_t count = 3 * kChunkBytes;
    std::vector<std::byte> data(count, std::byte{0x77});
    const Status status =
        rank.self == 1
            ? broadcast(rank.group, data.data(), count, DType::uint8, 0, within())
            : all_reduce(rank.group, data.data(), count, DType::uint8, ReduceOp::bxor, within());
    CHECK_EQ(status.code, Code::mismatch);
    bool untouched = true;
    for (const std::byte byte : data) untouched = untouched && byte == std::byte{0x77};
    CHECK(untouched);
  });
}

TEST(abort_wakes_sleeping_ranks) {
  for (const int size : {2, 3, 5}) {
    Statuses statuses(size);
    ranks::run(size, [&](Rank& rank) {
      if (rank.self == 0) {
        others_sleep(rank);
        const auto tickets = [&rank] {
          std::vector<std::uint32_t> all;
          for (int each = 0; each < rank.size; ++each) {
            const RankControl& control = rank.group.segment().control(each);
            all.push_back(control.step_event.ticket.load());
            all.push_back(control.message_event.ticket.load());
          }
          return all;
        };
        const auto before = tickets();
        statuses[0] = rank.group.abort(Status{.code = Code::aborted, .reporter = 0});
        const auto after = tickets();
        for (std::size_t i = 0; i < before.size(); ++i) CHECK(after[i] > before[i]);
      } else {
        statuses[rank.self] = barrier(rank.group, within());
      }
      check_refused(rank, Code::aborted);
    });
    statuses.check_same(Code::aborted);
    CHECK_EQ(statuses[0].reporter, 0);
    CHECK_EQ(statuses[0].peer, -1);
  }
}

TEST(every_field_of_a_failure_survives_the_abort_word) {
  for (const int rank_named : {0, 1, kMaxRanks - 1}) {
    for (const int error : {0, 1, EOVERFLOW, 0xffff}) {
      ranks::run(1, [&](Rank& rank) {
        const Status status = rank.group.abort(
            Status{.code = Code::out_of_memory, .peer = rank_named, .reporter = 0, .error = error});
        CHECK_EQ(status.code, Code::out_of_memory);
        CHECK_EQ(status.peer, rank_named);
        CHECK_EQ(status.reporter, 0);
        CHECK_EQ(status.error, error);
      });
    }
  }
}

TEST(one_of_several_concurrent_failures_wins) {
  // Two threads of one rank, like a blocking call and the thread of the messages, and one of
  // another.
  constexpr int n_failures = 3;
  const int rounds = ranks::scaled(6000);
  std::vector<std::unique_ptr<Group>> groups(2);
  std::barrier<> together(n_failures);
  std::atomic<int> started = 0;
  const auto work = [&](int number) {
    unsigned turns = 0;
    for (int round = 0; round < rounds; ++round) {
      if (number == 0) {
        Status status;
        auto segment = Segment::create(2, 1, status);
        groups[1] = std::make_unique<Group>(Segment::share(*segment), 1);
        groups[0] = std::make_unique<Group>(std::move(segment), 0);
      }
      together.arrive_and_wait();
      // After a barrier threads start one after another; after a spin, all at once.
      for (++started; started < n_failures * (round + 1);) {
        if (turns++ % 4096 == 0) sched_yield();
      }
      const auto count = static_cast<std::uint64_t>(number);
      Group& group = *groups[static_cast<std::size_t>(number / 2)];
      const Status status =
          group.abort({{.code = Code::timeout, .peer = number, .reporter = number / 2},
                       {.count = count},
                       {.count = 2 * count}});
      CHECK_EQ(status.code, Code::timeout);
      together.arrive_and_wait();
      const Failure after = group.failure_report();
      CHECK_EQ(status.peer, after.status.peer);
      CHECK_EQ(status.reporter, status.peer / 2);
      CHECK_EQ(after.mine.count, static_cast<std::uint64_t>(status.peer));
      CHECK_EQ(after.theirs.count, 2 * static_cast<std::uint64_t>(status.peer));
      together.arrive_and_wait();
    }
  };
  std::thread second(work, 1), third(work, 2);
  work(0);
  second.join();
  third.join();
}

TEST(the_deadline_names_the_missing_rank) {
  for (const int size : {2, 3, 5}) {
    for (const std::size_t count : {std::size_t{1}, 3 * kChunkBytes}) {
      Statuses statuses(size);
      const int late = size - 1;
      ranks::run(size, [&](Rank& rank) {
        std::vector<std::byte> data(count);
        const auto work = [&](Clock::duration time) {
          return all_reduce(rank.group, data.data(), count, DType::uint8, ReduceOp::max,
                            within(time));
        };
        CHECK(work(60s).ok());
        if (rank.self != late) {
          statuses[rank.self] = work(rank.self == 0 ? Clock::duration(30ms) : 60s);
          rank.together.arrive_and_wait();
        } else {
          rank.together.arrive_and_wait();
          statuses[late] = work(60s);
        }
        check_refused(rank, Code::timeout);
        const Fingerprint mine = rank.group.failure_report().mine;
        CHECK_EQ(mine.sequence, 2u);
        CHECK_EQ(mine.kind, Kind::all_reduce);
        CHECK_EQ(mine.count, count);
      });
      statuses.check_same(Code::timeout);
      CHECK_EQ(statuses[0].peer, late);
      CHECK_EQ(statuses[0].reporter, 0);
    }
  }
}

// A peer that was left behind in an operation may still read the data that a later
// operation would replace.
TEST(a_broken_group_is_not_written_to) {
  ranks::run(2, [](Rank& rank) {
    std::vector<std::byte> data(kSmallBytes, static_cast<std::byte>(0x10 + rank.self));
    const auto sum = [&](const Bounds& bounds) {
      return all_reduce(rank.group, data.data(), data.size(), DType::uint8, ReduceOp::sum, bounds);
    };
    CHECK(sum(within()).ok());
    const auto published = [&] {
      const std::byte* start = rank.group.segment().exchange_buffer(0);
      return std::vector<std::byte>(start, start + kExchangeBytes + kSmallBytes);
    };
    if (rank.self == 0) {
      data.assign(kSmallBytes, std::byte{0x55});
      CHECK_EQ(sum(within(10ms)).code, Code::timeout);
      const auto before = published();
      data.assign(kSmallBytes, std::byte{0x66});
      check_refused(rank, Code::timeout);
      CHECK_EQ(sum(within()).code, Code::timeout);
      CHECK(published() == before);
    }
    rank.together.arrive_and_wait();
  });
}

TEST(waiting_for_a_rank_that_left_fails) {
  for (const int size : {2, 3, 5}) {
    for (const bool asleep : {false, true}) {
      Statuses statuses(size);
      ranks::run(size, [&](Rank& rank) {
        CHECK(barrier(rank.group, within()).ok());
        rank.together.arrive_and_wait();  // the barrier has ended everywhere
        if (rank.self == 0) {
          if (asleep) others_sleep(rank);
          rank.group.leave();
          rank.group.leave();  // a second call does nothing
          statuses[0] = {.code = Code::left};
        } else {
          statuses[rank.self] = barrier(rank.group, within());
          CHECK_EQ(statuses[rank.self].code, Code::left);
          CHECK_EQ(statuses[rank.self].peer, 0);
        }
      });
    }
  }
}

TEST(a_rank_that_fails_and_then_leaves_is_lost) {
  ranks::run(2, [](Rank& rank) {
    if (rank.self == 1) {
      rank.group.fail(true);
      rank.group.leave();
      rank.together.arrive_and_wait();
      return;
    }
    rank.together.arrive_and_wait();
    const Status status = barrier(rank.group, within());
    CHECK_EQ(status.code, Code::peer_lost);
    CHECK_EQ(status.peer, 1);
  });
}

// Ranks leave as soon as they are done; ranks that have all they need must succeed.
TEST(a_rank_that_leaves_after_its_part_causes_no_failure) {
  ranks::Random random(77);
  for (int round = 0; round < ranks::scaled(400); ++round) {
    const int size = 2 + static_cast<int>(random.below(4));
    const std::size_t count = random.one_in(2) ? random.below(100) : random.below(3 * kChunkBytes);
    const int root = static_cast<int>(random.below(static_cast<std::size_t>(size)));
    const std::size_t what = random.below(4);
    ranks::run(size, [&](Rank& rank) {
      std::vector<std::byte> data(count), more(count * static_cast<std::size_t>(size));
      std::vector<void*> parts;
      for (int i = 0; i < size; ++i) {
        parts.push_back(more.data() + static_cast<std::size_t>(i) * count);
      }
      ranks::random_delay(rank.random);
      Status status;
      constexpr DType u8 = DType::uint8;
      switch (what) {
        case 0: status = broadcast(rank.group, data.data(), count, u8, root, within()); break;
        case 1:
          status = all_reduce(rank.group, data.data(), count, u8, ReduceOp::sum, within());
          break;
        case 2:
          status = gather(rank.group, data.data(), parts.data(), count, u8, root, within());
          break;
        default: status = scatter(rank.group, parts.data(), data.data(), count, u8, root, within());
      }
      if (!CHECK(status.ok())) {
        std::printf("operation %zu count %zu of %d: code %d peer %d\n", what, count, size,
                    static_cast<int>(status.code), status.peer);
      }
    });
  }
}

TEST(a_signal_handler_that_raises_breaks_the_group) {
  Statuses statuses(3);
  interrupt_now = false;
  ranks::run(3, [&](Rank& rank) {
    Bounds bounds = within();
    if (rank.self == 0) {
      bounds.interrupted = [] { return interrupt_now.load(); };
      interrupt_now = true;
      statuses[0] = barrier(rank.group, bounds);
    } else {
      CHECK(ranks::eventually([&] { return !rank.group.failure().ok(); }));
      statuses[rank.self] = barrier(rank.group, bounds);
    }
    check_refused(rank, Code::interrupted);
  });
  statuses.check_same(Code::interrupted);
  CHECK_EQ(statuses[0].reporter, 0);
}

TEST(an_interrupted_rank_reports_the_interrupt) {
  ranks::run(2, [](Rank& rank) {
    if (rank.self == 0) {
      (void)rank.group.abort({{.code = Code::aborted, .reporter = 0}, {.count = 5}});
      const Status status =
          rank.group.abort({{.code = Code::interrupted, .reporter = 0}, {.count = 6}});
      CHECK_EQ(status.code, Code::interrupted);
    }
    rank.together.arrive_and_wait();
    CHECK_EQ(rank.group.failure().code, Code::aborted);
    CHECK_EQ(rank.group.failure_report().mine.count, 5u);
  });
}

TEST(a_rank_without_memory_fails_all_ranks) {
  for (const int poor : {0, 2}) {
    Statuses statuses(3);
    ranks::run(
        3,
        [&](Rank& rank) {
          if (rank.self == poor) {
            // Unmapped pages cannot be allocated: this simulates a host without memory.
            munmap(rank.group.segment().large_ring(poor), kLargeRing);
            munmap(rank.group.segment().exchange_buffer(0), 2 * kExchangeBytes);
          }
          std::vector<std::byte> data(kSmallBytes + 1);
          statuses[rank.self] = all_reduce(rank.group, data.data(), data.size(), DType::uint8,
                                           ReduceOp::sum, within());
        },
        Mapping::own);
    statuses.check_same(Code::out_of_memory);
    CHECK_EQ(statuses[0].reporter, poor);
    CHECK_EQ(statuses[0].error, ENOMEM);
  }
}

// Only the fingerprints and the abort word distinguish ranks that disagree at random.
TEST(random_disagreement_never_hangs) {
  ranks::Random random(3);
  for (int round = 0; round < ranks::scaled(200); ++round) {
    const int size = 2 + static_cast<int>(random.below(4));
    Statuses statuses(size);
    const std::size_t odd = random.below(static_cast<std::size_t>(size));
    const std::size_t when = random.below(30);
    ranks::run(size, [&](Rank& rank) {
      std::vector<std::byte> data(2 * kChunkBytes);
      Status status;
      for (std::size_t i = 0; status.ok() && i <= when; ++i) {
        const std::size_t wrong = i == when && static_cast<std::size_t>(rank.self) == odd;
        const std::size_t count = (i % 3 == 0 ? kSmallBytes * 2 : 10 * i) + wrong;
        ranks::random_delay(rank.random);
        status = all_reduce(rank.group, data.data(), count, DType::uint8, ReduceOp::max, within());
        // A rank far down a tree may learn of it before its parent has passed down the one before.
        CHECK(status.ok() ? i < when : i + 1 >= when);
      }
      statuses[rank.self] = status;
    });
    statuses.check_same(Code::mismatch);
  }
}

// The second thread must not begin while the first one waits for a peer.
TEST(a_second_thread_waits_for_the_first_ones_collective) {
  ranks::run(2, [](Rank& rank) {
    std::int32_t first = 1, second = 10;
    const auto add = [&](std::int32_t& value) {
      CHECK(all_reduce(rank.group, &value, 1, DType::int32, ReduceOp::sum, within()).ok());
    };
    if (rank.self == 0) {
      std::thread one([&] { add(first); });
      CHECK(ranks::eventually([&] { return rank.group.sequence() == 1; }));
      std::thread two([&] { add(second); });
      const auto end = Clock::now() + 100ms;
      while (Clock::now() < end) CHECK_EQ(rank.group.sequence(), 1U);
      rank.together.arrive_and_wait();
      one.join();
      two.join();
    } else {
      rank.together.arrive_and_wait();
      add(first);
      add(second);
    }
    CHECK_EQ(first, 2);
    CHECK_EQ(second, 20);
  });
}
