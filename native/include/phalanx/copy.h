// Copies of bytes, for what comes again soon and for what doesn't.
#pragma once

#include <cstddef>
#include <cstring>

#include "phalanx/hooks.h"

namespace phalanx {

// From this size on, a result of an operation is taken to be more than the caches keep.
inline constexpr std::size_t kStreamedBytes = 4 * 1024 * 1024;

// memcpy that takes the null pointers of empty tensors, and a copy onto itself.
inline void copy_bytes(void* to, const void* from, std::size_t bytes) {
  if (bytes != 0 && to != from) {
    PHALANX_STEP("copy");
    std::memcpy(to, from, bytes);
  }
}

// The same past the caches of this core: `to` is neither read into them, as an ordinary store does
// with each line that it doesn't have, nor left there. For destinations that nobody has touched
// lately, much larger than a cache.
void stream_bytes(void* to, const void* from, std::size_t bytes);

// Copies a part of a result of `whole` bytes to where the user wants it.
inline void deliver(void* to, const void* from, std::size_t bytes, std::size_t whole) {
  if (whole < kStreamedBytes) {
    copy_bytes(to, from, bytes);
  } else if (to != from) {
    stream_bytes(to, from, bytes);
  }
}

}  // namespace phalanx
