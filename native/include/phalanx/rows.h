// A table of rows in shared memory, such as embeddings, with the optimizer's state of each row.
//
// One process creates it, and others of the host map it. All may read and write. A reader gets
// every row as some write left it, never half of a write. It waits only for a writer of this very
// row, or of one with the same lock. Different rows of one call may come from different moments.
//
// Layout, each part on a page boundary:
//   Header | Writer x kRowWriters | lock words | values | state ... | backups of the writers
//
// Row r has lock word r modulo their number, which is a power of two and at most kRowLocks. So the
// lock words stay in the caches; a lock per row would be another cache miss per access. Rows that
// share a lock word are never written at the same moment, which is the only consequence.
//
// Writers: of a lock word, the process that acquires the row, from the moment the row is free until
// it is released; of a row and its state, the process that has acquired it; of a backup, the owner
// of the slot. The other fields are described below.
//
// A lock word holds the version of its rows, and the slot of the writer of one of them. A reader
// loads the word, the row, and the word again, and retries if it has changed (a sequence lock).
// Values are read and written in atomic words of 64 bits: loads acquire and stores release. That
// costs nothing on x86, and orders them with the lock word without fences:
//   a reader that sees one word of a write synchronises with it, so its second load of the lock
//   word sees that the row was acquired for that write, or a later value.
//
// A writer may die while it holds a row. So before it changes the row, it copies the old contents
// to a backup in shared memory. The next process that needs the row finds that its writer has
// ended, takes over the writer's slot, restores the old contents and releases the row. So no row
// ever holds half of a write, an unfinished write has no effect, and no process waits for a dead
// one. A repair that dies is repaired in the same way, from the same backup. A process waits for a
// stopped writer, for as long as its caller allows.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "phalanx/reduce.h"
#include "phalanx/sealed_memory.h"
#include "phalanx/segment.h"
#include "phalanx/status.h"

namespace phalanx {

inline constexpr std::uint64_t kRowsMagic = 0x53574f5258485002;  // "\2PHXROWS"
inline constexpr std::uint32_t kRowsVersion = 1;
// The number of concurrent writing calls in all processes together; others wait.
inline constexpr std::size_t kRowWriters = 64;
inline constexpr std::uint64_t kRowLocks = std::uint64_t{1} << 13;
inline constexpr std::uint64_t kMaxRows = std::uint64_t{1} << 36;
inline constexpr std::uint32_t kMaxRowElements = 1U << 20;
inline constexpr std::uint32_t kMaxRowParts = 4;

struct RowsShape {
  std::uint64_t rows = 0;
  std::uint32_t width = 0;       // elements of a row
  std::uint32_t parts = 1;       // the values, and one part per state tensor
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
  // The number of updates begun. Writers: all processes that update.
  alignas(kCacheLine) std::atomic<std::uint64_t> step;
};
static_assert(sizeof(RowsHeader) == 2 * kCacheLine);

// The slot of one writing call.
struct RowWriter {
  // The owner of the slot: pid and start time; 0: none. Acquired by a compare-and-swap from 0 or,
  // for a repair, from the owner that has ended. Freed by its owner.
  alignas(kCacheLine) std::atomic<std::uint64_t> owner;
  // Writer of both: the owner. `row` is the row that it acquires or has acquired, stored before the
  // row is acquired. `saved` is the same + 1 once the backup of the row is complete, 0 before.
  std::atomic<std::uint64_t> row;
  std::atomic<std::uint64_t> saved;
};
static_assert(sizeof(RowWriter) == kCacheLine);

// The result of a call.
struct [[nodiscard]] RowsResult {
  enum class Kind : std::uint8_t {
    done,
    index,  // number `at` of the rows is `value`, which is out of range
    // number `at` of the offsets is `value`, which is too large or less than the one before
    offset,
    // Row `value`, number `at`, or one with the same lock, is held by process `pid` for
    // too long. 0: by changing processes, so that there was no moment to read it.
    stuck,
    full,  // all writer slots are in use for too long
  };
  Kind kind = Kind::done;
  std::size_t at = 0;
  std::int64_t value = 0;
  std::int32_t pid = 0;

  bool ok() const { return kind == Kind::done; }
};

// The rows of a call: `count` numbers, in any order, possibly repeated.
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

// One step of an optimizer on some rows, as PyTorch's SGD, Adagrad and SparseAdam make it with a
// sparse gradient. State: Adagrad's sum of squares; Adam's first and second moments.
struct OptimizerStep {
  RowOptimizer optimizer = RowOptimizer::sgd;
  double lr = 0;
  double lr_decay = 0;  // Adagrad's
  double eps = 0;       // Adagrad's and Adam's
  double beta1 = 0;     // Adam's
  double beta2 = 0;
  // The number of the step, if several calls make it; 0: the next one, which this call counts.
  std::uint64_t number = 0;

  std::uint32_t parts() const { return static_cast<std::uint32_t>(optimizer) + 1; }
};

class Rows {
 public:
  using Timeout = std::chrono::steady_clock::duration;

  // Creates a table of zeros, backed by memory. Null with `out_of_memory` or `system`, and errno;
  // EINVAL: invalid shape.
  static std::unique_ptr<Rows> create(const RowsShape& shape, std::uint64_t nonce, Status& status);
  // Opens the table of another process, which must keep the descriptor open. Null with `system`:
  // EPROTO if it is something else, has another nonce, or belongs to a process in another pid
  // namespace.
  static std::unique_ptr<Rows> open(int pid, int descriptor, std::uint64_t nonce, Status& status);
  Rows(const Rows&) = delete;
  Rows& operator=(const Rows&) = delete;

  const RowsShape& shape() const { return shape_; }
  std::size_t bytes() const { return memory_.bytes(); }
  // The distance of two rows in bytes.
  std::size_t stride() const { return stride_; }
  // The memory of all rows of a part. Writing to it directly requires that no other process
  // accesses the table.
  std::byte* part(std::uint32_t part) const { return values_ + part * part_bytes_; }
  int descriptor() const { return memory_.descriptor(); }
  // Call it once all processes have opened the table, which lives as long as it is mapped.
  void close_descriptor() { memory_.close_descriptor(); }
  std::size_t row_bytes() const { return shape_.width * size_of(shape_.dtype); }
  // The number of updates.
  std::uint64_t step() const { return header().step.load(std::memory_order_relaxed); }
  void set_step(std::uint64_t step) { header().step.store(step, std::memory_order_relaxed); }

  // All calls check all row numbers first; if one is wrong, nothing has been done. Buffers hold
  // `row_bytes()` per row, in the order of the list, aligned like their elements. A call waits up
  // to `timeout` for a row that another process writes to.

  // Copies rows. `parts`: the destination of each part of the shape; null: skip it. A row and its
  // state come from the same moment.
  RowsResult gather(const RowList& list, void* const* parts, Timeout timeout);
  // Replaces rows. `parts`: the source of each part; null: keep it.
  RowsResult write(const RowList& list, const void* const* parts, Timeout timeout);
  // Combines the rows of each bag; an empty one yields zeros. `weights`: one per row number, of the
  // table's dtype, for sum; null: 1.
  RowsResult pool(const RowList& list, const Bags& bags, Pooling pooling, const void* weights,
                  void* out, Timeout timeout);
  // Makes one step of an optimizer with the gradients of these rows, which must be distinct. Counts
  // as a step of the table even if there are no rows. `step.parts()` is at most that of the shape.
  // If it gets stuck at a row, the rows before have been updated.
  RowsResult update(const RowList& list, const void* gradients, const OptimizerStep& step,
                    Timeout timeout);

 private:
  friend class RowReader;
  friend class RowWriterSlot;
  using Word = std::atomic<std::uint64_t>;

  Rows(SealedMemory memory, const RowsShape& shape);

  RowsHeader& header() const { return *reinterpret_cast<RowsHeader*>(memory_.base()); }
  RowWriter& writer(std::size_t slot) const;
  Word& lock(std::uint64_t row) const { return reinterpret_cast<Word*>(locks_)[row & lock_mask_]; }
  Word* words(std::uint32_t part, std::uint64_t row) const;
  // The backup of a part of a row, in a writer's slot.
  std::byte* backup(std::size_t slot, std::uint32_t part) const;
  RowsResult check(const RowList& list) const;
  void prefetch(std::uint64_t row, std::uint32_t parts) const;
  void prefetch_block(const RowList& list, std::size_t i, std::uint32_t parts) const;
  // The pid of the process that holds a row, given its lock word; 0: none.
  int writer_pid(std::uint64_t word) const;
  // If the owner of this slot has ended: restores the row that it held, and frees the slot. Returns
  // whether it did.
  bool repair(std::size_t slot);

  template <class T>
  RowsResult pool_as(const RowList& list, const Bags& bags, Pooling pooling, const T* weights,
                     T* out, Timeout timeout);
  template <class T>
  RowsResult update_as(const RowList& list, const T* gradients, const OptimizerStep& step,
                       Timeout timeout);

  SealedMemory memory_;
  RowsShape shape_;
  std::size_t stride_;
  std::byte* locks_;
  std::uint64_t lock_mask_;
  std::byte* values_;
  std::size_t part_bytes_;
  std::byte* backups_;
};

}  // namespace phalanx
