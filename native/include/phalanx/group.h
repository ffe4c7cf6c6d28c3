// One rank's view of its group on this host: the segment, its peers' processes, and the meeting
// that begins every collective.
//
// The invariant that all collectives build on: a rank that has met its peers for operation k knows
// that all of them have finished operation k - 1. So staging areas are free after a meeting, and
// inline buffers, of which each rank has two, may be filled before it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "phalanx/arena.h"
#include "phalanx/flight_recorder.h"
#include "phalanx/process.h"
#include "phalanx/segment.h"
#include "phalanx/status.h"
#include "phalanx/wait.h"

namespace phalanx {

class Group {
 public:
  class CollectiveLock;

  // `segment` is shared with nobody in this process. The rank is present from here on. `note`: what
  // the flight recorder has noted of the group already; 0: nothing yet.
  Group(std::unique_ptr<Segment> segment, int rank, std::uint16_t entry = 0);
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  // Opens a handle on every peer's process. All ranks must be present. Closes the creator's
  // descriptor, which nobody needs from then on. peer_lost when one has died already.
  Status connect();

  int rank() const { return rank_; }
  int ranks() const { return segment_->ranks(); }
  int pid(int rank) const { return segment_->control(rank).pid.load(std::memory_order_relaxed); }
  Segment& segment() const { return *segment_; }
  // How many collectives this rank has begun, refused ones included; any thread may ask. One that
  // is composed of others counts once.
  std::uint64_t sequence() const { return sequence_.load(std::memory_order_relaxed); }

  // What flight recorders call the ranks of this host, by rank here, and the group itself, where it
  // has ranks on other hosts too. Before the first operation.
  void set_global_ranks(std::vector<std::int16_t> global_ranks, std::uint64_t identity);
  std::int16_t global_rank(int rank) const {
    return global_ranks_.empty() || rank < 0 ? static_cast<std::int16_t>(rank)
                                             : global_ranks_[static_cast<std::size_t>(rank)];
  }

  // Enters the next collective: publishes `own` (its sequence is filled in), waits for all peers to
  // enter theirs, and compares. Everything this rank wrote before is visible to peers after it.
  Status enter_collective(Fingerprint own, const Bounds& bounds);
  // Comes before the meeting for `own`, and before the own inline buffer is filled. Refuses a
  // broken group: a peer that was left behind may still read there. With `staging`, the own staging
  // area is backed by pages when this returns ok.
  Status prepare(const Fingerprint& own, const Bounds& bounds, bool staging);
  // From a meeting for `own` on the operations of this rank are parts of a collective that is
  // composed of them, and of what is done between hosts: they are no records of their own, and have
  // its number. Until `compose_end`; who composes sees to it that no other thread is in operations.
  Status begin_composite(const Fingerprint& own, const Bounds& bounds);
  void end_composite(Code outcome);
  // While it lasts: that it waits for a rank of another host, and that it did; by its name.
  void begin_composite_wait(std::int16_t global_rank);
  void end_composite_wait(std::int16_t global_rank, Clock::duration waited);
  // Own inline buffer for the next collective, to be filled before the meeting.
  std::byte* next_inline_buffer() const { return inline_buffer(rank_, entries_ + 1); }
  // A rank's inline buffer of the collective that has been met for.
  std::byte* current_inline_buffer(int rank) const { return inline_buffer(rank, entries_); }

  // What lies at a place in the arena of `owner`, as this process sees it. Maps the arena when it
  // is first named; null and a broken group when that fails. The caller holds the turn.
  std::byte* map_peer(int owner, const ArenaLocation& location, Status& status);

  // Steps are the beats inside an operation: ranks advance in the same order, and wait for a peer
  // to come at least as far as `target`.
  std::uint64_t step() const { return step_; }
  void advance();
  Status wait_step(int peer, std::uint64_t target, const Bounds& bounds);
  // The same for all peers.
  Status wait_steps(std::uint64_t target, const Bounds& bounds);

  // Ranks that have not come as far as `rank`: those that it may be waiting for.
  std::vector<int> ranks_behind(int rank) const;
  // Whether all others are in a collective to which this rank is still to come. Between its
  // operations, as the thread that is to do the next one.
  bool is_awaited() const;

  // Breaks the group on all its ranks: the first failure wins and is what all of them report.
  // Returns the status to report here.
  // Without `wake` who sleeps sees it when its slice ends: time to break other groups first.
  Status abort(Status why, bool wake = true);
  // What a collective returns in which something went wrong: breaks the group, and notes the
  // outcome.
  Status fail_collective(const Status& why) { return record_outcome(abort(why)); }
  // Ok, or why the group is broken.
  Status failure() const;
  // Announces that this process ends by an exception: for its peers it is lost from now on. A
  // process with several groups announces it in all of them before it wakes those who wait.
  void fail(bool wake);
  // Announces that this rank takes no further part, and wakes those who wait for it. A process that
  // ends without having left is lost to its peers, with the exit code for a reason.
  void leave();
  // Whether `peer` has said that it ends by an exception.
  bool is_failing(int peer) const {
    return segment_->control(peer).presence.load(std::memory_order_seq_cst) == Presence::failing;
  }
  // The descriptor of a rank's flight recorder; -1: none.
  int recorder_descriptor(int peer) const {
    return segment_->control(peer).recorder_descriptor.load(std::memory_order_relaxed);
  }
  // What the own flight recorder notes of this group; null if it doesn't.
  GroupEntry* entry() { return entry_; }
  // How the process of `peer` ended, if it has and the kernel tells.
  std::optional<int> wait_status(int peer) const {
    return processes_[static_cast<std::size_t>(peer)].wait_status();
  }
  // Ok while `peer` may still come: not left, not dead, the group not broken.
  Status peer_status(int peer) const;
  // The same for an operation in which `peer` is waited for. A rank that will never come to its
  // meeting ends it at once, however long the one waited for takes to say so.
  Status status_while_waiting(int peer);

 private:
  friend class Mailbox;

  // Whether `peer` is dead, or dying, without having left.
  bool is_lost(int peer) const;
  Record record_of(const Fingerprint& own, const Bounds& bounds) const;
  // The number of the collective that begins; of a part of a composed one, that one's.
  std::uint64_t begin_collective(Fingerprint own, const Bounds& bounds);
  // Whoever does a collective: what the flight recorder says of it.
  void begin_record(const Fingerprint& own, const Bounds& bounds);
  // Refuses a collective, since the group is broken. Noted the first time alone: who tries for ever
  // must not wash out of the flight recorder what came before.
  Status refuse(Fingerprint own, const Bounds& bounds, const Status& why);
  void begin_wait(int peer);
  void end_wait(int peer, Clock::duration waited);
  void begin_wait_for(std::int16_t global_rank);
  void end_wait_for(std::int16_t global_rank, Clock::duration waited);
  // Notes how the collective ends, which may be well in a group that another one breaks meanwhile.
  Status record_outcome(const Status& status) {
    record_.outcome = status.code;
    return status;
  }
  void end_record();
  void announce(Presence presence, bool wake);

  std::byte* inline_buffer(int rank, std::uint64_t entry) const {
    return segment_->inline_buffer(rank, entry);
  }

  std::unique_ptr<Segment> segment_;
  int rank_;
  Fingerprint current_;
  std::atomic<std::uint64_t> sequence_ = 0;  // writer: who holds the turn
  std::uint64_t entries_ = 0;  // that this rank has come to, parts of composed ones included
  bool composite_ = false;
  std::vector<std::int16_t> global_ranks_;
  std::uint64_t step_ = 0;
  std::uint64_t entry_step_ = 0;  // the step of the last meeting
  int next_checked_ = 0;          // whom trouble_while_awaiting looks at next
  bool staging_ready_ = false;
  bool left_ = false;
  std::mutex collective_mutex_;              // of collectives, which run one at a time
  std::atomic<int> collective_waiters_ = 0;  // writers: threads that wait for it
  std::condition_variable_any collective_released_;
  std::mutex aborting_;  // a thread that moves messages may fail beside one in a collective
  SpinPolicy spin_policy_;
  std::vector<Process> processes_;                        // by rank; the own one is not open
  std::vector<std::shared_ptr<const ArenaView>> arenas_;  // by rank, null until first reached

  FlightRecorder* recorder_ = FlightRecorder::own();
  std::uint16_t recorder_group_ = 0;
  GroupEntry* entry_ = nullptr;
  // Of the collective that is under way; guarded by the turn.
  Record record_;
  int slot_ = -1;  // in the flight recorder
  bool recording_ = false;
  bool refused_ = false;
  Clock::duration longest_wait_{};
  std::int16_t longest_wait_rank_ = -1;
};

// A collective's turn: held while it runs, so that those of one group run one at a time. Waits for
// it no longer than `bounds` allows; a turn that doesn't come breaks the group, as a peer would
// that doesn't.
class Group::CollectiveLock {
 public:
  CollectiveLock(Group& group, const Bounds& bounds);
  ~CollectiveLock();
  CollectiveLock(const CollectiveLock&) = delete;
  CollectiveLock& operator=(const CollectiveLock&) = delete;

  // Ok: it is held.
  const Status& status() const { return status_; }

 private:
  Status acquire(const Bounds& bounds);

  Group& group_;
  Status status_;
};

}  // namespace phalanx
