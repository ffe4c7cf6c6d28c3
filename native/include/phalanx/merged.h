// Several collectives on small data, with one meeting for all of them.
#pragma once

#include <cstddef>
#include <vector>

#include "phalanx/fingerprint.h"
#include "phalanx/group.h"

namespace phalanx {

// A collective as a part of a merged one.
struct MergedPart {
  Fingerprint own;  // without a sequence
  // Buffers of `own.count` elements. One input, or one for each rank if these get different data;
  // one output, or one for each rank if different data come from these; none where the rank neither
  // gives nor takes.
  std::vector<const std::byte*> inputs;
  std::vector<std::byte*> outputs;

  std::size_t bytes() const { return own.count * size_of(own.dtype); }
};

class MergedCollectives {
 public:
  explicit MergedCollectives(int ranks) : ranks_(ranks) {}

  // Adds a part, unless it uses memory that another part uses, or is too large to be merged.
  bool add(MergedPart part);
  std::size_t size() const { return parts_.size(); }

  // Runs all parts. All ranks have the same list of fingerprints: that is checked, and a mismatch
  // names the first parts that differ. Blocks until all ranks have entered. Conditions and results
  // are those of the functions in collectives.h.
  Status run(Group& group, const Bounds& bounds) const;

 private:
  // The most parts, and the most bytes that a rank gives in all of them.
  static constexpr std::size_t kParts = 128;
  static constexpr std::size_t kBytes = kSmallBytes;

  bool is_independent(const MergedPart& part) const;
  // The fingerprints come first in a rank's data. Each part then has the same place in all ranks.
  std::size_t place(std::size_t index) const { return fingerprints_.size() * 16 + offsets_[index]; }
  std::size_t bytes() const { return place(parts_.size()); }
  const std::byte* input(std::size_t index, int rank) const;
  std::byte* output(std::size_t index, int rank) const;
  void stage(std::byte* to, int self) const;
  void take(const class Collective& collective, std::size_t index) const;

  int ranks_;
  std::vector<MergedPart> parts_;
  std::vector<PackedFingerprint> fingerprints_;
  std::vector<std::size_t> offsets_ = {0};  // of the parts, and the end of the last
};

}  // namespace phalanx
