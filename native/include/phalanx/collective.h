// One collective of a rank, from its begin to its end.
//
// A rank begins a collective, finds a place for the data that its peers will read, and enters: it
// publishes the fingerprint of the collective and the place, and waits for the entries of the peers
// that it needs. It compares their fingerprints with its own before it reads their data. Larger
// data follow in phases, which are ordered by the group's steps.
//
// Usually every rank waits for all entries, itself or over a tree (tree.h), so that all report a
// mismatch in the collective where it happens; over a tree, some may do so in the one before. If
// the caller allows it (Bounds::runs_ahead), a rank that only gives data (the root of a broadcast,
// all others in a gather) waits for no entry, and may be ahead of its peers by kEntries - 1
// collectives; the others wait for those that give. The rest is compared later: each entry also has
// a hash of all fingerprints before it.
//
// Memory is reused by two rules. A rank that has entered collective k + 1 has finished k, so its
// peers may replace the entries of k. And a rank whose step is that of the end of k has finished k,
// so its peers may replace the data of k; before its own entry into k + 1, a rank must not wait for
// that of another.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

#include "phalanx/group.h"

namespace phalanx {

// The peers whose entries a rank needs.
enum class Peers : std::uint8_t { none, root, all };

class Collective {
 public:
  // Takes the lock of the group's collectives, and refuses a broken group. Failure to get the lock
  // within `bounds` breaks the group, as a missing peer would. `status()` must be ok to go on.
  Collective(Group& group, const Fingerprint& own, const Bounds& bounds);
  ~Collective();
  Collective(const Collective&) = delete;
  Collective& operator=(const Collective&) = delete;

  const Status& status() const { return status_; }
  Group& group() const { return group_; }
  const Bounds& bounds() const { return bounds_; }
  int self() const { return group_.rank_; }
  int ranks() const { return ranks_; }

  // Before the entry: finds a place for `bytes` of this rank's data, to be written to data(). The
  // place is in the entry itself or in one of the rank's rings.
  Status reserve(std::size_t bytes);
  // The same in a group of two ranks, in the buffer from which this rank has read in the previous
  // exchange: no other rank reads it, and its lines are in this core's cache.
  Status reserve_exchange(std::size_t bytes);
  std::byte* data() const { return data_; }
  // Before the entry: announces that the sources of this rank lie in its arena; where is a matter
  // of the operation (locations.h). payload(): a place in the entry, which data do not take then.
  void mark_located() { place_ |= kLocated; }
  bool is_located() const { return (place_ & kLocated) != 0; }
  std::byte* payload() const { return entry(self(), group_.entries_ + 1).payload; }
  // Before the entry of a merged collective: its parts, which must agree on all ranks too. A rank's
  // data begin with a copy of them.
  void set_parts(std::span<const PackedFingerprint> parts) { parts_ = parts; }

  // Enters the collective. `peers`: those that this rank must wait for. `staged`: whether this
  // rank's first data are in place, or it has none.
  Status enter(Peers peers, bool staged = true);
  // Enters a collective in which all ranks wait for all others, over the tree if there is one.
  Status enter_together(bool staged = true);
  // The same in four phases, for data that move over the tree. Enters, and waits until all children
  // have passed up.
  Status enter_tree();
  // Announces that all ranks below have entered, and that this rank's data are complete.
  void pass_up() { group_.advance_to(base_ - 2); }
  // Waits until the parent has passed down.
  Status await_parent();
  // Announces that all ranks have entered. `staged`: see enter.
  void pass_down(bool staged = true);
  // The data of a peer whose entry this rank has waited for, and the rest of that entry.
  const std::byte* data(int peer) const;
  bool is_located(int peer) const { return (entry(peer, group_.entries_).data & kLocated) != 0; }
  const std::byte* payload(int peer) const { return entry(peer, group_.entries_).payload; }

  // The step of a rank whose first data are in place. The following phases count from here.
  std::uint64_t base() const { return base_; }
  // Waits for the entries of all peers, unless that was done at the entry.
  Status meet();
  // Announces that this rank has read all that it needs. All ranks call it with the same step, in
  // every collective with more than kSmallPiece bytes in a ring.
  void finish(std::uint64_t step) { group_.advance_to(step); }

  // In a group of two ranks: the buffer of this rank in the current exchange, and that of the peer,
  // which becomes this rank's own in the next one.
  std::byte* own_exchange_buffer() const { return exchange_buffer(self()); }
  std::byte* exchanged() const { return exchange_buffer(1 - self()); }
  void next_exchange() { ++group_.exchanges_; }

  // An address in the arena of `owner`, as this process sees it; null with a status if it cannot be
  // mapped.
  std::byte* map_peer(int owner, const ArenaLocation& location, Status& status) {
    return group_.map_peer(owner, location, status);
  }
  // Call it before a long copy, and before a wait after the entry: whoever sleeps until this rank
  // has entered is woken at once, not at the end.
  void block() {
    if (!std::exchange(is_long_, true) && base_ != 0) {  // has entered
      notify(event());
    }
    bounds_.block();
    group_.publish_record();
  }
  // Returns the status of a collective that failed: breaks the group.
  Status fail(const Failure& reason) { return group_.fail_collective(reason); }

 private:
  // The kinds of places, in the low bits of Entry::data; the rest is the offset in a ring.
  enum Place : std::uint64_t { kNone = 0, kPayload = 1, kSmall = 2, kLarge = 3, kExchange = 4 };
  static constexpr std::uint64_t kPlaceBits = 7;
  static constexpr std::uint64_t kLocated = 8;

  Event& event() const { return group_.segment_->control(self()).step_event; }
  Entry& entry(int rank, std::uint64_t number) const {
    return group_.segment_->control(rank).entries[number % kEntries];
  }
  std::byte* exchange_buffer(int rank) const {
    return group_.segment_->exchange_buffer(group_.exchanges_ + static_cast<std::uint64_t>(rank));
  }
  bool has_entered(int peer) const;
  Status acquire_lock();
  Status reserve_piece(std::size_t bytes);
  Status prepare_large_ring();
  // Waits until all peers have made the entry with this number, and compares.
  Status ensure_entered(std::uint64_t number);
  // Waits until all peers have finished the collective with this entry, which left `piece`.
  Status ensure_finished(std::uint64_t number, const Group::Piece& piece);
  // The steps of a rank before its base. Without a tree: a rank has entered, and its data follow.
  // With a tree: it has entered, all ranks below have, all ranks have.
  static constexpr std::uint64_t kStepsToEnter = 2;
  static constexpr std::uint64_t kStepsToMeet = 4;
  // Publishes the entry, at this step before the base.
  void publish(std::uint64_t steps, std::uint64_t before_base);
  Status wait_for_entry(int peer);
  // Waits for the entry of a neighbour in the tree, compares it, and waits for the neighbour's
  // step.
  Status meet_neighbour(int peer, std::uint64_t step);
  Status compare(int peer);
  Status compare_last(int peer);
  // Whether a peer's entry is this rank's of the same number; true if it is no longer there.
  bool agrees(int peer, std::uint64_t number, PackedFingerprint& theirs) const;
  // Finds the first part of a merged collective that differs; a mismatch if there is one.
  Status compare_parts(int peer);
  Status mismatch(int peer, const PackedFingerprint& mine, const PackedFingerprint& theirs);

  Group& group_;
  const Bounds& bounds_;
  const int ranks_;
  Status status_;
  Fingerprint own_;
  PackedFingerprint packed_;
  std::span<const PackedFingerprint> parts_;
  std::uint64_t place_ = kNone;
  std::byte* data_ = nullptr;
  std::uint64_t base_ = 0;
  bool locked_ = false;
  bool is_long_ = false;
  bool met_ = false;
};

}  // namespace phalanx
