#include "phalanx/copy.h"

#include <cstdint>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace phalanx {

#if defined(__x86_64__)

void stream_bytes(void* to, const void* from, std::size_t bytes) {
  constexpr std::size_t line = 64;
  if (bytes < 4 * line) {
    copy_bytes(to, from, bytes);
    return;
  }
  PHALANX_STEP("copy: stream");
  auto* out = static_cast<char*>(to);
  const auto* in = static_cast<const char*>(from);
  const std::size_t head = (line - reinterpret_cast<std::uintptr_t>(out) % line) % line;
  std::memcpy(out, in, head);
  out += head;
  in += head;
  const std::size_t lines = (bytes - head) / line;
  for (std::size_t i = 0; i < lines; ++i, in += line, out += line) {
    const auto* source = reinterpret_cast<const __m128i*>(in);
    auto* target = reinterpret_cast<__m128i*>(out);
    const __m128i a = _mm_loadu_si128(source);
    const __m128i b = _mm_loadu_si128(source + 1);
    const __m128i c = _mm_loadu_si128(source + 2);
    const __m128i d = _mm_loadu_si128(source + 3);
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
  }
  // Streaming stores are not ordered with anything, and the following steps publish the data.
  _mm_sfence();
  std::memcpy(out, in, bytes - head - lines * line);
}

#else

void stream_bytes(void* to, const void* from, std::size_t bytes) { copy_bytes(to, from, bytes); }

#endif

}  // namespace phalanx
