// Copies past the cache yield the bytes that memcpy yields, and touch no others.
#include <algorithm>
#include <vector>

#include "phalanx/copy.h"
#include "ranks.h"

using namespace phalanx;
using ranks::Random;

TEST(streaming_copies_what_it_is_given) {
  Random random(1);
  std::vector<unsigned char> source(3000), target(3000);
  for (auto& byte : source) byte = static_cast<unsigned char>(random.bits());
  for (int i = 0; i < ranks::scaled(20'000) + 100; ++i) {
    const std::size_t from = random.below(200), to = random.below(200);
    const std::size_t bytes = random.below(random.one_in(4) ? 2800 : 400);
    std::fill(target.begin(), target.end(), static_cast<unsigned char>(0xee));
    stream_bytes(target.data() + to, source.data() + from, bytes);
    const auto begin = target.begin() + static_cast<std::ptrdiff_t>(to);
    const auto end = begin + static_cast<std::ptrdiff_t>(bytes);
    CHECK(std::equal(begin, end, source.begin() + static_cast<std::ptrdiff_t>(from)));
    const auto untouched = [](unsigned char byte) { return byte == 0xee; };
    CHECK(std::all_of(target.begin(), begin, untouched));
    CHECK(std::all_of(end, target.end(), untouched));
  }
}

TEST(deliver_takes_empty_tensors_and_copies_onto_itself) {
  deliver(nullptr, nullptr, 0, 0);
  std::vector<char> data(kStreamedBytes, 'x');
  deliver(data.data(), data.data(), data.size(), data.size());
  CHECK(std::all_of(data.begin(), data.end(), [](char c) { return c == 'x'; }));
}
