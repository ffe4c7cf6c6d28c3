// Internal to rows_*.cpp: reading and writing of single rows.
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

// The lock word: the version of its rows, and the slot of the writer of one of them + 1.
constexpr std::uint64_t kRowOwner = 0xff;
static_assert(kRowWriters < kRowOwner);
constexpr std::uint64_t next_version(std::uint64_t word) { return (word | kRowOwner) + 1; }

// Copies the first `bytes` of a row. Each load pairs with the store of the writer (store_row).
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

// The same, with the widest loads of the processor (kernels/rows.h); word by word if a test hooks
// in between any two words.
inline void load_row(std::byte* to, const std::atomic<std::uint64_t>* from, std::size_t bytes) {
#if !defined(PHALANX_HOOKS)
  if (const kernels::LoadRow take = kernels::in_use().load_row; take != nullptr) {
    take(to, from, bytes);
    return;
  }
#endif
  load_words(to, from, bytes);
}

// Replaces a row, which the caller has acquired. Each store pairs with the loads of readers
// (load_row).
inline void store_row(std::atomic<std::uint64_t>* to, const std::byte* from, std::size_t bytes) {
  for (std::size_t at = 0; at < bytes; at += sizeof(std::uint64_t)) {
    std::uint64_t word = 0;
    std::memcpy(&word, from + at, std::min(sizeof word, bytes - at));
    PHALANX_STEP("rows: word written");
    to[at / sizeof word].store(word, std::memory_order_release);
  }
}

// Prefetches the memory of a row that is needed soon: a core that waits for one row at a time is
// slow. Inlined, since GCC drops calls of a function that only prefetches.
[[gnu::always_inline]] inline void Rows::prefetch(std::uint64_t row, std::uint32_t parts) const {
  // beyond that, the hardware prefetcher takes over
  constexpr std::size_t kMaxBytes = 8 * kCacheLine;
  // A core has room for some 24 outstanding lines for its first-level cache, and for more for its
  // second.
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

// Limits the wait of a call for one row. The holder of a row works for less than a microsecond,
// unless it is preempted, stopped or dead.
class RowWait {
 public:
  explicit RowWait(Rows::Timeout timeout) : timeout_(timeout) {}

  // Pauses for increasing times. `check` is called from time to time, and returns whether the wait
  // is over. False once the timeout has passed.
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

// Reads rows, each as some write left it.
class RowReader {
 public:
  static constexpr std::size_t kBlock = 8;

  RowReader(Rows& rows, Rows::Timeout timeout) : rows_(rows), timeout_(timeout) {}

  // Reads up to kBlock rows: `copy(k)` copies number k, and may be called several times; its last
  // copy counts if this returns `count`. Otherwise it returns the number of the stuck row. Rows are
  // read in blocks, so that a core fetches many at a time, without dependencies between them.
  template <class Copy>
  std::size_t read(const std::int64_t* rows, std::size_t count, Copy&& copy) {
    std::array<std::uint64_t, kBlock> words;
    for (std::size_t k = 0; k < count; ++k) {
      // Pairs with the store that released the row (RowWriterSlot::release): earlier writes are
      // visible.
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
  // The result if `read` gets stuck at a row: names its writer.
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
      // Pairs with the store that released the row, as the first check does; and, if the row is
      // held, with its acquisition (RowWriterSlot::acquire), before which the row number is stored
      // in the slot.
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

// The slot of a writing call. It holds at most one row at a time.
class RowWriterSlot {
 public:
  RowWriterSlot(Rows& rows, Rows::Timeout timeout);
  ~RowWriterSlot();
  RowWriterSlot(const RowWriterSlot&) = delete;
  RowWriterSlot& operator=(const RowWriterSlot&) = delete;

  bool valid() const { return slot_ != kRowWriters; }
  // Acquires a row and backs up all parts of it. False if another process holds it for too long.
  bool acquire(std::uint64_t row);
  // The backup: the row before the write.
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
  std::uint64_t word_ = 0;  // of the lock, before
  std::int32_t pid_ = 0;    // the holder of the row
};

}  // namespace phalanx
