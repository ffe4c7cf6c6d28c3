// Rows whose writers are killed or stopped: a reader still gets whole rows.
#include <sys/resource.h>
#include <unistd.h>

#include "few_rows.h"
#include "process_faults.h"

using namespace few_rows;
using namespace process_faults;

TEST(a_writer_killed_at_any_time_leaves_whole_rows) {
  const auto rows = few();
  Random random(8);
  for (int round = 0; round < ranks::scaled(240) && check::failures == 0; ++round) {
    const pid_t child = fork();
    if (child == 0) {
      for (std::size_t i = 0;; ++i) {
        if (!write_one(*rows, static_cast<std::int64_t>(i % kFew), static_cast<float>(i)).ok()) {
          _exit(1);
        }
      }
    }
    // If both share a busy core, each write waits until the child has its turn again.
    const auto end_time = Clock::now() + std::chrono::milliseconds(10);
    for (std::size_t i = random.below(300); i > 0 && Clock::now() < end_time; --i) {
      sched_yield();
      CHECK(write_one(*rows, static_cast<std::int64_t>(i % kFew), -static_cast<float>(i)).ok());
    }
    end(child, SIGKILL);
    CHECK(all_whole(*rows));
    for (std::size_t row = 0; row < kFew; ++row) {
      CHECK(write_one(*rows, static_cast<std::int64_t>(row), 3).ok());
    }
  }
}

#if defined(PHALANX_HOOKS)
namespace {

// The value of row 2, which must come from one write.
float second(Rows& rows) {
  CHECK(all_whole(rows));
  Buffers<float> buffers(rows, {2});
  CHECK(rows.gather(buffers.list(), buffers.to.data(), kTimeout).ok());
  return buffers.parts[1][0];
}

}  // namespace

TEST(a_writer_killed_at_every_step_leaves_the_old_or_the_new_row) {
  const auto rows = few();
  float last = 1;  // never an older one again
  for (int step = 0; check::failures == 0; ++step) {
    CHECK(write_one(*rows, 2, 1).ok());
    const pid_t child = run_with_fault(step, SIGKILL, [&] {
      // In one slot, so that the backup of the first write is there when the second begins.
      Buffers<float> buffers(*rows, {2, 2});
      for (auto& part : buffers.parts) {
        std::fill_n(part.begin(), kWidth, 5.0F);
        std::fill_n(part.begin() + kWidth, kWidth, 9.0F);
      }
      CHECK(rows->write(buffers.list(), buffers.from.data(), kTimeout).ok());
    });
    const float found = second(*rows);
    CHECK(found >= last && (found == 1 || found == 5 || found == 9));
    last = found;
    if (child == 0) {
      CHECK(step > 16);
      break;
    }
  }
  CHECK_EQ(last, 9.0F);
}

TEST(a_repair_that_dies_is_repaired) {
  const auto rows = few();
  int most = 0;
  for (int step = 0; check::failures == 0; ++step) {
    CHECK(write_one(*rows, 2, 1).ok());
    bool repaired = false;
    for (const int first : {4, 6, 8}) {  // some with a backup of the row, some before
      CHECK(run_with_fault(first, SIGKILL, [&] { (void)write_one(*rows, 2, 9); }) != 0);
      const pid_t child = run_with_fault(step, SIGKILL, [&] { (void)all_whole(*rows); });
      repaired = repaired || child == 0;
      CHECK_EQ(second(*rows), 1.0F);
    }
    most = step;
    if (repaired) break;
  }
  CHECK(most > 4);
}

TEST(a_stopped_writer_is_reported) {
  const auto rows = few();
  CHECK(write_one(*rows, 2, 1).ok());
  const pid_t child = run_with_fault(8, SIGSTOP, [&] { (void)write_one(*rows, 2, 9); });
  CHECK(child != 0);
  const auto brief = std::chrono::milliseconds(30);
  Buffers<float> buffers(*rows, {1, 2});
  const std::vector<float> gradients(2 * kWidth, 1.0F);
  for (const RowsResult& result :
       {rows->gather(buffers.list(), buffers.to.data(), brief),
        rows->write(buffers.list(), buffers.from.data(), brief),
        rows->update(buffers.list(), gradients.data(), {.lr = 1}, brief)}) {
    CHECK(result.kind == ResultKind::stuck);
    CHECK_EQ(result.at, 1UL);
    CHECK_EQ(result.value, 2);
    CHECK_EQ(result.pid, child);
  }
  end(child, SIGKILL);
  CHECK(write_one(*rows, 1, 1).ok());  // the update may have written several values
  CHECK_EQ(second(*rows), 1.0F);
}

TEST(slots_of_dead_writers_are_reused) {
  const auto rows = few();
  for (std::size_t i = 0; i < kRowWriters + 10 && check::failures == 0; ++i) {
    CHECK(run_with_fault(2 + static_cast<int>(i % 7), SIGKILL,
                         [&] { (void)write_one(*rows, 2, 9); }) != 0);
  }
  CHECK(write_one(*rows, 2, 3).ok());
  CHECK_EQ(second(*rows), 3.0F);
}

TEST(of_rows_that_share_a_lock_the_right_one_is_restored) {
  const auto rows = create({.rows = kRowLocks + kFew, .width = kWidth, .parts = kParts});
  const auto other = static_cast<std::int64_t>(kRowLocks + 2);
  CHECK(write_one(*rows, 2, 1).ok());
  CHECK(write_one(*rows, other, 2).ok());
  for (const std::int64_t row : {std::int64_t{2}, other}) {
    CHECK(run_with_fault(8, SIGKILL, [&] { (void)write_one(*rows, row, 9); }) != 0);
    Buffers<float> buffers(*rows, {other, 2});
    CHECK(rows->gather(buffers.list(), buffers.to.data(), kTimeout).ok());
    CHECK(one_write(buffers, 0) && one_write(buffers, 1));
    CHECK_EQ(buffers.parts[0][0], 2.0F);
    CHECK_EQ(buffers.parts[0][kWidth], 1.0F);
  }
}

TEST(a_writer_with_an_unknown_start_time_is_not_taken_for_dead) {
  const auto rows = few();
  CHECK(write_one(*rows, 2, 1).ok());
  const pid_t child = run_with_fault(8, SIGSTOP, [&] {
    const rlimit none{.rlim_cur = 0, .rlim_max = 0};
    CHECK_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
    (void)write_one(*rows, 2, 9);
  });
  CHECK(child != 0);
  const RowsResult result = write_one(*rows, 2, 3, std::chrono::milliseconds(30));
  CHECK(result.kind == ResultKind::stuck);
  CHECK_EQ(result.pid, child);
  end(child, SIGKILL);
  CHECK_EQ(second(*rows), 1.0F);
}

TEST(a_reused_pid_is_another_process) {
  const auto rows = few();
  const Raw raw(*rows);
  const pid_t child = fork();
  if (child == 0) {
    while (true) pause();
  }
  // A row held by slot 5, half written, with a backup.
  const auto leave = [&](std::uint64_t owner) {
    CHECK(write_one(*rows, 2, 4).ok());
    raw.row(0, 2)[0] = 9;
    for (std::uint32_t part = 0; part < kParts; ++part) {
      std::fill_n(raw.backup(5, part), kWidth, 7.0F);
    }
    raw.writer(5).row = 2;
    raw.writer(5).saved = 3;
    raw.writer(5).owner = owner;
    raw.lock(2) = (raw.lock(2) & ~0xffULL) | 6;
  };
  // No process started one tick after the kernel.
  leave(1ULL << 22 | static_cast<std::uint64_t>(child));
  CHECK_EQ(second(*rows), 7.0F);
  // If the start time of the owner is unknown, the process with its pid is taken for the owner.
  leave(static_cast<std::uint64_t>(child));
  const RowsResult result = write_one(*rows, 2, 3, std::chrono::milliseconds(30));
  CHECK(result.kind == ResultKind::stuck);
  CHECK_EQ(result.pid, child);
  end(child, SIGKILL);
  CHECK_EQ(second(*rows), 7.0F);
  CHECK_EQ(raw.writer(5).owner.load(), 0UL);
}

TEST(invalid_numbers_are_not_followed) {
  const auto rows = few();
  const Raw raw(*rows);
  const auto brief = std::chrono::milliseconds(30);
  raw.lock(2) = 0x100 | 200;  // no such slot
  RowsResult result = write_one(*rows, 2, 3, brief);
  CHECK(result.kind == ResultKind::stuck);
  CHECK_EQ(result.pid, 0);
  Buffers<float> buffers(*rows, {2});
  result = rows->gather(buffers.list(), buffers.to.data(), brief);
  CHECK(result.kind == ResultKind::stuck);
  raw.lock(2) = 0x100 | 6;
  raw.writer(5).row = 1ULL << 40 | 2;  // no such row, but one with the same lock
  raw.writer(5).saved = raw.writer(5).row + 1;
  raw.writer(5).owner = 1ULL << 22 | static_cast<std::uint64_t>(getpid());
  CHECK(write_one(*rows, 2, 3, brief).kind == ResultKind::stuck);
  CHECK_EQ(raw.writer(5).owner.load(), 0UL);
}
#endif
