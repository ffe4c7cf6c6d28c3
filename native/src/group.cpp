#include "phalanx/group.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "phalanx/call_site.h"

namespace phalanx {
namespace {

// The abort word: the code, three ranks of twelve bits, plus one so that "none" fits, and the
// errno. The witness is the rank whose `failure_fingerprints` hold the fingerprints.
constexpr int kPeer = 8;
constexpr int kReporter = 20;
constexpr int kWitness = 32;
constexpr int kError = 44;
constexpr std::uint64_t kRankBits = 0xfff;
static_assert(kMaxRanks < static_cast<int>(kRankBits));

// Checking a process takes some 10 us. So many other ranks are checked per slice.
constexpr int kRanksPerCheck = 8;

std::uint64_t pack(const Status& status, int witness) {
  const auto rank = [](std::int32_t value, int shift) {
    return (static_cast<std::uint64_t>(value + 1) & kRankBits) << shift;
  };
  return static_cast<std::uint64_t>(status.code) | rank(status.peer, kPeer) |
         rank(status.reporter, kReporter) | rank(witness, kWitness) |
         static_cast<std::uint64_t>(status.error) << kError;
}

std::int32_t rank_in(std::uint64_t word, int shift) {
  return static_cast<std::int32_t>(word >> shift & kRankBits) - 1;
}

}  // namespace

Group::Group(std::unique_ptr<Segment> segment, int rank, std::uint16_t entry)
    : segment_(std::move(segment)),
      rank_(rank),
      processes_(static_cast<std::size_t>(segment_->ranks())),
      arenas_(static_cast<std::size_t>(segment_->ranks())),
      spin_policy_(segment_->ranks()) {
  RankControl& own = segment_->control(rank_);
  own.pid.store(getpid(), std::memory_order_relaxed);
  own.recorder_descriptor.store(recorder_ == nullptr ? -1 : recorder_->descriptor(),
                                std::memory_order_relaxed);
  if (recorder_ != nullptr) {
    recorder_group_ = entry != 0 ? entry : recorder_->add_group(rank_, ranks());
    entry_ = recorder_->group(recorder_group_);
  }
  if (entry_ != nullptr) {
    // A reader that finds it in a copy of the file may read name and members.
    entry_->identity.store(segment_->header().nonce, std::memory_order_release);
  }
  own.presence.store(Presence::joined, std::memory_order_seq_cst);
}

Status Group::connect() {
  Status status;
  for (int peer = 0; peer < ranks(); ++peer) {
    if (peer == rank_ || pid(peer) == getpid()) {
      continue;  // ranks of one process (in the native tests) live and die together
    }
    const int error = processes_[static_cast<std::size_t>(peer)].open(pid(peer));
    if (error == ESRCH) {
      status = abort(Status{.code = Code::peer_lost, .peer = peer, .reporter = rank_});
    } else if (error != 0) {
      return Status{.code = Code::system, .error = error};
    }
  }
  segment_->close_descriptor();
  return status;
}

bool Group::shares_core(int peer) const {
  const std::int32_t processor = sched_getcpu() + 1;
  // relaxed: hints, from which nothing else follows.
  segment_->control(rank_).processor.store(processor, std::memory_order_relaxed);
  return segment_->control(peer).processor.load(std::memory_order_relaxed) == processor;
}

std::byte* Group::map_peer(int owner, const ArenaLocation& location, Status& status) {
  if (owner == rank_ || pid(owner) == getpid()) {
    const Arena* arena = Arena::own(status);
    return arena == nullptr ? nullptr : arena->base() + location.offset;
  }
  auto& view = arenas_[static_cast<std::size_t>(owner)];
  if (!view) {
    PHALANX_STEP("map_peer: map the arena");
    view = ArenaView::open(pid(owner), location.descriptor, status);
    // The opened file may belong to a later process with the same pid; and if the open failed, the
    // owner may be exiting, since it closes its files first.
    if (is_lost(owner)) {
      view = nullptr;
      status = Status{.code = Code::peer_lost};
    }
  }
  if (!view) {
    status.peer = owner;
    status.reporter = rank_;
    status = fail_collective({status, current_});
    return nullptr;
  }
  return view->at(location.offset);
}

void Group::advance_to(std::uint64_t step) {
  RankControl& own = segment_->control(rank_);
  step_ = step;
  PHALANX_STEP("advance: publish the step");
  // Publishes all earlier writes. Pairs with the load in wait_step.
  own.step.store(step, std::memory_order_release);
  notify(own.step_event);
}

Status Group::wait_step(int peer, std::uint64_t target, const Bounds& bounds) {
  const RankControl& control = segment_->control(peer);
  // Pairs with the store in advance_to.
  const auto ready = [&] { return control.step.load(std::memory_order_acquire) >= target; };
  return wait_for(peer, bounds, ready);
}

Status Group::wait_steps(std::uint64_t target, const Bounds& bounds) {
  for (int peer = 0; peer < ranks(); ++peer) {
    if (peer != rank_) {
      if (const Status status = wait_step(peer, target, bounds); !status.ok()) {
        return status;
      }
    }
  }
  return {};
}

std::vector<int> Group::ranks_behind(int rank) const {
  const auto behind = [&](const std::atomic<std::uint64_t> RankControl::* progress) {
    const auto of = [&](int r) {
      return (segment_->control(r).*progress).load(std::memory_order_relaxed);
    };
    std::vector<int> all;
    for (int peer = 0; peer < ranks(); ++peer) {
      if (of(peer) < of(rank)) {
        all.push_back(peer);
      }
    }
    return all;
  };
  const std::vector<int> absent = behind(&RankControl::entered);
  return absent.empty() ? behind(&RankControl::step) : absent;
}

bool Group::is_awaited() const {
  const auto step_of = [this](int r) {
    return segment_->control(r).step.load(std::memory_order_relaxed);
  };
  for (int peer = 0; peer < ranks(); ++peer) {
    if (peer != rank_ && step_of(peer) <= step_of(rank_)) {
      return false;
    }
  }
  return true;
}

Status Group::abort(Failure reason, bool wake) {
  const std::lock_guard lock(aborting_);
  // An interrupted rank reports the interrupt even after another failure, since its own signal
  // handler raised. The fingerprints that this rank has published for an earlier failure stay,
  // since peers read them.
  if (const Status earlier = failure(); !earlier.ok()) {
    return reason.status.code == Code::interrupted ? reason.status : earlier;
  }
  if (reason.status.code == Code::aborted && is_failing(rank_)) {
    // An exception ends this process, which abandons its operations.
    reason = Status{.code = Code::peer_lost, .peer = rank_, .reporter = rank_};
  }
  RankControl& own = segment_->control(rank_);
  PHALANX_STEP("abort: publish the fingerprints");
  own.failure_fingerprints[0].store(PackedFingerprint(reason.mine));
  own.failure_fingerprints[1].store(PackedFingerprint(reason.theirs));
  std::uint64_t none = 0;
  auto& word = segment_->header().abort_word;
  PHALANX_STEP("abort: claim the abort word");
  // Pairs with the load in failure: a rank that sees the word may read the witness's fingerprints.
  if (word.compare_exchange_strong(none, pack(reason.status, rank_), std::memory_order_seq_cst)) {
    PHALANX_STEP("abort: wake all");
    for (int rank = 0; wake && rank < ranks(); ++rank) {
      notify_always(segment_->control(rank).step_event);
      notify_always(segment_->control(rank).message_event);
    }
  } else if (reason.status.code == Code::interrupted) {
    return reason.status;
  }
  return failure();
}

Status Group::unpack(std::uint64_t abort_word) {
  return {.code = static_cast<Code>(abort_word & 0xff),
          .peer = rank_in(abort_word, kPeer),
          .reporter = rank_in(abort_word, kReporter),
          .error = static_cast<std::int32_t>(abort_word >> kError)};
}

Failure Group::failure_report() const {
  const std::uint64_t word = segment_->header().abort_word.load(std::memory_order_seq_cst);
  if (word == 0) {
    return Status{};
  }
  const RankControl& witness = segment_->control(rank_in(word, kWitness));
  return {unpack(word), witness.failure_fingerprints[0].load().unpack(),
          witness.failure_fingerprints[1].load().unpack()};
}

void Group::leave() {
  // A forked child inherits the object, not the membership, nor its parent's flight recorder.
  if (left_ || pid(rank_) != getpid()) {
    return;
  }
  left_ = true;
  if (entry_ != nullptr) {
    entry_->left_at.store(current_caller().site, std::memory_order_relaxed);
    // A reader that finds it in a copy of the file may read the call site.
    entry_->left_time.store(nanoseconds(Clock::now()), std::memory_order_release);
    recorder_->publish_sites();
  }
  // A rank that has announced its end by an exception is lost to its peers, however it ends.
  announce(is_failing(rank_) ? Presence::failing : Presence::left, true);
}

void Group::begin_leaving() {
  if (!left_ && !is_failing(rank_)) {
    announce(Presence::leaving, true);
  }
}

void Group::fail(bool wake) { announce(Presence::failing, wake); }

void Group::announce(Presence presence, bool wake) {
  // A forked child inherits the object, not the membership.
  if (pid(rank_) != getpid()) {
    return;
  }
  PHALANX_STEP("leave: publish the presence");
  segment_->control(rank_).presence.store(presence, std::memory_order_seq_cst);
  if (!wake) {
    return;
  }
  notify(segment_->control(rank_).step_event);
  for (int rank = 0; rank < ranks(); ++rank) {
    notify(segment_->control(rank).message_event);
  }
}

bool Group::has_gone(int peer) const {
  return is_lost(peer) ||
         segment_->control(peer).presence.load(std::memory_order_seq_cst) == Presence::left;
}

Status Group::peer_status(int peer) const {
  if (Status status = failure(); !status.ok()) {
    return status;
  }
  if (is_lost(peer)) {
    return Status{.code = Code::peer_lost, .peer = peer, .reporter = rank_};
  }
  const auto presence = segment_->control(peer).presence.load(std::memory_order_seq_cst);
  if (presence == Presence::left || presence == Presence::leaving) {
    // It may have left because it detected in another group that another rank is dead.
    for (int other = 0; other < ranks(); ++other) {
      if (other != rank_ && is_lost(other)) {
        return Status{.code = Code::peer_lost, .peer = other, .reporter = rank_};
      }
    }
    return Status{.code = Code::left, .peer = peer, .reporter = rank_};
  }
  return {};
}

bool Group::is_lost(int peer) const {
  // Checked first: the presence of a process that has ended is final.
  const bool ended = processes_[static_cast<std::size_t>(peer)].ended();
  PHALANX_STEP("peer_status: check the presence");
  const auto presence = segment_->control(peer).presence.load(std::memory_order_seq_cst);
  return presence == Presence::failing || (ended && presence != Presence::left);
}

int Group::awaited_rank(int peer) const {
  const auto has_entered = [this](int rank) {
    return rank == rank_ ||
           segment_->control(rank).entered.load(std::memory_order_relaxed) >= entries_;
  };
  for (int rank = 0; has_entered(peer) && rank < ranks(); ++rank) {
    if (!has_entered(rank)) {
      return rank;
    }
  }
  return peer;
}

Status Group::status_while_waiting(int peer) {
  Status status = peer_status(peer);
  for (int i = 0; status.ok() && i < std::min(kRanksPerCheck, ranks()); ++i) {
    next_checked_ = (next_checked_ + 1) % ranks();
    const int other = next_checked_;
    const auto is_missing = [&] {
      // Pairs with the store in Collective::publish.
      return segment_->control(other).entered.load(std::memory_order_acquire) < entries_;
    };
    if (other == rank_ || other == peer || !is_missing()) {
      continue;
    }
    status = peer_status(other);
    if (!is_missing()) {
      status = {};  // it came before its end
    }
  }
  return status;
}

// ---- records in the flight recorder ----

Record Group::record_of(const Fingerprint& own) const {
  const Caller& caller = current_caller();
  return {.begin = RecordClock::now(),
          .sequence = own.sequence,
          .count = own.count,
          .peer = static_cast<std::int16_t>(own.root),
          .dtype = own.dtype,
          .op = own.op,
          .thread = caller.thread,
          .site = caller.site,
          .group = recorder_group_,
          .kind = own.kind};
}

void Group::begin_record() {
  if (recording_ != Recording::due) {
    return;
  }
  record_ = record_of(current_);
  longest_wait_ = {};
  longest_wait_rank_ = -1;
  if (entry_ != nullptr) {
    entry_->sequence.store(current_.sequence, std::memory_order_relaxed);
  }
  recording_ = Recording::begun;
}

void Group::publish_record() {
  begin_record();
  if (recording_ == Recording::begun) {
    slot_ = recorder_->begin(record_);
    recording_ = Recording::published;
  }
}

void Group::set_global_ranks(std::vector<std::int16_t> global_ranks, std::uint64_t identity) {
  global_ranks_ = std::move(global_ranks);
  if (entry_ != nullptr) {
    entry_->identity.store(identity, std::memory_order_release);  // as in the constructor
  }
}

void Group::end_composite(Code outcome) {
  composite_ = false;
  record_.outcome = outcome;
  end_record();
}

void Group::begin_composite_wait(std::int16_t global_rank) { begin_wait_for(global_rank); }

void Group::end_composite_wait(std::int16_t global_rank, Clock::duration waited) {
  end_wait_for(global_rank, waited);
}

void Group::set_composite_progress(std::uint8_t percent) {
  publish_record();
  record_.progress = percent;
  if (recording_ != Recording::none && slot_ >= 0) {
    recorder_->progress(slot_, record_);
  }
}

Status Group::refuse(const Status& reason) {
  if (!composite_ && std::exchange(refused_, true)) {
    recording_ = Recording::none;
  }
  begin_record();
  return record_outcome(reason);
}

void Group::begin_wait_for(std::int16_t global_rank) {
  publish_record();
  if (recording_ != Recording::none && slot_ >= 0) {
    record_.waiting_for = global_rank;
    recorder_->waiting_for(slot_, record_);
  }
}

void Group::end_wait_for(std::int16_t global_rank, Clock::duration waited) {
  if (recording_ == Recording::none) {
    return;
  }
  record_.waited += static_cast<std::uint64_t>(std::chrono::nanoseconds(waited).count());
  if (waited >= longest_wait_) {
    longest_wait_ = waited;
    longest_wait_rank_ = global_rank;
  }
  record_.waiting_for = -1;
  if (slot_ >= 0) {
    recorder_->waiting_for(slot_, record_);
  }
}

void Group::end_record() {
  if (recording_ == Recording::none || composite_) {
    return;
  }
  begin_record();
  record_.end = std::max(record_.begin, RecordClock::now());
  if (record_.waiting_for < 0) {
    record_.waiting_for = longest_wait_rank_;
  } else {  // the wait failed
    record_.waited = record_.end - record_.begin;
  }
  if (recording_ == Recording::published) {
    recorder_->end(slot_, record_);
  } else {
    recorder_->record(record_);
  }
  recording_ = Recording::none;
}

}  // namespace phalanx
