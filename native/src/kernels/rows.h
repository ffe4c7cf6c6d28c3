// Rows of a table (rows.h): copying one while other processes may write to it, and combining them.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "elements.h"
#include "kernels.h"

namespace phalanx::kernels {
namespace {

#if defined(__x86_64__)

using RowPack = Vector<uint8_t>;

// One instruction, which the compiler does not treat as a memory access.
inline RowPack load_pack(const uint8_t* from) {
  RowPack pack;
#if defined(__AVX512F__)
  asm volatile("vmovdqu64 %1, %0" : "=v"(pack) : "m"(*(const uint8_t(*)[sizeof pack])from));
#elif defined(__AVX2__)
  asm volatile("vmovdqu %1, %0" : "=x"(pack) : "m"(*(const uint8_t(*)[sizeof pack])from));
#else
  asm volatile("movdqu %1, %0" : "=x"(pack) : "m"(*(const uint8_t(*)[sizeof pack])from));
#endif
  return pack;
}

// Copies a row, of whole elements of 4 or 8 bytes, that other processes may be writing to. The
// language has no such loads. So the compiler must neither know about them (that they race, or what
// they read) nor move other accesses across them. The processor executes loads in order, and others
// see a writer's stores in order: a reader that gets a byte of a write sees in a later load of the
// lock that the row was acquired for it. A word may even be torn.
void load_row(void* to, const void* from, size_t bytes) {
  const auto* in = static_cast<const uint8_t*>(from);
  auto* out = static_cast<uint8_t*>(to);
  asm volatile("" ::: "memory");
  if (bytes >= sizeof(RowPack)) {
    for (size_t at = 0; at + sizeof(RowPack) < bytes; at += sizeof(RowPack)) {
      const RowPack pack = load_pack(in + at);
      __builtin_memcpy(out + at, &pack, sizeof pack);
    }
    const RowPack last = load_pack(in + bytes - sizeof(RowPack));
    __builtin_memcpy(out + bytes - sizeof last, &last, sizeof last);
  } else {
    for (size_t at = 0; at + sizeof(uint32_t) <= bytes; at += sizeof(uint32_t)) {
      uint32_t word;
      asm volatile("movl %1, %0" : "=r"(word) : "m"(*(const uint8_t(*)[sizeof word])(in + at)));
      __builtin_memcpy(out + at, &word, sizeof word);
    }
  }
  asm volatile("" ::: "memory");
}

#endif

// Combines one element, or one vector, of all rows with the previous value.
template <class T, class Pack>
inline Pack combine(Pack sum, const T* from, size_t count, size_t width, RowCombine use,
                    const T* weights, bool first) {
  for (size_t row = 0; row < count; ++row, from += width) {
    Pack next;
    __builtin_memcpy(&next, from, sizeof next);
    if (use == RowCombine::max) {
      sum = (first && row == 0) ? next : (next > sum ? next : sum);
    } else if (weights != nullptr) {
      sum += next * weights[row];
    } else {
      sum += next;
    }
  }
  return sum;
}

// out = out + row 0 + row 1 ..., or with a weight for each, or the maximum; `first`: `out` has no
// value yet.
template <class T>
void combine_rows(void* out, const void* rows, size_t count, size_t width, RowCombine use,
                  const void* weights, bool first) {
  using Pack = Vector<T>;
  constexpr size_t lanes = sizeof(Pack) / sizeof(T);
  auto* to = static_cast<T*>(out);
  const auto* from = static_cast<const T*>(rows);
  const auto* factors = static_cast<const T*>(weights);
  size_t i = 0;
  for (; i + lanes <= width; i += lanes) {
    Pack sum{};
    if (!first) __builtin_memcpy(&sum, to + i, sizeof sum);
    sum = combine(sum, from + i, count, width, use, factors, first);
    __builtin_memcpy(to + i, &sum, sizeof sum);
  }
  for (; i < width; ++i) {
    to[i] = combine(first ? T{} : to[i], from + i, count, width, use, factors, first);
  }
}

}  // namespace
}  // namespace phalanx::kernels
