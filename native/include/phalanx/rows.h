// A table of rows in shared memory, such as embeddings, with what an optimizer keeps for each row.
//
// One process creates it, others of the host map it. All may read, and all may write: a reader gets
// every row as some write has left it, never half of one, and waits for nobody but who is writing
// to this very row, or to one with the same lock. Different rows of one call may come from
// different moments.
//
// Layout, each part on a page boundary:
//   Header | Writer x kRowWriters | lock words | values | state ... | what writers set aside
//
// Row r has lock word r modulo their number, which is a power of two and kRowLocks at most: so they
// stay in the caches, where a lock for each row would be one more place in memory that has to be
// waited for. Rows that share one have never the same moment of a write, and that is all.
//
// Writers: of a lock word, who takes the row, from when it is free until it is freed; of a row and
// its state, who has taken it; of what is set aside, who has the place. The rest is said below.
//
// A lock word holds the version of its rows, and who writes to one of them. A reader takes the
// word, the row, and the word again; if it has changed, once more (a sequence lock). Values are
// read and written in words of 64 bits that are atomic: loads acquire and stores release, which
// costs nothing on x86, and orders them with the lock word without fences:
//   a reader that sees one word of a write synchronises with it, so its second look at the lock
//   word sees that the row was taken for that write, or something later.
//
// A writer that dies holding a row: before it changes the row it sets its old contents aside in
// memory that all see. Whoever next comes to the row finds that its writer has ended, takes the
// writer's place over, puts the old contents back and frees the row. So there is never half of a
// write, a write that was not finished never was, and nobody waits for the dead. A repair that dies
// is repaired likewise, from the same contents. A writer that is stopped is waited for, for as long
// as the caller says.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "phalanx/reduce.h"
#include "phalanx/segment.h"
#include "phalanx/status.h"

namespace phalanx {

inline constexpr std::uint64_t kRowsMagic = 0x53574f5258485002;  // "\2PHXROWS"
inline constexpr std::uint32_t kRowsVersion = 1;
// Calls that write at the same time, in all processes together; others wait.
inline constexpr std::size_t kRowWriters = 64;
inline constexpr std::uint64_t kRowLocks = std::uint64_t{1} << 13;
inline constexpr std::uint64_t kMaxRows = std::uint64_t{1} << 36;
inline constexpr std::uint32_t kMaxRowElements = 1U << 20;
inline constexpr std::uint32_t kMaxRowParts = 4;

struct RowsShape {
  std::uint64_t rows = 0;
  std::uint32_t width = 0;       // elements of a row
  std::uint32_t parts = 1;       // the values, and as many times that of state
  DType dtype = DType::float32;  // or float64
};

struct RowsHeader {
  // Written by the creator before the table's address is published, constant from then on.
  std::uint64_t magic;
  std::uint32_t version;
  std::uint32_t dtype;
  std::uint64_t nonce;
  std::uint64_t bytes;
  std::uint64_t rows;
  std::uint32_t width;
  std::uint32_t parts;
  // Updates that have begun. Writers: all who update.
  alignas(kCacheLine) std::atomic<std::uint64_t> step;
};
static_assert(sizeof(RowsHeader) == 2 * kCacheLine);

// The place of one call that writes.
struct RowWriter {
  // Whose place it is: pid and start time; 0: nobody's. Taken by a compare-and-swap from 0, or, by
  // who repairs, from that of a process that has ended; given back by its owner.
  alignas(kCacheLine) std::atomic<std::uint64_t> owner;
  // Writer of both: the owner. The row that it takes or has taken, which stands there before the
  // row is taken; and, once all of the row's old contents are set aside, the same + 1; 0 before.
  std::atomic<std::uint64_t> row;
  std::atomic<std::uint64_t> saved;
};
static_assert(sizeof(RowWriter) == kCacheLine);

// What a call came to.
struct [[nodiscard]] RowsResult {
  enum class Kind : std::uint8_t {
    done,
    index,   // number `at` of the rows is `value`, which the table hasn't
    offset,  // number `at` of the offsets is `value`, which isn't after the one before, or too
             // large
    // Row `value`, number `at`, or one that has the same lock, is being written to by process `pid`
    // for too long; 0: by ever others, so that there was no moment to read it.
    stuck,
    full,  // all places of writers are taken, for too long
  };
  Kind kind = Kind::done;
  std::size_t at = 0;
  std::int64_t value = 0;
  std::int32_t pid = 0;

  bool ok() const { return kind == Kind::done; }
};

// Which rows a call is about: `count` numbers, in any order, also repeated.
struct RowList {
  const std::int64_t* rows;
  std::size_t count;
};

enum class Pooling : std::uint8_t { sum = 0, mean = 1, max = 2 };

// Bags as in PyTorch's EmbeddingBag: bag i has the rows from offsets[i] to offsets[i + 1], the last
// one to the end.
struct Bags {
  const std::int64_t* offsets;
  std::size_t count;
};

enum class RowOptimizer : std::uint8_t { sgd = 0, adagrad = 1, adam = 2 };

// One step of an optimizer, on rows alone, as PyTorch's SGD, Adagrad and SparseAdam make it with a
// sparse gradient. State: Adagrad's sum of squares; Adam's first and second moments.
struct OptimizerStep {
  RowOptimizer optimizer = RowOptimizer::sgd;
  double lr = 0;
  double lr_decay = 0;  // Adagrad's
  double eps = 0;       // Adagrad's and Adam's
  double beta1 = 0;     // Adam's
  double beta2 = 0;
  // Which step it is, if several calls make it; 0: the next one, which this call counts.
  std::uint64_t number = 0;

  std::uint32_t parts() const { return static_cast<std::uint32_t>(optimizer) + 1; }
};

class Rows {
 public:
  using Timeout = std::chrono::steady_clock::duration;

  // Zeros, backed by memory. Null with `out_of_memory` or `system`, and errno; EINVAL: the shape.
  static std::unique_ptr<Rows> create(const RowsShape& shape, std::uint64_t nonce, Status& status);
  // What another process has made, as long as it keeps the descriptor open. Null with `system`:
  // EPROTO if it is something else, has another nonce, or is of a process in another pid namespace.
  static std::unique_ptr<Rows> open(int pid, int descriptor, std::uint64_t nonce, Status& status);
  ~Rows();
  Rows(const Rows&) = delete;
  Rows& operator=(const Rows&) = delete;

  const RowsShape& shape() const { return shape_; }
  std::size_t bytes() const { return bytes_; }
  // Bytes from the beginning of a row to that of the next.
  std::size_t stride() const { return stride_; }
  // All rows of a part, as they lie there. Who writes to them here has nobody else look at them.
  std::byte* part(std::uint32_t part) const { return values_ + part * part_bytes_; }
  int descriptor() const { return fd_; }
  // Once everybody has opened it: the memory lives as long as somebody maps it.
  void close_descriptor();
  std::size_t row_bytes() const { return shape_.width * size_of(shape_.dtype); }
  // How many updates there were.
  std::uint64_t step() const { return header().step.load(std::memory_order_relaxed); }
  void set_step(std::uint64_t step) { header().step.store(step, std::memory_order_relaxed); }

  // All calls look at all numbers of rows first; where one is wrong nothing has been done. Buffers
  // hold `row_bytes()` per row, in the order of the list, aligned as their elements. A call waits
  // `patience` for a row that somebody else writes to.

  // Copies rows. `parts`: for each part of the shape where it goes to; null: nowhere. A row and its
  // state are of one moment.
  RowsResult gather(const RowList& list, void* const* parts, Timeout timeout);
  // Replaces rows. `parts`: for each part where it comes from; null: it stays as it is.
  RowsResult write(const RowList& list, const void* const* parts, Timeout timeout);
  // Combines the rows of each bag; an empty one gives zeros. `weights`: one per number of a row, of
  // the table's dtype, for sum; null: 1.
  RowsResult pool(const RowList& list, const Bags& bags, Pooling pooling, const void* weights,
                  void* out, Timeout timeout);
  // One step of an optimizer with the gradients of these rows, none of which is there twice. Counts
  // as a step of the table, also with no row at all. `step.parts()` is at most that of the shape.
  // Where it is stuck, rows before that one have been updated.
  RowsResult update(const RowList& list, const void* gradients, const OptimizerStep& step,
                    Timeout timeout);

 private:
  friend class RowReader;
  friend class RowWriterSlot;
  using Word = std::atomic<std::uint64_t>;

  Rows(std::byte* base, const RowsShape& shape, std::size_t bytes, int fd);
  static std::unique_ptr<Rows> map(int fd, const RowsShape& shape, std::size_t bytes,
                                   Status& status);

  RowsHeader& header() const { return *reinterpret_cast<RowsHeader*>(base_); }
  RowWriter& writer(std::size_t slot) const;
  Word& lock(std::uint64_t row) const { return reinterpret_cast<Word*>(locks_)[row & lock_mask_]; }
  Word* words(std::uint32_t part, std::uint64_t row) const;
  // Where the writer of a place sets aside.
  std::byte* backup(std::size_t slot, std::uint32_t part) const;
  RowsResult check(const RowList& list) const;
  void prefetch(std::uint64_t row, std::uint32_t parts) const;
  void prefetch_block(const RowList& list, std::size_t i, std::uint32_t parts) const;
  // The pid of who has a row whose lock says this; 0: nobody.
  int writer_pid(std::uint64_t word) const;
  // If the writer of this place has ended: puts right what it has left, and frees the place. True
  // if that was done.
  bool repair(std::size_t slot);

  template <class T>
  RowsResult pool_as(const RowList& list, const Bags& bags, Pooling pooling, const T* weights,
                     T* out, Timeout timeout);
  template <class T>
  RowsResult update_as(const RowList& list, const T* gradients, const OptimizerStep& step,
                       Timeout timeout);

  std::byte* base_;
  RowsShape shape_;
  std::size_t stride_;
  std::size_t bytes_;
  std::byte* locks_;
  std::uint64_t lock_mask_;
  std::byte* values_;
  std::size_t part_bytes_;
  std::byte* backups_;
  int fd_;
};

}  // namespace phalanx
