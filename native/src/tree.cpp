#include "phalanx/tree.h"

#include <algorithm>
#include <functional>

namespace phalanx {

bool Tree::is_valid(std::span<const int> parents, std::span<const int> caches) {
  for (std::size_t rank = 0; rank < parents.size(); ++rank) {
    if (parents[rank] >= static_cast<int>(rank) || parents[rank] < (rank == 0 ? -1 : 0)) {
      return false;
    }
  }
  const auto ends = std::ranges::adjacent_find(caches, std::ranges::greater_equal{});
  return caches.empty() || (caches.front() == 0 && ends == caches.end() &&
                            caches.back() < static_cast<int>(parents.size()));
}

Tree::Tree(std::span<const int> parents, int rank, std::span<const int> caches)
    : rank_(rank),
      parent_(parents[static_cast<std::size_t>(rank)]),
      caches_(caches.begin(), caches.end()),
      sizes_(parents.size(), 1),
      positions_(parents.size(), 0) {
  const auto parent_of = [&](std::size_t each) { return static_cast<std::size_t>(parents[each]); };
  for (std::size_t each = parents.size() - 1; each > 0; --each) {
    sizes_[parent_of(each)] += sizes_[each];
  }
  std::vector<std::size_t> ends(parents.size(), 1);
  for (std::size_t each = 1; each < parents.size(); ++each) {
    const std::size_t parent = parent_of(each);
    positions_[each] = positions_[parent] + ends[parent];
    ends[parent] += sizes_[each];
    if (parents[each] == rank_) {
      children_.push_back(static_cast<int>(each));
    }
  }
}

}  // namespace phalanx
