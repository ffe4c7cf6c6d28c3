// Memory of a process that the other ranks on its host can map: tensors in it need no staging.
//
// A process has one arena for all of its groups: a memfd as large as the machine's memory. Only
// allocated parts get pages. A peer maps the whole arena once, through /proc/<pid>/fd/<fd>, when an
// operation first refers to it.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "phalanx/sealed_memory.h"
#include "phalanx/status.h"

namespace phalanx {

// The location of an object in its owner's arena.
struct ArenaLocation {
  std::int32_t descriptor = -1;
  std::uint64_t offset = 0;
};

class Arena {
 public:
  // Returns this process's arena, created by the first call. A forked child creates its own, and
  // what it writes to its parent's is seen by nobody else. Null with `system` and errno if that
  // fails.
  static Arena* own(Status& status);
  // Returns the location of [data, data + bytes), if it lies in this process's arena.
  static std::optional<ArenaLocation> locate(const void* data, std::size_t bytes);

  // Allocates whole pages, backed by memory. Null with `out_of_memory` and errno.
  std::byte* allocate(std::size_t bytes, Status& status);
  // Frees the pages; `data` came from allocate.
  void release(std::byte* data);

  std::byte* base() const { return memory_.base(); }
  // The number of allocated bytes.
  std::size_t in_use() const;

  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

 private:
  explicit Arena(SealedMemory memory);
  static Arena* make(Status& status);
  static void leave_to_parent();

  SealedMemory memory_;
  pid_t owner_;
  bool is_shared_ = true;  // writer: leave_to_parent, in a process that has one thread
  mutable std::mutex mutex_;
  std::map<std::size_t, std::size_t> free_;  // offset to size; neighbours are merged
  std::map<std::size_t, std::size_t> used_;
};

// A view of a peer's arena in this process. Shared by all groups with that peer.
class ArenaView {
 public:
  // Null with `system` and errno if it fails.
  static std::shared_ptr<const ArenaView> open(int pid, int descriptor, Status& status);
  ArenaView(const ArenaView&) = delete;
  ArenaView& operator=(const ArenaView&) = delete;

  std::byte* at(std::uint64_t offset) const { return memory_.base() + offset; }

 private:
  explicit ArenaView(SealedMemory memory) : memory_(std::move(memory)) {}

  SealedMemory memory_;
};

}  // namespace phalanx
