// Rows, with other calls between any two steps, or words, of a call.
#include <unistd.h>

#include <condition_variable>
#include <functional>
#include <mutex>
#include <string_view>
#include <thread>
#include <vector>

#include "few_rows.h"
#include "process_faults.h"

using namespace few_rows;
using namespace process_faults;

namespace {

constexpr auto kBrief = std::chrono::microseconds(1);
const std::vector<float> kMinusOne(kWidth, -1.0F);

int to_come = -1;
std::function<void()> intruder;

void step_in(const char*) {
  if (to_come-- == 0) intruder();  // whose own steps come after
}

// Runs `body`, and `other` before its step number `step`. False if it has no such step.
template <class Body, class Other>
bool with(int step, Other&& other, Body&& body) {
  intruder = other;
  to_come = step;
  step_hook.store(&step_in);
  body();
  step_hook.store(nullptr);
  return to_come < 0;
}

// Reads row 2, if that is possible at once. The row must be whole; `value` identifies the write.
bool try_read(Rows& rows, float& value) {
  Buffers<float> buffers(rows, {2});
  const RowsResult result = rows.gather(buffers.list(), buffers.to.data(), kBrief);
  if (!result.ok()) {
    CHECK(result.kind == ResultKind::stuck);
    CHECK_EQ(result.pid, getpid());
    return false;
  }
  CHECK(one_write(buffers, 0));
  value = buffers.parts[0][0];
  return true;
}

float second(Rows& rows) {
  float value = -1;
  CHECK(try_read(rows, value));
  return value;
}

RowsResult step_down(Rows& rows, Rows::Timeout timeout) {
  const std::int64_t row = 2;
  return rows.update({&row, 1}, kMinusOne.data(), {.lr = 1}, timeout);
}

}  // namespace

TEST(a_write_at_any_step_of_a_read) {
  const auto rows = few();
  int step = 0;
  const auto write = [&] { CHECK(write_one(*rows, 2, static_cast<float>(step + 1)).ok()); };
  Buffers<float> buffers(*rows, {1, 2, 3, 2, 4, 2});
  while (with(step, write, [&] {
    CHECK(rows->gather(buffers.list(), buffers.to.data(), kTimeout).ok());
    for (std::size_t i = 0; i < buffers.numbers.size(); ++i) CHECK(one_write(buffers, i));
  })) {
    ++step;
  }
  CHECK(step > 300);
  const int gathered = step;
  const std::int64_t offset = 0;
  Buffers<float> out(*rows, {2});
  while (with(step - gathered, write, [&] {
    CHECK(rows->pool(out.list(), {&offset, 1}, Pooling::sum, nullptr, out.to[0], kTimeout).ok());
    const auto& sum = out.parts[0];
    CHECK(std::count(sum.begin(), sum.end(), sum[0]) == kWidth);
  })) {
    ++step;
  }
  CHECK(step - gathered > 18);
}

TEST(a_second_write_at_any_word_of_the_second_attempt) {
  const auto rows = few();
  static Rows* table;
  static int words;
  static int second_at;
  static bool inside;
  table = rows.get();
  // An attempt reads some 50 words.
  for (second_at = 4; second_at < 120; ++second_at) {
    CHECK(write_one(*rows, 2, 1).ok());
    words = 0;
    inside = false;
    step_hook.store([](const char* step) {
      if (inside || std::string_view(step) != "rows: word read") return;
      if (words == 3 || words == second_at) {
        inside = true;
        CHECK(write_one(*table, 2, static_cast<float>(words)).ok());
        inside = false;
      }
      ++words;
    });
    const float found = second(*rows);
    step_hook.store(nullptr);
    CHECK(found == 3 || found == static_cast<float>(second_at));
    CHECK(words > 90);
  }
}

TEST(a_read_at_any_step_of_a_write) {
  const auto rows = few();
  CHECK(write_one(*rows, 2, 1).ok());
  float last = 1;
  int refused = 0;
  int step = 0;
  const auto read = [&] {
    float value = 0;
    if (!try_read(*rows, value)) {
      ++refused;
      return;
    }
    CHECK(value == last || value == last + 1);
  };
  while (with(step, read, [&] { CHECK(write_one(*rows, 2, last + 1).ok()); })) {
    ++step;
    CHECK_EQ(second(*rows), ++last);
  }
  CHECK(refused > 100);
  CHECK(refused < step);
}

TEST(an_update_at_any_step_of_an_update) {
  const auto rows = create({.rows = 3, .width = kWidth});
  float expected = 0;
  int step = 0;
  const auto update = [&] { expected += step_down(*rows, kBrief).ok() ? 1.0F : 0.0F; };
  while (with(step, update, [&] { CHECK(step_down(*rows, kTimeout).ok()); })) {
    ++step;
    ++expected;
    Buffers<float> buffers(*rows, {2});
    CHECK(rows->gather(buffers.list(), buffers.to.data(), kTimeout).ok());
    CHECK(buffers.parts[0] == std::vector<float>(kWidth, expected));
  }
  CHECK(step > 40);
}

TEST(a_writer_that_dies_and_is_repaired_during_a_read) {
  const auto rows = few();
  for (int word = 0; check::failures == 0; ++word) {
    CHECK(write_one(*rows, 2, 1).ok());
    // At a word of the read a writer leaves half of a row; before the second check it is repaired.
    static int words_left;
    static pid_t child;
    static Rows* table;
    words_left = word;
    child = 0;
    table = rows.get();
    step_hook.store([](const char* step) {
      const std::string_view name(step);
      if (name == "rows: word read" && words_left-- == 0) {
        step_hook.store(nullptr);
        child = run_with_fault(8, SIGKILL, [] { (void)write_one(*table, 2, 9); });
        CHECK(child != 0);
        step_hook.store([](const char* later) {
          if (std::string_view(later) == "rows: check again") {
            step_hook.store(nullptr);
            CHECK(all_whole(*table));
          }
        });
      }
    });
    CHECK_EQ(second(*rows), 1.0F);
    step_hook.store(nullptr);
    if (child == 0) {
      CHECK(word > 50);
      return;
    }
  }
}

namespace {

// Threads that stop before a step, each with a role of its own, until they are released.
class Stops {
 public:
  static void arrive(const char* step) {
    if (waits_at.empty() || waits_at != step || --passes > 0) return;
    waits_at = {};
    std::unique_lock lock(mutex);
    ++waiting;
    changed.notify_all();
    changed.wait(lock, [turn = role] { return open[turn]; });
  }
  static void await(int count) {
    std::unique_lock lock(mutex);
    CHECK(changed.wait_for(lock, kTimeout, [count] { return waiting >= count; }));
  }
  static void let_go(std::size_t role_to_go) {
    const std::lock_guard lock(mutex);
    open[role_to_go] = true;
    changed.notify_all();
  }

  static inline thread_local std::string_view waits_at;
  static inline thread_local int passes = 0;
  static inline thread_local std::size_t role = 0;

 private:
  static inline std::mutex mutex;
  static inline std::condition_variable changed;
  static inline int waiting = 0;
  static inline bool open[4] = {};
};

std::thread stopping(std::size_t role, std::string_view before, std::function<void()> body) {
  return std::thread([role, before, body = std::move(body)] {
    Stops::role = role;
    Stops::waits_at = before;
    body();
  });
}

}  // namespace

// All slots are in use; then one has a dead owner, and two processes repair it, one of them late.
TEST(slots_run_out_and_are_repaired_once) {
  const auto rows = create({.rows = kRowWriters + 10, .width = kWidth, .parts = kParts});
  CHECK(write_one(*rows, 2, 1).ok());
  const pid_t child = run_with_fault(8, SIGKILL, [&] { (void)write_one(*rows, 2, 9); });
  CHECK(child != 0);
  step_hook.store(&Stops::arrive);
  std::vector<std::thread> writers;
  for (std::size_t i = 1; i < kRowWriters; ++i) {
    const auto row = static_cast<std::int64_t>(9 + i);
    writers.push_back(
        stopping(0, "rows: release", [&rows, row] { CHECK(write_one(*rows, row, 5).ok()); }));
  }
  Stops::await(kRowWriters - 1);
  // No slot is free until some process notices that one owner is dead.
  auto late = stopping(1, "rows: take over the slot", [&] {
    Buffers<float> buffers(*rows, {2});
    CHECK(rows->gather(buffers.list(), buffers.to.data(), kTimeout).ok());
    CHECK(one_write(buffers, 0) && buffers.parts[0][0] == 1.0F);
  });
  Stops::await(kRowWriters);
  CHECK_EQ(second(*rows), 1.0F);
  // That slot is in use again, and its row half written, when the other process continues.
  CHECK(write_one(*rows, 3, 2).ok());
  auto next = stopping(2, "rows: store", [&] {
    Stops::passes = 2;
    CHECK(write_one(*rows, 3, 7).ok());
  });
  Stops::await(kRowWriters + 1);
  const RowsResult full = write_one(*rows, 4, 1, std::chrono::milliseconds(30));
  CHECK(full.kind == ResultKind::full);
  Stops::let_go(1);
  late.join();
  CHECK(write_one(*rows, 4, 1, std::chrono::milliseconds(30)).kind == ResultKind::full);
  Stops::let_go(2);
  next.join();
  CHECK(write_one(*rows, 4, 1).ok());
  Stops::let_go(0);
  for (auto& writer : writers) writer.join();
  step_hook.store(nullptr);
  CHECK(all_whole(*rows));
  Buffers<float> buffers(*rows, {2, 3, 10, 9 + kRowWriters - 1});
  CHECK(rows->gather(buffers.list(), buffers.to.data(), kTimeout).ok());
  for (const auto& [i, value] : {std::pair{0, 1.0F}, {1, 7.0F}, {2, 5.0F}, {3, 5.0F}}) {
    CHECK_EQ(buffers.parts[0][static_cast<std::size_t>(i) * kWidth], value);
  }
}
