// Coalesced gradients of rows, against sums in a map.
#include <map>
#include <vector>

#include "check.h"
#include "phalanx/row_gradients.h"
#include "ranks.h"

using namespace phalanx;
using ranks::Random;

namespace {

template <class T>
struct Case {
  std::vector<std::int64_t> rows;
  std::vector<std::int64_t> offsets;
  std::vector<T> weights;
  std::vector<T> outputs;
  Pooling pooling = Pooling::sum;

  BagGradients batch() const {
    return {
        .list = {.rows = rows.data(), .count = rows.size()},
        .bags = {.offsets = offsets.empty() ? nullptr : offsets.data(), .count = offsets.size()},
        .pooling = pooling,
        .weights = weights.empty() ? nullptr : weights.data(),
        .outputs = outputs.data()};
  }
};

// Small integers: their sums are exact in any order; lengths of bags are powers of two.
template <class T>
T some(Random& random) {
  return static_cast<T>(random.below(17)) - T{8};
}

template <class T>
Case<T> any(Random& random, std::size_t width) {
  Case<T> made;
  const bool unpooled = random.one_in(3);
  made.pooling = random.one_in(2) ? Pooling::mean : Pooling::sum;
  const std::size_t bags = random.below(6);
  for (std::size_t bag = 0; bag < bags; ++bag) {
    const bool empty = !unpooled && random.one_in(5);
    const std::size_t length = unpooled ? 1 : std::size_t{1} << random.below(4);
    if (!unpooled) {
      made.offsets.push_back(static_cast<std::int64_t>(made.rows.size()));
    }
    for (std::size_t i = 0; i < (empty ? 0 : length); ++i) {
      made.rows.push_back(static_cast<std::int64_t>(random.below(12)));
    }
    for (std::size_t k = 0; k < width; ++k) {
      made.outputs.push_back(some<T>(random));
    }
  }
  if (made.pooling == Pooling::sum && random.one_in(2)) {
    for (std::size_t i = 0; i < made.rows.size(); ++i) {
      made.weights.push_back(some<T>(random));
    }
  }
  return made;
}

template <class T>
void add_to(std::map<std::int64_t, std::vector<T>>& sums, const Case<T>& one, std::size_t width) {
  const bool unpooled = one.offsets.empty();
  const std::size_t bags = unpooled ? one.rows.size() : one.offsets.size();
  for (std::size_t bag = 0; bag < bags; ++bag) {
    const std::size_t begin = unpooled ? bag : static_cast<std::size_t>(one.offsets[bag]);
    const std::size_t end = unpooled         ? bag + 1
                            : bag + 1 < bags ? static_cast<std::size_t>(one.offsets[bag + 1])
                                             : one.rows.size();
    for (std::size_t i = begin; i < end; ++i) {
      auto& sum = sums.try_emplace(one.rows[i], width, T{0}).first->second;
      for (std::size_t k = 0; k < width; ++k) {
        const T output = one.outputs[bag * width + k];
        sum[k] += one.pooling == Pooling::mean ? output / static_cast<T>(end - begin)
                  : one.weights.empty()        ? output
                                               : output * one.weights[i];
      }
    }
  }
}

template <class T>
void like_a_map(DType dtype, std::uint64_t seed) {
  Random random(seed);
  for (int round = 0; round < ranks::scaled(400); ++round) {
    const std::size_t width = 1 + random.below(9);
    std::vector<Case<T>> cases(random.below(4));
    std::vector<BagGradients> batches;
    std::map<std::int64_t, std::vector<T>> expected;
    std::size_t most = 0;
    for (auto& one : cases) {
      one = any<T>(random, width);
      batches.push_back(one.batch());
      add_to(expected, one, width);
      most += one.rows.size();
    }
    const auto shards = static_cast<std::int64_t>(1 + random.below(3));
    const double divisor = random.one_in(2) ? 1 : 4;
    std::size_t found = 0;
    for (std::int64_t remainder = 0; remainder < shards; ++remainder) {
      std::vector<std::int64_t> rows(most, -1);
      std::vector<T> sums(most * width, T{99});
      const std::size_t count = coalesce_gradients(batches, width, dtype, divisor,
                                                   {.remainder = remainder, .count = shards},
                                                   {.rows = rows.data(), .gradients = sums.data()});
      for (std::size_t i = 0; i < count; ++i) {
        CHECK(rows[i] % shards == remainder);
        CHECK(i == 0 || rows[i - 1] < rows[i]);
        const auto& sum = expected.at(rows[i]);
        for (std::size_t k = 0; k < width; ++k) {
          CHECK(sums[i * width + k] == sum[k] / static_cast<T>(divisor));
        }
      }
      CHECK(count == most || rows[count] == -1);
      found += count;
    }
    CHECK(found == expected.size());
  }
}

}  // namespace

TEST(gradients_are_summed_as_in_a_map) {
  like_a_map<float>(DType::float32, 1);
  like_a_map<double>(DType::float64, 2);
}
