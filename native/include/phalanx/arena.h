// Memory of a process that the other ranks on its host can reach: what lies in it needs no staging.
//
// A process has one arena, for all of its groups: a memfd as large as the machine's memory, of
// which only what is allocated gets pages. A peer maps it through /proc/<pid>/fd/<fd>, whole and
// once, when an operation first names it.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "phalanx/status.h"

namespace phalanx {

// Where something lies in its owner's arena.
struct ArenaLocation {
  std::int32_t descriptor = -1;
  std::uint64_t offset = 0;
};

class Arena {
 public:
  // This process's arena, made at the first call; a forked child makes its own. Null with `system`
  // and errno when that fails.
  static Arena* own(Status& status);
  // The place of [data, data + bytes), if it lies in this process's arena.
  static std::optional<ArenaLocation> locate(const void* data, std::size_t bytes);

  // Whole pages, backed by memory. Null with `out_of_memory` and errno.
  std::byte* allocate(std::size_t bytes, Status& status);
  // Gives the pages back; `data` came from allocate.
  void release(std::byte* data);

  std::byte* base() const { return base_; }
  // Bytes that are allocated.
  std::size_t in_use() const;

  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

 private:
  Arena(std::byte* base, std::size_t bytes, int fd);
  static Arena* make(Status& status);

  std::byte* base_;
  std::size_t bytes_;
  int fd_;
  pid_t owner_;
  mutable std::mutex mutex_;
  std::map<std::size_t, std::size_t> free_;  // offset to size, never adjacent
  std::map<std::size_t, std::size_t> used_;
};

// A peer's arena as this process sees it. Shared by all groups with that peer.
class ArenaView {
 public:
  // Null with `system` and errno.
  static std::shared_ptr<const ArenaView> open(int pid, int descriptor, Status& status);
  ~ArenaView();
  ArenaView(const ArenaView&) = delete;
  ArenaView& operator=(const ArenaView&) = delete;

  std::byte* at(std::uint64_t offset) const { return base_ + offset; }

 private:
  ArenaView(std::byte* base, std::size_t bytes) : base_(base), bytes_(bytes) {}

  std::byte* base_;
  std::size_t bytes_;
};

}  // namespace phalanx
