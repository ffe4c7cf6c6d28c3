// The chain of caches over which large data are reduced, in the order of ranks: the ranks of a
// cache combine what those of the cache before it have combined with their own data. So each line
// of the result crosses each boundary once, and the bits are those of one combination of all ranks.
// A flat group is a chain of one cache.
//
// A chunk has as many slices as the largest cache has ranks. In each cache one rank owns a slice,
// and a rank owns consecutive slices.
#pragma once

#include <algorithm>
#include <array>
#include <span>

namespace phalanx {

class CacheChain {
 public:
  struct Slices {
    int begin;
    int end;
  };

  // All ranks as one cache.
  explicit CacheChain(int ranks) : CacheChain(kOneCache, ranks) {}
  // `first_ranks`: of each cache, ascending from 0; they must outlive this object.
  CacheChain(std::span<const int> first_ranks, int ranks)
      : first_ranks_(first_ranks), ranks_(ranks) {
    for (int cache = 0; cache < length(); ++cache) {
      slices_ = std::max(slices_, end(cache) - begin(cache));
    }
  }

  int length() const { return static_cast<int>(first_ranks_.size()); }
  int slices() const { return slices_; }
  // The ranks of a cache: [begin, end).
  int begin(int cache) const { return first_ranks_[static_cast<std::size_t>(cache)]; }
  int end(int cache) const { return cache + 1 < length() ? begin(cache + 1) : ranks_; }
  int cache_of(int rank) const {
    const auto above = std::ranges::upper_bound(first_ranks_, rank);
    return static_cast<int>(above - first_ranks_.begin()) - 1;
  }
  // The rank that owns a slice in a cache.
  int owner(int cache, int slice) const {
    return begin(cache) + slice * (end(cache) - begin(cache)) / slices_;
  }
  // The slices that a rank owns in its cache.
  Slices slices_of(int rank) const {
    const int cache = cache_of(rank);
    const int members = end(cache) - begin(cache);
    const auto first = [&](int member) { return (member * slices_ + members - 1) / members; };
    return {first(rank - begin(cache)), first(rank - begin(cache) + 1)};
  }

 private:
  static constexpr std::array kOneCache = {0};

  std::span<const int> first_ranks_;
  int ranks_;
  int slices_ = 0;
};

}  // namespace phalanx
