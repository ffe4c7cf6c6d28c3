// The decisions of an agreement, made by threads and processes at the same time, and ranks that are
// killed between them.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <barrier>
#include <thread>
#include <vector>

#include "phalanx/agreement.h"
#include "process_faults.h"
#include "ranks.h"

using namespace phalanx;
using process_faults::end;

namespace {

constexpr std::uint64_t kNonce = 42;
constexpr std::array kWanted = {Decision::joined, Decision::stranded, Decision::excluded};

std::unique_ptr<Segment> create(int ranks) {
  Status status;
  auto segment = Segment::create(ranks, kNonce, status);
  if (!CHECK(segment != nullptr)) std::abort();
  return segment;
}

std::unique_ptr<Segment> open(const Segment& segment, pid_t owner) {
  Status status;
  auto opened = Segment::open(owner, segment.descriptor(), segment.ranks(), kNonce, status);
  if (!CHECK(opened != nullptr)) std::abort();
  return opened;
}

Decision decide(const Segment& segment, int round, int rank, Decision wanted) {
  Status status;
  const Decision made = Agreement(segment).decide(round, rank, wanted, status);
  CHECK(status.ok());
  return made;
}

Decision decision(const Segment& segment, int round, int rank) {
  return Agreement(segment).decision(round, rank);
}

SegmentLocation location_of(int round) {
  return {.pid = round + 1, .descriptor = 3 * round, .nonce = ~std::uint64_t{0} - kNonce};
}

bool is_location_of(const std::optional<SegmentLocation>& found, int round) {
  const SegmentLocation right = location_of(round);
  return found && found->pid == right.pid && found->descriptor == right.descriptor &&
         found->nonce == right.nonce;
}

// The number of allocated pages of a segment.
std::size_t pages(const Segment& segment) {
  struct stat info{};
  CHECK_EQ(fstat(segment.descriptor(), &info), 0);
  return static_cast<std::size_t>(info.st_blocks) * 512 / kPage;
}

std::uintptr_t address_of(const Segment& segment, int round) {
  return reinterpret_cast<std::uintptr_t>(&segment.agreement_round(round));
}

}  // namespace

TEST(a_decision_does_not_change) {
  for (const Decision first : kWanted) {
    const auto segment = create(2);
    CHECK_EQ(decision(*segment, 0, 1), Decision::none);
    CHECK_EQ(decide(*segment, 0, 1, first), first);
    for (const Decision later : kWanted) {
      CHECK_EQ(decide(*segment, 0, 1, later), first);
      CHECK_EQ(decision(*segment, 0, 1), first);
    }
  }
}

TEST(rounds_and_ranks_are_independent) {
  for (const int ranks : {1, 2, 3, 64, 65, 200}) {
    const auto segment = create(ranks);
    const int rounds = segment->agreement_rounds();
    const auto wanted = [&](int round, int rank) {
      return kWanted[static_cast<std::size_t>(7 * round + rank + rank / 3) % kWanted.size()];
    };
    for (int round = 0; round < rounds; ++round) {
      if (round % 3 != 0) Agreement(*segment).publish(round, location_of(round));
      for (int rank = round % 2; rank < ranks; rank += 2) {
        CHECK_EQ(decide(*segment, round, rank, wanted(round, rank)), wanted(round, rank));
      }
    }
    for (int round = 0; round < rounds; ++round) {
      const auto found = Agreement(*segment).location(round);
      CHECK(round % 3 != 0 ? is_location_of(found, round) : !found);
      for (int rank = 0; rank < ranks; ++rank) {
        const bool is_made = rank % 2 == round % 2;
        CHECK_EQ(decision(*segment, round, rank), is_made ? wanted(round, rank) : Decision::none);
      }
    }
  }
}

// Each rank is a thread. What it wrote before it joined a round is visible to those that find it
// joined, and so are the words of the location that the first rank publishes.
TEST(threads_find_the_same_decisions) {
  constexpr int kRanks = 4;
  constexpr int kRounds = 2 * kRanks + 2;
  using Found = std::array<std::array<Decision, kRanks>, kRounds>;
  for (int i = 0; i < ranks::scaled(1'200) && check::failures == 0; ++i) {
    const auto owner = create(kRanks);
    std::array<std::array<int, kRanks>, kRounds> data{};
    std::array<Found, kRanks> found{};
    std::barrier together(kRanks);
    std::vector<std::thread> threads;
    for (int self = 0; self < kRanks; ++self) {
      threads.emplace_back([&, self] {
        const auto segment = Segment::share(*owner);
        const auto own = static_cast<std::size_t>(self);
        ranks::Random random(static_cast<std::uint64_t>(kRanks * i + self));
        for (int round = 0; round < kRounds; ++round) {
          const auto at = static_cast<std::size_t>(round);
          together.arrive_and_wait();
          ranks::random_delay(random);
          if (self == 0) Agreement(*segment).publish(round, location_of(round));
          data[at][own] = i + 1;
          found[own][at][own] = decide(*segment, round, self, Decision::joined);
          for (int rank = 0; rank < kRanks; ++rank) {
            const auto other = static_cast<std::size_t>(rank);
            if (rank == self) continue;
            Decision made = decision(*segment, round, rank);
            if (made == Decision::none) made = decide(*segment, round, rank, Decision::excluded);
            found[own][at][other] = made;
            if (made != Decision::joined) continue;
            CHECK_EQ(data[at][other], i + 1);
            if (rank == 0) CHECK(is_location_of(Agreement(*segment).location(round), round));
          }
        }
      });
    }
    for (auto& thread : threads) thread.join();
    for (const Found& each : found) CHECK(each == found[0]);
  }
}

// Nothing but the flag orders the accesses of the creator and the others.
TEST(threads_find_whole_locations) {
  for (int i = 0; i < ranks::scaled(1'200) && check::failures == 0; ++i) {
    const auto owner = create(2);
    std::thread reader([&] {
      const auto segment = Segment::share(*owner);
      for (int round = 0; round < segment->agreement_rounds(); ++round) {
        std::optional<SegmentLocation> found;
        CHECK(ranks::eventually(
            [&] { return (found = Agreement(*segment).location(round)).has_value(); }));
        CHECK(is_location_of(found, round));
      }
    });
    for (int round = 0; round < owner->agreement_rounds(); ++round) {
      Agreement(*owner).publish(round, location_of(round));
    }
    reader.join();
  }
}

TEST(processes_find_the_same_decisions_and_locations) {
  constexpr int kRanks = 3;
  constexpr int kRounds = 2 * kRanks + 2;
  struct Found {
    std::atomic<int> present;
    Decision decisions[kRanks][kRounds][kRanks];
    bool is_wrong[kRanks];
  };
  void* memory =
      mmap(nullptr, sizeof(Found), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  CHECK(memory != MAP_FAILED);
  const pid_t owner = getpid();
  for (int i = 0; i < ranks::scaled(400) && check::failures == 0; ++i) {
    const auto segment = create(kRanks);
    auto& found = *new (memory) Found{};
    std::vector<pid_t> children;
    for (int self = 0; self < kRanks; ++self) {
      children.push_back(fork());
      if (children.back() != 0) continue;
      const auto own = open(*segment, owner);
      ranks::Random random(static_cast<std::uint64_t>(kRanks * i + self));
      ++found.present;
      while (found.present < kRanks) sched_yield();
      for (int round = 0; round < kRounds; ++round) {
        if (self == 0) Agreement(*own).publish(round, location_of(round));
        ranks::random_delay(random);
        for (int rank = kRanks - 1; rank >= 0; --rank) {
          const auto wanted = kWanted[static_cast<std::size_t>(self)];
          found.decisions[self][round][rank] = decide(*own, round, rank, wanted);
        }
        const auto location = Agreement(*own).location(round);
        const bool is_late = found.decisions[self][round][0] == kWanted[0];
        found.is_wrong[self] |= location ? !is_location_of(location, round) : is_late;
      }
      _exit(check::failures);
    }
    for (const pid_t child : children) end(child);
    for (int self = 0; self < kRanks; ++self) {
      CHECK(!found.is_wrong[self]);
      for (int round = 0; round < kRounds; ++round) {
        for (int rank = 0; rank < kRanks; ++rank) {
          const Decision made = found.decisions[0][round][rank];
          CHECK(made != Decision::none);
          CHECK_EQ(found.decisions[self][round][rank], made);
          CHECK_EQ(decision(*segment, round, rank), made);
        }
      }
    }
  }
  munmap(memory, sizeof(Found));
}

// Ranks look at the next round before they decide there.
TEST(a_decision_allocates_the_pages_of_its_round_and_the_next) {
  for (const int ranks : {2, 65, 200}) {
    const auto segment = create(ranks);
    const int rounds = segment->agreement_rounds();
    const std::size_t before = pages(*segment);
    std::size_t allocated = 0;
    for (int round = 0; round < rounds; ++round) {
      CHECK_EQ(decide(*segment, round, ranks - 1, Decision::joined), Decision::joined);
      const std::uintptr_t first = address_of(*segment, 0);
      CHECK_EQ(first % kPage, 0UL);
      const std::size_t bytes = address_of(*segment, std::min(round + 2, rounds)) - first;
      CHECK_EQ(pages(*segment), before + whole_pages(bytes) / kPage);
      allocated = pages(*segment);
      for (const int looked_at : {round, std::min(round + 1, rounds - 1)}) {
        (void)decision(*segment, looked_at, ranks - 1);
        (void)Agreement(*segment).location(looked_at);
      }
      CHECK_EQ(pages(*segment), allocated);
    }
  }
}

TEST(a_lack_of_memory_is_reported) {
  for (const int ranks : {2, 65}) {
    const auto segment = create(ranks);
    for (int round = 0; round < 2; ++round) {
      CHECK_EQ(decide(*segment, round, 0, Decision::joined), Decision::joined);
    }
    // Unmapped pages cannot be allocated: this simulates a host without memory.
    const int last = segment->agreement_rounds() - 1;
    const std::uintptr_t page = address_of(*segment, last) / kPage * kPage;
    CHECK_EQ(munmap(reinterpret_cast<void*>(page), kPage), 0);
    Status status;
    CHECK_EQ(Agreement(*segment).decide(last, 0, Decision::joined, status), Decision::none);
    CHECK_EQ(status.code, Code::out_of_memory);
    CHECK_EQ(status.error, ENOMEM);
  }
}

#if defined(PHALANX_HOOKS)
using process_faults::run_with_fault;

// The victim creates the segment of round 0. If it has joined the next round, the others find the
// location; otherwise they can exclude it.
TEST(a_rank_killed_at_every_step_leaves_decisions_to_the_others) {
  constexpr int kRanks = 3;
  int found = 0;
  for (int step = 0; check::failures == 0; ++step) {
    const auto segment = create(kRanks);
    const pid_t child = run_with_fault(step, SIGKILL, [&] {
      const auto own = open(*segment, getppid());
      CHECK_EQ(decide(*own, 0, 0, Decision::joined), Decision::joined);
      CHECK_EQ(decide(*own, 0, 1, Decision::excluded), Decision::excluded);
      CHECK_EQ(decision(*own, 0, 2), Decision::none);
      Agreement(*own).publish(0, location_of(0));
      CHECK(is_location_of(Agreement(*own).location(0), 0));
      CHECK_EQ(decide(*own, 1, 0, Decision::joined), Decision::joined);
      CHECK_EQ(decide(*own, 1, 1, Decision::excluded), Decision::excluded);
      _exit(check::failures);
    });
    CHECK_EQ(decide(*segment, 0, 2, Decision::joined), Decision::joined);
    CHECK_EQ(decide(*segment, 1, 2, Decision::stranded), Decision::stranded);
    const auto location = Agreement(*segment).location(0);
    CHECK(!location || is_location_of(location, 0));
    for (int round = 0; round < 2; ++round) {
      const Decision victim = decide(*segment, round, 0, Decision::excluded);
      CHECK(victim == Decision::joined || victim == Decision::excluded);
      CHECK(victim == Decision::excluded || decision(*segment, 0, 0) == Decision::joined);
      if (round == 1 && victim == Decision::joined) CHECK(location.has_value());
      const Decision other = decide(*segment, round, 1, Decision::joined);
      CHECK(other == Decision::joined || other == Decision::excluded);
      CHECK(other == Decision::joined || victim == Decision::joined);
      found |= 1 << (3 * round + static_cast<int>(victim == Decision::joined) +
                     static_cast<int>(other == Decision::excluded));
      for (int rank = 0; rank < kRanks; ++rank) {
        const Decision made = decision(*segment, round, rank);
        for (const Decision later : kWanted) CHECK_EQ(decide(*segment, round, rank, later), made);
      }
    }
    if (child == 0) {
      CHECK(step > 6);
      break;
    }
  }
  CHECK_EQ(found, 0b111111);  // the victim had made none of its decisions, one, or both
}

// Victims and survivors decide at the same time.
TEST(ranks_killed_at_random_leave_decisions_to_the_others) {
  constexpr int kRanks = 3;
  ranks::Random random(9);
  for (int i = 0; i < ranks::scaled(160) && check::failures == 0; ++i) {
    const auto segment = create(kRanks);
    const int rounds = segment->agreement_rounds();
    const auto decide_all = [&](const Segment& own, Decision wanted) {
      std::vector<Decision> made;
      for (int round = 0; round < rounds; ++round) {
        for (int rank = 0; rank < kRanks; ++rank) {
          made.push_back(decide(own, round, rank, wanted));
        }
      }
      return made;
    };
    const pid_t owner = getpid();
    std::vector<pid_t> victims;
    for (int victim = 0; victim < 2; ++victim) {
      victims.push_back(fork());
      if (victims.back() == 0) {
        const auto own = open(*segment, owner);
        (void)decide_all(*own, kWanted[static_cast<std::size_t>(victim)]);
        while (true) pause();
      }
    }
    for (std::size_t turns = random.below(60); turns > 0; --turns) sched_yield();
    kill(victims[0], SIGKILL);
    const std::vector<Decision> made = decide_all(*segment, Decision::excluded);
    for (const pid_t victim : victims) end(victim, SIGKILL);
    CHECK(decide_all(*segment, Decision::joined) == made);
  }
}
#endif
