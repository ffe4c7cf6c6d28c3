#include "phalanx/merged.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "sources.h"

namespace phalanx {
namespace {

bool comes_from_root(Kind kind) { return kind == Kind::broadcast || kind == Kind::scatter; }
bool goes_to_root(Kind kind) { return kind == Kind::gather || kind == Kind::reduce; }
// Whether a rank has different data for each of its peers.
bool has_part_per_rank(Kind kind) {
  return kind == Kind::scatter || kind == Kind::reduce_scatter || kind == Kind::all_to_all;
}

bool gives(const Fingerprint& own, int rank) {
  if (comes_from_root(own.kind)) {
    return rank == own.root;
  }
  return own.kind != Kind::barrier && (!goes_to_root(own.kind) || rank != own.root);
}
bool takes(const Fingerprint& own, int rank) {
  if (goes_to_root(own.kind)) {
    return rank == own.root;
  }
  return own.kind != Kind::barrier && (own.kind != Kind::broadcast || rank != own.root);
}

bool overlap(const std::byte* a, std::size_t a_bytes, const std::byte* b, std::size_t b_bytes) {
  return a < b + b_bytes && b < a + a_bytes;
}

// Whether a part uses memory that another part uses. Also if both only read: after a broadcast, an
// all-gather of the same data depends on it on all ranks but the root, and all must merge the same.
bool share_memory(const MergedPart& one, const MergedPart& other) {
  const auto is_used = [&](const std::byte* used) {
    const auto is_hit = [&](const std::byte* each) {
      return overlap(used, one.bytes(), each, other.bytes());
    };
    return std::ranges::any_of(other.inputs, is_hit) || std::ranges::any_of(other.outputs, is_hit);
  };
  return std::ranges::any_of(one.inputs, is_used) || std::ranges::any_of(one.outputs, is_used);
}

}  // namespace

bool MergedCollectives::add(MergedPart part) {
  // On every rank, whether it gives this or not: all must merge the same parts.
  const std::size_t copies =
      has_part_per_rank(part.own.kind) ? static_cast<std::size_t>(ranks_) : 1;
  const std::size_t end = offsets_.back() + (part.bytes() * copies + 15) / 16 * 16;
  if (parts_.size() == kParts || (parts_.size() + 1) * 16 + end > kBytes || !is_independent(part)) {
    return false;
  }
  offsets_.push_back(end);
  fingerprints_.emplace_back(part.own);
  parts_.push_back(std::move(part));
  return true;
}

bool MergedCollectives::is_independent(const MergedPart& part) const {
  return std::ranges::none_of(parts_,
                              [&](const MergedPart& other) { return share_memory(part, other); });
}

const std::byte* MergedCollectives::input(std::size_t index, int rank) const {
  const auto& inputs = parts_[index].inputs;
  return inputs[inputs.size() == 1 ? 0 : static_cast<std::size_t>(rank)];
}

std::byte* MergedCollectives::output(std::size_t index, int rank) const {
  const auto& outputs = parts_[index].outputs;
  return outputs[outputs.size() == 1 ? 0 : static_cast<std::size_t>(rank)];
}

void MergedCollectives::stage(std::byte* to, int self) const {
  std::memcpy(to, fingerprints_.data(), fingerprints_.size() * 16);
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    if (gives(parts_[i].own, self)) {
      std::byte* place_now = to + place(i);
      for (const std::byte* each : parts_[i].inputs) {
        copy_bytes(place_now, each, parts_[i].bytes());
        place_now += parts_[i].bytes();
      }
    }
  }
}

void MergedCollectives::take(const Collective& collective, std::size_t index) const {
  const Fingerprint& own = parts_[index].own;
  const std::size_t bytes = parts_[index].bytes();
  const int self = collective.self();
  const std::size_t mine = has_part_per_rank(own.kind) ? static_cast<std::size_t>(self) * bytes : 0;
  const auto source = [&](int rank) {
    return rank == self ? input(index, self) : collective.data(rank) + place(index) + mine;
  };
  if (own.op != ReduceOp::none) {
    Sources(collective, own.dtype, own.op).combine(output(index, self), bytes, source);
    return;
  }
  for (int rank = 0; rank < ranks_; ++rank) {
    if (gives(own, rank) || (goes_to_root(own.kind) && rank == self)) {
      copy_bytes(output(index, rank), source(rank), bytes);
    }
  }
}

Status MergedCollectives::run(Group& group, const Bounds& bounds) const {
  Collective collective(group, {.count = parts_.size(), .kind = Kind::plan}, bounds);
  Status status = collective.status();
  if (status.ok()) {
    status = collective.reserve(bytes());
  }
  if (!status.ok()) {
    return status;
  }
  stage(collective.data(), collective.self());
  collective.set_parts(fingerprints_);
  status = collective.enter_together();
  if (!status.ok()) {
    return status;
  }
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    if (takes(parts_[i].own, collective.self())) {
      take(collective, i);
    }
  }
  if (bytes() > kSmallPiece) {
    collective.finish(collective.base() + 1);
  }
  return status;
}

}  // namespace phalanx
