// The writers of rows, and the repair of rows whose writer has ended.
#include <unistd.h>

#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <string>

#include "phalanx/process.h"
#include "rows_access.h"

namespace phalanx {
namespace {

// The identity of a process: its pid, which Linux keeps below 2^22, and its start time in kernel
// ticks, or 0 if that is unknown. So another process that reuses the pid is not mistaken for it.
constexpr int kPidBits = 22;
constexpr std::uint64_t kPidMask = (std::uint64_t{1} << kPidBits) - 1;

std::uint64_t start_of(std::uint64_t identity) { return identity >> kPidBits; }
int pid_of(std::uint64_t identity) { return static_cast<int>(identity & kPidMask); }

std::uint64_t identity_of(int pid) {
  char path[64];
  std::snprintf(path, sizeof path, "/proc/%d/stat", pid);
  std::FILE* file = std::fopen(path, "re");
  std::uint64_t start = 0;
  if (file != nullptr) {
    char text[2048] = {};
    const std::size_t size = std::fread(text, 1, sizeof text - 1, file);
    std::fclose(file);
    const std::string stat(text, size);
    const auto name_end = stat.rfind(')');
    if (name_end == std::string::npos ||
        std::sscanf(stat.c_str() + name_end,
                    ") %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d "
                    "%*d %" SCNu64,
                    &start) != 1) {
      start = 0;
    }
  }
  return start << kPidBits | static_cast<std::uint64_t>(pid);
}

std::uint64_t own_identity() {
  static std::atomic<std::uint64_t> known = 0;  // its value is all that matters: relaxed
  const int pid = getpid();
  std::uint64_t identity = known.load(std::memory_order_relaxed);
  // Recomputed in a forked child, and if the file could not be opened before.
  if (pid_of(identity) != pid || start_of(identity) == 0) {
    identity = identity_of(pid);
    known.store(identity, std::memory_order_relaxed);
  }
  return identity;
}

// Whether all of its threads have ended.
bool ended(std::uint64_t identity) {
  Process process;
  if (const int error = process.open(pid_of(identity)); error != 0) {
    return error == ESRCH;
  }
  // The handle refers to the current process with this pid. If its start time differs, the process
  // in question has ended.
  const std::uint64_t found = identity_of(pid_of(identity));
  if (start_of(found) != 0 && start_of(identity) != 0 && found != identity) {
    return true;
  }
  return process.ended();
}

}  // namespace

// All that a process did is visible to a process that has seen its end: the kernel is in between,
// and tears the process down and reports it under its own locks. And what it did is a prefix of its
// program, up to one instruction: a release store never precedes the stores before it. So no load
// of a dead writer's data needs to pair with its stores; it does pair wherever that costs nothing.
bool Rows::repair(std::size_t slot) {
  if (slot >= kRowWriters) {
    return false;  // not a slot of a valid writer
  }
  RowWriter& dead = writer(slot);
  // Pairs with the claim of the slot.
  std::uint64_t identity = dead.owner.load(std::memory_order_acquire);
  if (identity == 0 || !ended(identity)) {
    return false;
  }
  PHALANX_STEP("rows: take over the slot");
  // One process wins. From here on it is the writer: if it dies too, it is repaired in the same
  // way. Acquires the writes of an earlier repair, and all that it had acquired.
  if (!dead.owner.compare_exchange_strong(identity, own_identity(), std::memory_order_acq_rel)) {
    return false;
  }
  // Stored before the row was acquired; if the lock word disagrees, no row is held.
  const std::uint64_t row = dead.row.load(std::memory_order_relaxed);
  // Pairs with its acquisition (RowWriterSlot::acquire).
  const std::uint64_t word = row < shape_.rows ? lock(row).load(std::memory_order_acquire) : 0;
  if ((word & kRowOwner) == slot + 1) {
    // The backup precedes the first change. Without it there was no change. Pairs with the store in
    // RowWriterSlot::acquire, after which the backup is complete.
    if (dead.saved.load(std::memory_order_acquire) == row + 1) {
      for (std::uint32_t part = 0; part < shape_.parts; ++part) {
        PHALANX_STEP("rows: restore");
        store_row(words(part, row), backup(slot, part), row_bytes());
      }
    }
    PHALANX_STEP("rows: release the restored row");
    // As in RowWriterSlot::release.
    lock(row).store(next_version(word), std::memory_order_release);
  }
  PHALANX_STEP("rows: free the slot");
  // Pairs with the next claim.
  dead.owner.store(0, std::memory_order_release);
  return true;
}

int Rows::writer_pid(std::uint64_t word) const {
  const std::uint64_t owner = word & kRowOwner;
  // For error messages only: nothing depends on it.
  return owner == 0 || owner > kRowWriters
             ? 0
             : pid_of(writer(owner - 1).owner.load(std::memory_order_relaxed));
}

RowWriterSlot::RowWriterSlot(Rows& rows, Rows::Timeout timeout) : rows_(rows), timeout_(timeout) {
  RowWait wait(timeout);
  while (!claim()) {
    const auto check = [&] {
      bool any = false;
      for (std::size_t slot = 0; slot < kRowWriters; ++slot) {
        any = rows_.repair(slot) || any;
      }
      return any;
    };
    if (!wait.pause(check)) {
      return;
    }
  }
}

bool RowWriterSlot::claim() {
  const std::uint64_t own = own_identity();
  // Processes start at different slots, so that they seldom compete for the same one.
  const auto first = static_cast<std::size_t>(pid_of(own));
  for (std::size_t i = 0; i < kRowWriters; ++i) {
    const std::size_t slot = (first + i) % kRowWriters;
    RowWriter& writer = rows_.writer(slot);
    std::uint64_t no_owner = 0;
    PHALANX_STEP("rows: claim a slot");
    // Acquires the writes of the last owner, whose store to free the slot this pairs with.
    if (writer.owner.load(std::memory_order_relaxed) == 0 &&
        writer.owner.compare_exchange_strong(no_owner, own, std::memory_order_acq_rel)) {
      slot_ = slot;
      return true;
    }
  }
  return false;
}

RowWriterSlot::~RowWriterSlot() {
  if (valid()) {
    // Pairs with the next claim: the backup may be overwritten.
    rows_.writer(slot_).owner.store(0, std::memory_order_release);
  }
}

bool RowWriterSlot::acquire(std::uint64_t row) {
  RowWriter& self = rows_.writer(slot_);
  auto& lock = rows_.lock(row);
  // For a repair: there is no backup yet, and this is the row that may be held. Both are stored
  // before the row is acquired, since that store releases.
  self.saved.store(0, std::memory_order_relaxed);
  self.row.store(row, std::memory_order_relaxed);
  RowWait wait(timeout_);
  while (true) {
    PHALANX_STEP("rows: acquire a row");
    word_ = lock.load(std::memory_order_relaxed);
    // Acquires the writes of the last writer (release), and releases the row number of this slot.
    if ((word_ & kRowOwner) == 0 &&
        lock.compare_exchange_strong(word_, word_ | (slot_ + 1), std::memory_order_acq_rel)) {
      break;
    }
    const std::uint64_t owner = word_ & kRowOwner;
    if (!wait.pause([&] { return owner != 0 && rows_.repair(owner - 1); })) {
      pid_ = rows_.writer_pid(word_);
      row_ = row;
      return false;
    }
  }
  row_ = row;
  for (std::uint32_t part = 0; part < rows_.shape_.parts; ++part) {
    PHALANX_STEP("rows: back up");
    load_row(rows_.backup(slot_, part), rows_.words(part, row), rows_.row_bytes());
  }
  PHALANX_STEP("rows: publish the backup");
  // Pairs with the load in Rows::repair. The stores of `store` release too, and so come after it.
  self.saved.store(row + 1, std::memory_order_release);
  return true;
}

void RowWriterSlot::release() {
  PHALANX_STEP("rows: release");
  // Pairs with the first check of a reader, and with the next writer's `acquire`.
  rows_.lock(row_).store(next_version(word_), std::memory_order_release);
}

RowsResult RowWriterSlot::stuck(std::size_t at) const {
  if (!valid()) {
    return {.kind = RowsResult::Kind::full, .at = at};
  }
  return {.kind = RowsResult::Kind::stuck,
          .at = at,
          .value = static_cast<std::int64_t>(row_),
          .pid = pid_};
}

}  // namespace phalanx
