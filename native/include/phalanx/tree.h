// The tree over which the ranks of a large group meet. Neighbours in it are close in the machine:
// few cache lines cross the boundaries of caches, NUMA nodes and sockets then (docs/design/
// many_ranks.md).
//
// The data of a rank and all below it form a block: the rank's own come first, and the blocks of
// its children follow.
//
// A rank ends an operation when its parent has passed it down, while others may be in the next one.
// If the group breaks in that, the rank fails the earlier one too.
//
// If the ranks of each cache have consecutive numbers, the caches form a chain in the order of
// ranks, over which large data are reduced.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace phalanx {

class Tree {
 public:
  // No tree: all ranks look at all others.
  Tree() = default;
  // The tree as `rank` sees it. `parents`: of each rank, a lower one; of rank 0: -1. `caches`: the
  // first rank of each cache in the chain; empty: there is no chain.
  Tree(std::span<const int> parents, int rank, std::span<const int> caches = {});

  // Whether each has a parent that is a lower rank, but rank 0, which has none; and whether the
  // caches, if there are any, begin with rank 0 and ascend.
  static bool is_valid(std::span<const int> parents, std::span<const int> caches = {});

  bool empty() const { return sizes_.empty(); }
  bool is_root() const { return rank_ == 0; }
  int parent() const { return parent_; }
  std::span<const int> children() const { return children_; }
  std::span<const int> caches() const { return caches_; }
  // The number of ranks in this rank's block, and in that of another.
  std::size_t size() const { return size(rank_); }
  std::size_t size(int rank) const { return sizes_[static_cast<std::size_t>(rank)]; }
  // The place of a rank below in this rank's block, counted in ranks.
  std::size_t place(int rank) const { return position(rank) - position(rank_); }

 private:
  std::size_t position(int rank) const { return positions_[static_cast<std::size_t>(rank)]; }

  int rank_ = 0;
  int parent_ = -1;
  std::vector<int> children_;
  std::vector<int> caches_;
  std::vector<std::size_t> sizes_;      // of the blocks, by rank
  std::vector<std::size_t> positions_;  // in the root's block, by rank
};

}  // namespace phalanx
