// One rank's view of its group on this host: the segment, its peers' processes, failures, and the
// waits for its peers. Collectives (collective.h) and messages (mailbox.h) are built on it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "phalanx/arena.h"
#include "phalanx/flight_recorder.h"
#include "phalanx/process.h"
#include "phalanx/record_clock.h"
#include "phalanx/segment.h"
#include "phalanx/status.h"
#include "phalanx/tree.h"
#include "phalanx/wait.h"

namespace phalanx {

class Group {
 public:
  // `segment` is not shared within this process. The rank is present from now on. `entry`: the
  // group's entry in the flight recorder, if it exists already; 0: none.
  Group(std::unique_ptr<Segment> segment, int rank, std::uint16_t entry = 0);
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  // Opens a handle on every peer's process. All ranks must be present. Closes the creator's
  // descriptor, which is no longer needed. peer_lost, and a broken group, if a peer has died
  // already.
  Status connect();

  int rank() const { return rank_; }
  int ranks() const { return segment_->ranks(); }
  int pid(int rank) const { return segment_->control(rank).pid.load(std::memory_order_relaxed); }
  Segment& segment() const { return *segment_; }
  // The number of collectives that this rank has begun, including refused ones; callable from any
  // thread. A composite one counts once.
  std::uint64_t sequence() const { return sequence_.load(std::memory_order_relaxed); }

  // Sets the ranks and the identity that flight recorders show if the group also has ranks on other
  // hosts. Call it before the first operation.
  void set_global_ranks(std::vector<std::int16_t> global_ranks, std::uint64_t identity);
  std::int16_t global_rank(int rank) const {
    return global_ranks_.empty() || rank < 0 ? static_cast<std::int16_t>(rank)
                                             : global_ranks_[static_cast<std::size_t>(rank)];
  }

  // Sets the tree over which the ranks meet: the same on all ranks, before the first operation.
  void set_tree(Tree tree) { tree_ = std::move(tree); }
  const Tree& tree() const { return tree_; }

  // Enters the composite collective `own`. Until `end_composite`, the operations of this rank are
  // parts of it, as are transfers between hosts: they have no records of their own, and share its
  // number. The caller ensures that no other thread runs operations.
  Status begin_composite(const Fingerprint& own, const Bounds& bounds);
  void end_composite(Code outcome);
  // Within a composite collective: record the begin and the end of a wait for a rank of another
  // host, by its global rank.
  void begin_composite_wait(std::int16_t global_rank);
  void end_composite_wait(std::int16_t global_rank, Clock::duration waited);
  // For readers of the flight recorder: how much of the composite operation is done, in percent.
  void set_composite_progress(std::uint8_t percent);

  // Steps order the phases of collectives: all ranks advance in the same order, and wait until a
  // peer has advanced at least to `target`.
  std::uint64_t step() const { return step_; }
  void advance() { advance_to(step_ + 1); }
  void advance_to(std::uint64_t step);
  Status wait_step(int peer, std::uint64_t target, const Bounds& bounds);
  // The same for all peers.
  Status wait_steps(std::uint64_t target, const Bounds& bounds);

  // Whether a peer began its last longer wait on the processor on which this thread begins one now.
  bool shares_core(int peer) const;
  // The ranks that `rank` may be waiting for: those that have not entered its collective, or if
  // there are none, those whose step is below that of `rank`.
  std::vector<int> ranks_behind(int rank) const;
  // Whether all other ranks have entered a collective that this rank has not. Call it between
  // operations, in the thread that runs the next one.
  bool is_awaited() const;

  // Breaks the group on all its ranks. The first failure wins, and all ranks report it. Returns the
  // status to report here. Without `wake`, sleepers notice when their slice ends, which leaves time
  // to break other groups first.
  Status abort(Failure reason, bool wake = true);
  // Returns the status of a collective that failed: breaks the group, and records the outcome.
  // Peers that report the failure look for the call site in this rank's flight recorder.
  Status fail_collective(const Failure& reason) {
    publish_record();
    return record_outcome(abort(reason));
  }
  // Ok, or the reason why the group is broken.
  Status failure() const {
    PHALANX_STEP("failure: check the abort word");
    // Pairs with the compare-and-swap in abort.
    const std::uint64_t word = segment_->header().abort_word.load(std::memory_order_seq_cst);
    return word == 0 ? Status{} : unpack(word);
  }
  // The same with the fingerprints.
  Failure failure_report() const;
  // Announces that an exception ends this process: for its peers it is lost from now on. A process
  // with several groups announces it in all of them before it wakes the waiters.
  void fail(bool wake);
  // Announces that this rank takes no further part, and wakes the ranks that wait for it. A process
  // that ends without leaving is lost to its peers, with its exit code as the reason.
  void leave();
  // Announces that this rank posts no more operations. Those that it has posted go on.
  void begin_leaving();
  // Whether `peer` has announced that, and has not left yet.
  bool is_leaving(int peer) const {
    return segment_->control(peer).presence.load(std::memory_order_seq_cst) == Presence::leaving;
  }
  // Whether `peer` has announced that an exception ends it.
  bool is_failing(int peer) const {
    return segment_->control(peer).presence.load(std::memory_order_seq_cst) == Presence::failing;
  }
  // The descriptor of a rank's flight recorder; -1: none.
  int recorder_descriptor(int peer) const {
    return segment_->control(peer).recorder_descriptor.load(std::memory_order_relaxed);
  }
  // This group's entry in this process's flight recorder; null if there is none.
  GroupEntry* entry() { return entry_; }
  // The wait status of `peer`'s process, if it has ended and the kernel reports it.
  std::optional<int> wait_status(int peer) const {
    return processes_[static_cast<std::size_t>(peer)].wait_status();
  }
  // Whether `peer` has left, or is dead or dying, also if the group is broken.
  bool has_gone(int peer) const;
  // Ok while `peer` may still come: it has not gone, is not leaving, and the group is not broken.
  Status peer_status(int peer) const;

 private:
  friend class Collective;
  friend class Mailbox;

  static Status unpack(std::uint64_t abort_word);
  // Whether `peer` is dead or dying, without having left.
  bool is_lost(int peer) const;
  void announce(Presence presence, bool wake);
  // The status for a collective that waits for `peer`. A rank that will never enter the collective
  // ends it at once, even if `peer` is late to report that.
  Status status_while_waiting(int peer);
  // The rank that a wait for `peer` is really for: a peer that has entered the collective may
  // itself be waiting for one that has not.
  int awaited_rank(int peer) const;
  // Waits until `ready()`, which `peer` makes true and announces on its step event.
  template <class Ready>
  Status wait_for(int peer, const Bounds& bounds, Ready&& ready);
  // Returns an address in the arena of `owner`, as this process sees it. Maps the arena on first
  // use; null and a broken group if that fails. The caller holds the collective lock.
  std::byte* map_peer(int owner, const ArenaLocation& location, Status& status);

  Record record_of(const Fingerprint& own) const;
  // Begins the flight recorder's record of the current collective, unless that is done. It is
  // published as under way when the collective waits for a peer, or copies much: most small ones
  // end before that.
  void begin_record();
  void publish_record();
  // Refuses a collective because the group is broken. Only the first refusal is recorded: endless
  // attempts must not push earlier records out of the flight recorder.
  Status refuse(const Status& reason);
  void begin_wait(int peer) { begin_wait_for(global_rank(peer)); }
  void end_wait(int peer, Clock::duration waited) { end_wait_for(global_rank(peer), waited); }
  void begin_wait_for(std::int16_t global_rank);
  void end_wait_for(std::int16_t global_rank, Clock::duration waited);
  // Records the outcome of the collective, which may be ok even if another one breaks the group
  // meanwhile.
  Status record_outcome(const Status& status) {
    record_.outcome = status.code;
    return status;
  }
  void end_record();

  std::unique_ptr<Segment> segment_;
  int rank_;
  std::vector<Process> processes_;                        // by rank; this rank's is not open
  std::vector<std::shared_ptr<const ArenaView>> arenas_;  // by rank, null until first mapped
  std::vector<std::int16_t> global_ranks_;
  Tree tree_;
  bool left_ = false;
  std::mutex aborting_;  // a thread that moves messages may fail during a collective

  // The running collective holds a lock on this rank's step event, which guards the rest.
  std::atomic<int> collective_waiters_ = 0;  // writers: threads that wait for the mutex
  std::condition_variable_any collective_released_;
  std::atomic<std::uint64_t> sequence_ = 0;  // writer: the holder of the lock
  Fingerprint current_;
  bool composite_ = false;
  std::uint64_t step_ = 0;
  std::uint64_t entries_ = 0;  // collectives entered by this rank, parts of composites included
  std::uint64_t all_entered_ =
      0;                         // the entry that all peers are known to have made, or a later one
  std::uint64_t history_ = 0;    // a hash of all fingerprints entered
  std::uint64_t exchanges_ = 0;  // uses of the exchange buffers
  // The pieces of this rank's rings that its last collectives took, by entry.
  struct Piece {
    std::size_t begin = 0;
    std::size_t end = 0;
    std::uint64_t done = 0;  // the step at the end of the collective
  };
  Piece pieces_[2][kEntries];
  std::size_t ring_positions_[2] = {0, 0};
  bool large_ring_ready_ = false;
  bool exchange_ready_ = false;
  int next_checked_ = 0;  // the rank that status_while_waiting checks next
  SpinPolicy spin_policy_;

  FlightRecorder* recorder_ = FlightRecorder::own();
  std::uint16_t recorder_group_ = 0;
  GroupEntry* entry_ = nullptr;
  // The collective under way.
  Record record_;
  int slot_ = -1;  // in the flight recorder
  enum class Recording : std::uint8_t { none, due, begun, published };
  Recording recording_ = Recording::none;
  bool refused_ = false;
  Clock::duration longest_wait_{};
  std::int16_t longest_wait_rank_ = -1;
};

template <class Ready>
Status Group::wait_for(int peer, const Bounds& bounds, Ready&& ready) {
  if (ready()) {
    return {};
  }
  int named = peer;
  begin_wait(named);
  spin_policy_.set_same_core(shares_core(peer));
  const auto check = [&] {
    if (const int awaited = awaited_rank(peer); awaited != named) {
      named = awaited;
      begin_wait(named);
    }
    return status_while_waiting(peer);
  };
  Status status =
      wait_until(segment_->control(peer).step_event, spin_policy_, bounds, ready, check);
  if (status.ok()) {
    end_wait(named, spin_policy_.last_wait());
    return status;
  }
  if (status.code == Code::timeout) {
    status.peer = awaited_rank(peer);
  }
  if (status.reporter < 0) {
    status.reporter = rank_;
  }
  return fail_collective({status, current_});
}

}  // namespace phalanx
