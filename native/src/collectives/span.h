// Parts of buffers, in bytes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "phalanx/copy.h"
#include "phalanx/segment.h"

namespace phalanx {

struct Span {
  std::size_t begin;
  std::size_t size;
};

// Chunk number `chunk` of `total` bytes; empty beyond the end.
inline Span chunk_of(std::size_t total, std::size_t chunk_bytes, std::uint64_t chunk) {
  const std::size_t begin = std::min(chunk * chunk_bytes, total);
  return {begin, std::min(chunk_bytes, total - begin)};
}

// The number of chunks; an empty buffer has one, which is empty.
inline std::uint64_t chunks_of(std::size_t total, std::size_t chunk_bytes) {
  return total == 0 ? 1 : (total + chunk_bytes - 1) / chunk_bytes;
}

inline const std::byte* at(const void* data, std::size_t offset) {
  return static_cast<const std::byte*>(data) + offset;
}

inline std::byte* at(void* data, std::size_t offset) {
  return static_cast<std::byte*>(data) + offset;
}

// Copies of this size or more let other threads of the process run.
inline constexpr std::size_t kLongCopy = 64 * 1024;

}  // namespace phalanx
