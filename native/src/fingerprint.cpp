#include "phalanx/fingerprint.h"

#include <array>
#include <bit>

namespace phalanx {

using Words = std::array<std::uint64_t, 3>;

void SharedFingerprint::store(const Fingerprint& value) {
  const auto words = std::bit_cast<Words>(value);
  for (std::size_t i = 0; i < words.size(); ++i) {
    words_[i].store(words[i], std::memory_order_relaxed);
  }
}

Fingerprint SharedFingerprint::load() const {
  Words words{};
  for (std::size_t i = 0; i < words.size(); ++i) {
    words[i] = words_[i].load(std::memory_order_relaxed);
  }
  return std::bit_cast<Fingerprint>(words);
}

}  // namespace phalanx
