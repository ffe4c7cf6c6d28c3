// Memory that processes of a host share: a memfd, so that there is nothing to unlink, and it
// disappears with its last process. Others open it through /proc/<pid>/fd/<fd>. It is sealed
// against shrinking and growing, since a truncated file would cause a SIGBUS in its peers.
#pragma once

#include <cstddef>
#include <utility>

#include "phalanx/status.h"

namespace phalanx {

inline constexpr std::size_t kPage = 4096;

constexpr std::size_t whole_pages(std::size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

// Creates such memory, without pages yet: they are allocated when they are written. Returns its
// descriptor, which is closed on exec; -1 and errno if that fails.
int create_sealed_memory(const char* name, std::size_t bytes);

// Opens the memory of another process, which must keep the descriptor open meanwhile. Returns a
// descriptor of its own; -1 and errno if that fails. EPROTO: it is something else.
int open_sealed_memory(int pid, int descriptor);

// Allocates the pages of [start, start + bytes) of shared memory now, so that lack of memory causes
// an error here and not a signal later. Never changes data that a peer may be writing there.
Status prefault(void* start, std::size_t bytes);

// A mapping of such memory, and its descriptor until that is closed.
class SealedMemory {
 public:
  // All three return a mapping without a base if they fail, and fill `status`: `system`, and errno.
  static SealedMemory create(const char* name, std::size_t bytes, Status& status);
  static SealedMemory open(int pid, int descriptor, Status& status);
  // Takes over the descriptor; if that is negative, errno says why. `flags`: further flags of mmap.
  static SealedMemory map(int descriptor, Status& status, int flags = 0);

  SealedMemory() = default;
  ~SealedMemory();
  SealedMemory(SealedMemory&& other) noexcept
      : base_(std::exchange(other.base_, nullptr)),
        bytes_(other.bytes_),
        descriptor_(std::exchange(other.descriptor_, -1)) {}
  SealedMemory& operator=(SealedMemory&&) = delete;
  SealedMemory(const SealedMemory&) = delete;
  SealedMemory& operator=(const SealedMemory&) = delete;

  std::byte* base() const { return base_; }
  std::size_t bytes() const { return bytes_; }
  int descriptor() const { return descriptor_; }
  // The memory lives as long as it is mapped.
  void close_descriptor();
  // Maps it anew at the same address, so that what this process writes from now on is its own. It
  // reads what others write, except in pages that it has written. For a forked child: calls nothing
  // but the kernel. False, without any effect, if that fails.
  bool make_private();

 private:
  std::byte* base_ = nullptr;
  std::size_t bytes_ = 0;
  int descriptor_ = -1;
};

}  // namespace phalanx
