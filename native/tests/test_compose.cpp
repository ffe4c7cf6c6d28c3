// Operations that are composed of others, for groups that span hosts: one operation to the black
// box and to those who count, several meetings to the ranks. And recvs that another host answers.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

#include "phalanx/flight_recorder_reader.h"
#include "ranks.h"

using namespace phalanx;
using namespace std::chrono_literals;
using ranks::Rank;
using ranks::within;

namespace {

// Ranks are threads here, so all of them write to the one box of this process.
const FlightRecorder& the_box() {
  static const FlightRecorder* box = [] {
    const int fd = memfd_create("box", MFD_CLOEXEC);
    CHECK(fd >= 0 && ftruncate(fd, sizeof(BoxLayout)) == 0);
    Status status;
    FlightRecorder::adopt(FlightRecorder::open(fd, BoxIdentity{}, status));
    return FlightRecorder::own();
  }();
  return *box;
}

std::vector<Record> ended_records(Kind kind) {
  std::vector<std::byte> bytes(sizeof(BoxLayout));
  CHECK(pread(the_box().descriptor(), bytes.data(), bytes.size(), 0) ==
        static_cast<ssize_t>(bytes.size()));
  BoxContents read;
  CHECK_EQ(read_box(bytes, kBoxHistory, read), "");
  std::vector<Record> found;
  for (const auto& each : read.done) {
    if (each.kind == kind) found.push_back(each);
  }
  return found;
}

Fingerprint all_reduce_of(std::size_t count) {
  return {.count = count, .root = -1, .kind = Kind::all_reduce, .dtype = DType::float32};
}

}  // namespace

TEST(a_composed_operation_counts_once) {
  the_box();
  ranks::run(3, [](Rank& rank) {
    rank.group.set_names({4, 5, 9}, 77);
    for (std::uint64_t number = 1; number <= 50; ++number) {
      CHECK(rank.group.compose(all_reduce_of(number), within()).ok());
      std::vector<float> data(2 * number, static_cast<float>(rank.self));
      CHECK(barrier(rank.group, within()).ok());
      CHECK(broadcast(rank.group, data.data(), data.size(), DType::float32, 2, within()).ok());
      CHECK(std::ranges::all_of(data, [](float each) { return each == 2.0F; }));
      rank.group.compose_waits(12);
      rank.group.compose_waited(12, 1h);
      rank.group.compose_end(Code::ok);
      CHECK_EQ(rank.group.sequence(), number);
    }
    CHECK(barrier(rank.group, within()).ok());
    CHECK_EQ(rank.group.sequence(), 51U);
  });
  CHECK_EQ(ended_records(Kind::broadcast).size(), 0U);
  CHECK_EQ(ended_records(Kind::barrier).size(), 3U);
  const std::vector<Record> composed = ended_records(Kind::all_reduce);
  CHECK_EQ(composed.size(), 150U);
  for (const Record& record : composed) {
    CHECK_EQ(record.count, record.sequence);
    CHECK_EQ(record.waiting_for, 12);
    CHECK(record.outcome == Code::ok && record.waited >= 3'600'000'000'000ULL);
  }
}

TEST(ranks_that_compose_other_operations_are_told) {
  ranks::run(2, [](Rank& rank) {
    const Status status = rank.group.compose(all_reduce_of(rank.self == 0 ? 3 : 4), within());
    CHECK_EQ(status.code, Code::mismatch);
    CHECK_EQ(rank.group.compose(all_reduce_of(3), within()).code, Code::mismatch);
    CHECK_EQ(rank.group.sequence(), 2U);
  });
}

TEST(a_part_that_fails_fails_the_whole) {
  ranks::run(2, [](Rank& rank) {
    CHECK(rank.group.compose(all_reduce_of(3), within()).ok());
    if (rank.self == 0) {
      const Status status = barrier(rank.group, within(20ms));
      CHECK_EQ(status.code, Code::timeout);
      rank.group.compose_end(status.code);
      rank.together.arrive_and_wait();
    } else {
      rank.together.arrive_and_wait();
      CHECK_EQ(barrier(rank.group, within()).code, Code::timeout);
      rank.group.compose_end(Code::timeout);
    }
    CHECK_EQ(rank.group.compose(all_reduce_of(3), within()).code, Code::timeout);
  });
}

TEST(a_recv_of_any_source_is_taken_back_or_has_been_answered) {
  the_box();
  const std::size_t before = ended_records(Kind::recv).size();
  constexpr int kRounds = 200;
  ranks::run(2, [](Rank& rank) {
    const int rounds = ranks::scaled(kRounds) + 10;
    for (int round = 0; round < rounds; ++round) {
      std::uint64_t letter = 0;
      if (rank.self == 1) {
        letter = 1'000 + static_cast<std::uint64_t>(round);
        ranks::dawdle(rank.random);
        const auto sent = rank.mailbox.send(&letter, 1, DType::int64, 0, 5, false);
        CHECK(rank.mailbox.wait(*sent, within()).ok());
        rank.together.arrive_and_wait();
        continue;
      }
      const auto expected = rank.mailbox.recv(&letter, 1, DType::int64, kAnySource, 5, false);
      ranks::dawdle(rank.random);
      if (rank.mailbox.withdraw(*expected, 17)) {
        CHECK(expected->done() && expected->status().ok());
        CHECK_EQ(letter, 0U);
        CHECK(!rank.mailbox.withdraw(*expected, 17));
        const auto again = rank.mailbox.recv(&letter, 1, DType::int64, 1, 5, false);
        CHECK(rank.mailbox.wait(*again, within()).ok());
      } else {
        CHECK(rank.mailbox.wait(*expected, within()).ok());
        CHECK_EQ(expected->peer(), 1);
      }
      CHECK_EQ(letter, 1'000 + static_cast<std::uint64_t>(round));
      rank.together.arrive_and_wait();
    }
  });
  const std::vector<Record> recvs = ended_records(Kind::recv);
  CHECK(recvs.size() > before);
  CHECK(std::ranges::all_of(recvs, [](const Record& each) { return each.outcome == Code::ok; }));
}

TEST(who_may_get_a_message_from_elsewhere_waits_though_all_have_left) {
  for (const bool foreign : {true, false}) {
    ranks::run(2, [foreign](Rank& rank) {
      if (rank.self == 1) {
        rank.group.leave();
        rank.together.arrive_and_wait();
        return;
      }
      rank.together.arrive_and_wait();
      rank.mailbox.expect_foreign(foreign);
      std::uint64_t letter = 0;
      const auto vain = rank.mailbox.recv(&letter, 1, DType::int64, kAnySource, 5, false);
      const Status status = rank.mailbox.wait(*vain, within(foreign ? 200ms : 60'000ms));
      CHECK_EQ(status.code, foreign ? Code::timeout : Code::left);
    });
  }
}

TEST(messages_that_others_move_are_in_the_box) {
  the_box();
  ranks::run(1, [](Rank& rank) {
    rank.group.set_names({6}, 78);
    const auto ours = [](const Record& each) { return each.sequence == 4'321; };
    const auto sent = rank.mailbox.begin_foreign(Kind::send, 8, DType::float32, 40, 4'321);
    const auto awaited = rank.mailbox.begin_foreign(Kind::recv, 9, DType::int64, -1, 4'321);
    rank.mailbox.foreign_waits(*awaited);
    CHECK(std::ranges::none_of(ended_records(Kind::send), ours));
    rank.mailbox.end_foreign(*sent, Code::ok, 40);
    rank.mailbox.end_foreign(*awaited, Code::peer_lost, 41);
    rank.mailbox.end_foreign(*awaited, Code::ok, 42);  // only the first counts
    std::vector<Record> sends = ended_records(Kind::send);
    std::erase_if(sends, [&](const Record& each) { return !ours(each); });
    if (CHECK_EQ(sends.size(), 1U)) {
      CHECK(sends[0].count == 8 && sends[0].peer == 40 && sends[0].waited == 0);
    }
    std::vector<Record> recvs = ended_records(Kind::recv);
    std::erase_if(recvs, [&](const Record& each) { return !ours(each); });
    if (CHECK_EQ(recvs.size(), 1U)) {
      CHECK(recvs[0].peer == 41 && recvs[0].waiting_for == 41 && recvs[0].waited != 0);
      CHECK_EQ(recvs[0].outcome, Code::peer_lost);
    }
  });
}
