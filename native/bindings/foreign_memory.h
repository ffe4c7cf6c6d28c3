// Memory of torch's objects, whose layout is in a table by version (torch_layouts.py).
//
// The table is confirmed once per process, with objects whose fields have known values. Until then
// it may be wrong, as with a build of torch that nobody has tried, so what it points to is read in
// a way that a wrong address does not end the process.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core.h"

namespace phalanx::bindings {

using Word = std::uint64_t;

inline Word word_at(const void* memory, std::size_t position) {
  Word value;
  std::memcpy(&value, static_cast<const char*>(memory) + position, sizeof value);
  return value;
}

// Reads memory that may not exist: the kernel checks the address when it copies it into a pipe.
class CarefulReader {
 public:
  // Throws OSError if there are no descriptors left.
  CarefulReader();
  ~CarefulReader();
  CarefulReader(const CarefulReader&) = delete;
  CarefulReader& operator=(const CarefulReader&) = delete;

  // Whether there are `size` bytes (1 to 8) of that value, as a number, at an address.
  bool has(Word address, Word value, std::size_t size) const {
    Word found = 0;
    return read(address, &found, size) && found == value;
  }
  // Reads a pointer; null if there is no memory.
  Word pointer_at(Word address) const {
    Word found = 0;
    return read(address, &found, sizeof found) ? found : 0;
  }

 private:
  bool read(Word address, void* to, std::size_t size) const;

  std::array<int, 2> pipe_;
};

}  // namespace phalanx::bindings
