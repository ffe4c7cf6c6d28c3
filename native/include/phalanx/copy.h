// Copies of bytes, through the caches or past them.
#pragma once

#include <cstddef>
#include <cstring>

#include "phalanx/hooks.h"

namespace phalanx {

// Results of this size or more are assumed not to stay in the caches of a core.
inline constexpr std::size_t kStreamedBytes = 1024 * 1024;

// A memcpy that accepts the null pointers of empty tensors, and a copy onto itself.
inline void copy_bytes(void* to, const void* from, std::size_t bytes) {
  if (bytes != 0 && to != from) {
    PHALANX_STEP("copy");
    std::memcpy(to, from, bytes);
  }
}

// Fetches a line of which this core will write a part, so that the store need not wait for it.
inline void prefetch_to_write(const void* line) {
#if defined(__x86_64__)
  // By hand: compilers emit it only if all processors have it, and those without it ignore it.
  asm volatile("prefetchw %0" : : "m"(*static_cast<const char*>(line)));
#else
  __builtin_prefetch(line, 1);
#endif
}

// Copies past the caches of this core. An ordinary store first reads each missing line of `to` into
// the cache and leaves it there; this copy does neither. For destinations much larger than a cache
// that have not been used recently.
void stream_bytes(void* to, const void* from, std::size_t bytes);

// Copies a part of a result of `whole` bytes to the user's buffer.
inline void deliver(void* to, const void* from, std::size_t bytes, std::size_t whole) {
  if (whole < kStreamedBytes) {
    copy_bytes(to, from, bytes);
  } else if (to != from) {
    stream_bytes(to, from, bytes);
  }
}

}  // namespace phalanx
