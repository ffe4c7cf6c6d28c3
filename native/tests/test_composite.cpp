// Composite operations, for groups that span hosts: one operation in the flight recorder and in the
// sequence, several entered collectives for the ranks. And recvs that another host answers.
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

// Ranks are threads here, so all of them write to the one flight recorder of this process.
const FlightRecorder& test_recorder() {
  static const FlightRecorder* recorder = [] {
    const int fd = memfd_create("recorder", MFD_CLOEXEC);
    CHECK(fd >= 0 && ftruncate(fd, sizeof(RecorderLayout)) == 0);
    Status status;
    FlightRecorder::install(FlightRecorder::open(fd, RecorderIdentity{}, status));
    return FlightRecorder::own();
  }();
  return *recorder;
}

std::vector<Record> ended_records(Kind kind) {
  std::vector<std::byte> bytes(sizeof(RecorderLayout));
  CHECK(pread(test_recorder().descriptor(), bytes.data(), bytes.size(), 0) ==
        static_cast<ssize_t>(bytes.size()));
  RecorderContents read;
  CHECK_EQ(parse_recorder(bytes, kRecorderHistory, read), "");
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

TEST(a_composite_operation_counts_once) {
  test_recorder();
  ranks::run(3, [](Rank& rank) {
    rank.group.set_global_ranks({4, 5, 9}, 77);
    for (std::uint64_t number = 1; number <= 50; ++number) {
      CHECK(rank.group.begin_composite(all_reduce_of(number), within()).ok());
      std::vector<float> data(2 * number, static_cast<float>(rank.self));
      CHECK(barrier(rank.group, within()).ok());
      CHECK(broadcast(rank.group, data.data(), data.size(), DType::float32, 2, within()).ok());
      CHECK(std::ranges::all_of(data, [](float each) { return each == 2.0F; }));
      rank.group.begin_composite_wait(12);
      rank.group.end_composite_wait(12, 1h);
      rank.group.set_composite_progress(static_cast<std::uint8_t>(number));
      rank.group.end_composite(Code::ok);
      CHECK_EQ(rank.group.sequence(), number);
    }
    CHECK(barrier(rank.group, within()).ok());
    CHECK_EQ(rank.group.sequence(), 51U);
  });
  CHECK_EQ(ended_records(Kind::broadcast).size(), 0U);
  CHECK_EQ(ended_records(Kind::barrier).size(), 3U);
  const std::vector<Record> composite = ended_records(Kind::all_reduce);
  CHECK_EQ(composite.size(), 150U);
  for (const Record& record : composite) {
    CHECK_EQ(record.count, record.sequence);
    CHECK_EQ(record.waiting_for, 12);
    CHECK_EQ(record.progress, record.sequence);
    CHECK(record.outcome == Code::ok && record.waited >= 3'600'000'000'000ULL);
  }
}

TEST(different_composite_operations_are_a_mismatch) {
  ranks::run(2, [](Rank& rank) {
    const Status status =
        rank.group.begin_composite(all_reduce_of(rank.self == 0 ? 3 : 4), within());
    CHECK_EQ(status.code, Code::mismatch);
    CHECK_EQ(rank.group.begin_composite(all_reduce_of(3), within()).code, Code::mismatch);
    CHECK_EQ(rank.group.sequence(), 2U);
  });
}

TEST(a_failed_part_fails_the_composite_operation) {
  ranks::run(2, [](Rank& rank) {
    CHECK(rank.group.begin_composite(all_reduce_of(3), within()).ok());
    if (rank.self == 0) {
      const Status status = barrier(rank.group, within(20ms));
      CHECK_EQ(status.code, Code::timeout);
      rank.group.end_composite(status.code);
      rank.together.arrive_and_wait();
    } else {
      rank.together.arrive_and_wait();
      CHECK_EQ(barrier(rank.group, within()).code, Code::timeout);
      rank.group.end_composite(Code::timeout);
    }
    CHECK_EQ(rank.group.begin_composite(all_reduce_of(3), within()).code, Code::timeout);
  });
}

TEST(a_recv_of_any_source_is_withdrawn_or_answered) {
  test_recorder();
  const std::size_t before = ended_records(Kind::recv).size();
  constexpr int kRounds = 200;
  ranks::run(2, [](Rank& rank) {
    const int rounds = ranks::scaled(kRounds) + 10;
    for (int round = 0; round < rounds; ++round) {
      std::uint64_t value = 0;
      if (rank.self == 1) {
        value = 1'000 + static_cast<std::uint64_t>(round);
        ranks::random_delay(rank.random);
        const auto sent = rank.mailbox.isend(&value, 1, DType::int64, 0, 5, false);
        CHECK(rank.mailbox.wait(*sent, within()).ok());
        rank.together.arrive_and_wait();
        continue;
      }
      const auto expected = rank.mailbox.irecv(&value, 1, DType::int64, kAnySource, 5, false);
      ranks::random_delay(rank.random);
      if (rank.mailbox.withdraw(*expected, 17)) {
        CHECK(expected->done() && expected->status().ok());
        CHECK_EQ(value, 0U);
        CHECK(!rank.mailbox.withdraw(*expected, 17));
        const auto again = rank.mailbox.irecv(&value, 1, DType::int64, 1, 5, false);
        CHECK(rank.mailbox.wait(*again, within()).ok());
      } else {
        CHECK(rank.mailbox.wait(*expected, within()).ok());
        CHECK_EQ(expected->peer(), 1);
      }
      CHECK_EQ(value, 1'000 + static_cast<std::uint64_t>(round));
      rank.together.arrive_and_wait();
    }
  });
  const std::vector<Record> recvs = ended_records(Kind::recv);
  CHECK(recvs.size() > before);
  CHECK(std::ranges::all_of(recvs, [](const Record& each) { return each.outcome == Code::ok; }));
}

TEST(a_recv_that_a_remote_rank_may_answer_outlasts_the_local_ranks) {
  for (const bool remote : {true, false}) {
    ranks::run(2, [remote](Rank& rank) {
      if (rank.self == 1) {
        rank.group.leave();
        rank.together.arrive_and_wait();
        return;
      }
      rank.together.arrive_and_wait();
      rank.mailbox.expect_remote(remote);
      std::uint64_t value = 0;
      const auto unanswered = rank.mailbox.irecv(&value, 1, DType::int64, kAnySource, 5, false);
      const Status status = rank.mailbox.wait(*unanswered, within(remote ? 200ms : 60'000ms));
      CHECK_EQ(status.code, remote ? Code::timeout : Code::left);
    });
  }
}

TEST(remote_messages_are_recorded) {
  test_recorder();
  ranks::run(1, [](Rank& rank) {
    rank.group.set_global_ranks({6}, 78);
    const auto ours = [](const Record& each) { return each.sequence == 4'321; };
    const auto sent = rank.mailbox.begin_remote(Kind::send, 8, DType::float32, 40, 4'321);
    const auto received = rank.mailbox.begin_remote(Kind::recv, 9, DType::int64, -1, 4'321);
    rank.mailbox.begin_remote_wait(*received);
    CHECK(std::ranges::none_of(ended_records(Kind::send), ours));
    rank.mailbox.end_remote(*sent, Code::ok, 40);
    rank.mailbox.end_remote(*received, Code::peer_lost, 41);
    rank.mailbox.end_remote(*received, Code::ok, 42);  // only the first counts
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
