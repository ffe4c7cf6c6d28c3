// Inside of rows_*.cpp: how one row is read, and how one is written to.
#pragma once

#include <sched.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <thread>

#include "kernels/kernels.h"
#include "phalanx/hooks.h"
#include "phalanx/rows.h"
#include "phalanx/wait.h"

namespace phalanx {

// The lock word: the version of its rows, and the place of who writes to one of them + 1.
constexpr std::uint64_t kRowOwner = 0xff;
static_assert(kRowWriters < kRowOwner);
constexpr std::uint64_t next_version(std::uint64_t word) { return (word | kRowOwner) + 1; }

// Copies the first `bytes` of a row. Each load pairs with the store of who has written it
// (put_row).
inline void load_words(std::byte* to, const std::atomic<std::uint64_t>* from, std::size_t bytes) {
  const std::size_t whole = bytes / sizeof(std::uint64_t);
  for (std::size_t i = 0; i < whole; ++i) {
    PHALANX_STEP("rows: word read");
    const std::uint64_t word = from[i].load(std::memory_order_acquire);
    std::memcpy(to + i * sizeof word, &word, sizeof word);
  }
  if (const std::size_t rest = bytes % sizeof(std::uint64_t); rest != 0) {
    const std::uint64_t word = from[whole].load(std::memory_order_acquire);
    std::memcpy(to + whole * sizeof word, &word, rest);
  }
}

// The same, by as wide loads as the processor has (kernels/rows.h); where a test steps in between
// any two words, word by word.
inline void load_row(std::byte* to, const std::atomic<std::uint64_t>* from, std::size_t bytes) {
#if !defined(PHALANX_HOOKS)
  if (const kernels::LoadRow take = kernels::in_use().load_row; take != nullptr) {
    take(to, from, bytes);
    return;
  }
#endif
  load_words(to, from, bytes);
}

// Replaces them, by who has taken the row. Each store pairs with the loads of readers (take_row).
inline void store_row(std::atomic<std::uint64_t>* to, const std::byte* from, std::size_t bytes) {
  for (std::size_t at = 0; at < bytes; at += sizeof(std::uint64_t)) {
    std::uint64_t word = 0;
    std::memcpy(&word, from + at, std::min(sizeof word, bytes - at));
    PHALANX_STEP("rows: word written");
    to[at / sizeof word].store(word, std::memory_order_release);
  }
}

// Asks for the memory of a row that comes soon: a core that waits for one row at a time is slow.
// Inlined, since GCC leaves out calls of a function that does nothing but this.
[[gnu::always_inline]] inline void Rows::prefetch(std::uint64_t row, std::uint32_t parts) const {
  constexpr std::size_t kMaxBytes = 8 * kCacheLine;  // from there on the core goes ahead by itself
  // A core waits for some 24 lines at a time for its first cache; for its second for more.
  const bool wide = stride_ > 4 * kCacheLine;
  __builtin_prefetch(&lock(row));
  for (std::uint32_t part = 0; part < parts; ++part) {
    const auto* from = reinterpret_cast<const std::byte*>(words(part, row));
    const auto* end = from + std::min(stride_, kMaxBytes);
    for (from -= reinterpret_cast<std::uintptr_t>(from) % kCacheLine; from < end;
         from += kCacheLine) {
      if (wide) {
        __builtin_prefetch(from, 0, 2);
      } else {
        __builtin_prefetch(from);
      }
    }
  }
}

// How long a call still waits for one row. Whoever is waited for works for less than a microsecond,
// unless it lost its core, was stopped, or died.
class RowWait {
 public:
  explicit RowWait(Rows::Timeout timeout) : timeout_(timeout) {}

  // A pause, ever longer. `look` is called now and then, and says whether all is well again. False
  // once the patience is over.
  template <class Check>
  bool pause(Check&& check) {
    if (++pauses_ <= kSpins) {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
      return true;
    }
    const auto now = Clock::now();
    if (pauses_ == kSpins + 1) {
      begin_ = now;
      next_check_ = now + kFirstCheck;
    } else if (now >= next_check_) {
      if (check()) {
        return true;
      }
      if (now - begin_ >= timeout_) {
        return false;
      }
      next_check_ = now + kNextCheck;
    }
    if (now - begin_ < kFirstCheck) {
      sched_yield();
    } else {
      std::this_thread::sleep_for(kSleep);
    }
    return true;
  }

 private:
  static constexpr int kSpins = 200;
  static constexpr auto kFirstCheck = std::chrono::milliseconds(1);
  static constexpr auto kNextCheck = std::chrono::milliseconds(5);
  static constexpr auto kSleep = std::chrono::microseconds(100);

  Rows::Timeout timeout_;
  int pauses_ = 0;
  Clock::time_point begin_;
  Clock::time_point next_check_;
};

// Reads rows, each as some write has left it.
class RowReader {
 public:
  static constexpr std::size_t kBlock = 8;

  RowReader(Rows& rows, Rows::Timeout timeout) : rows_(rows), timeout_(timeout) {}

  // Reads up to kBlock rows: `copy(k)` copies number k, and may be called several times; what it
  // has got last counts when this returns `count`. Else it returns which one is stuck. In blocks,
  // so that a core fetches many rows at a time: nothing in them waits for another.
  template <class Copy>
  std::size_t read(const std::int64_t* rows, std::size_t count, Copy&& copy) {
    std::array<std::uint64_t, kBlock> words;
    for (std::size_t k = 0; k < count; ++k) {
      // Pairs with the store that freed the row (RowPlace::free): what was written before is there.
      words[k] = lock_of(rows[k]).load(std::memory_order_acquire);
    }
    for (std::size_t k = 0; k < count; ++k) {
      copy(k);
    }
    PHALANX_STEP("rows: check again");
    for (std::size_t k = 0; k < count; ++k) {
      // After the loads of `copy`, since those acquire.
      const std::uint64_t now = lock_of(rows[k]).load(std::memory_order_relaxed);
      const bool same = now == words[k] && (now & kRowOwner) == 0;
      if (!same && !read_again(rows[k], [&] { copy(k); })) {
        return k;
      }
    }
    return count;
  }
  // Where `read` came to a row that is stuck: who writes to it.
  RowsResult stuck(std::size_t at, std::int64_t row) const {
    return {.kind = RowsResult::Kind::stuck, .at = at, .value = row, .pid = pid_};
  }

 private:
  const std::atomic<std::uint64_t>& lock_of(std::int64_t row) const {
    return rows_.lock(static_cast<std::uint64_t>(row));
  }

  template <class Copy>
  [[gnu::noinline]] bool read_again(std::int64_t row, Copy&& copy) {
    const auto& lock = lock_of(row);
    RowWait wait(timeout_);
    while (true) {
      // Pairs with the store that freed the row, as the first look does; and, where the row is
      // taken, with its taking (RowPlace::take), before which stands which row the place has.
      const std::uint64_t word = lock.load(std::memory_order_acquire);
      const std::uint64_t owner = word & kRowOwner;
      if (owner == 0) {
        copy();
        PHALANX_STEP("rows: check again");
        // After the loads of `copy`, since those acquire.
        if (lock.load(std::memory_order_relaxed) == word) {
          return true;
        }
      }
      const auto check = [&] { return owner != 0 && rows_.repair(owner - 1); };
      if (!wait.pause(check)) {
        pid_ = rows_.writer_pid(word);
        return false;
      }
    }
  }

  Rows& rows_;
  Rows::Timeout timeout_;
  std::int32_t pid_ = 0;
};

// The place of a call that writes. It has at most one row at a time.
class RowWriterSlot {
 public:
  RowWriterSlot(Rows& rows, Rows::Timeout timeout);
  ~RowWriterSlot();
  RowWriterSlot(const RowWriterSlot&) = delete;
  RowWriterSlot& operator=(const RowWriterSlot&) = delete;

  bool valid() const { return slot_ != kRowWriters; }
  // Takes a row and sets all parts of it aside. False when somebody else has it for too long.
  bool acquire(std::uint64_t row);
  // What was set aside: the row as it is.
  const std::byte* old(std::uint32_t part) const { return rows_.backup(slot_, part); }
  void store(std::uint32_t part, const std::byte* from) {
    PHALANX_STEP("rows: store");
    store_row(rows_.words(part, row_), from, rows_.row_bytes());
  }
  void release();
  RowsResult stuck(std::size_t at) const;

 private:
  bool claim();

  Rows& rows_;
  Rows::Timeout timeout_;
  std::size_t slot_ = kRowWriters;
  std::uint64_t row_ = 0;
  std::uint64_t word_ = 0;  // of the lock, as it was
  std::int32_t pid_ = 0;    // who has the row
};

}  // namespace phalanx
