// The part of a group that takes turns and keeps the flight recorder: what its collectives are, when they
// began and ended, and whom they waited for.
#include <algorithm>
#include <utility>

#include "phalanx/call_site.h"
#include "phalanx/group.h"

namespace phalanx {
namespace {

// How long a thread waits for its turn before it looks at deadline, signals and the group.
constexpr auto kTurnSlice = std::chrono::milliseconds(10);

}  // namespace

Group::Turn::Turn(Group& group, const Bounds& bounds) : group_(group) {
  if (!group_.turn_.try_lock()) {
    status_ = wait_for_it(bounds);
  }
}

Group::Turn::~Turn() {
  if (!status_.ok()) {
    return;
  }
  group_.end_record();
  group_.turn_.unlock();
  // A thread that begins to wait just then finds the turn free in its next slice.
  if (group_.waiting_for_turn_.load(std::memory_order_relaxed) != 0) {
    group_.turn_over_.notify_one();
  }
}

Status Group::Turn::wait_for_it(const Bounds& bounds) {
  group_.waiting_for_turn_.fetch_add(1, std::memory_order_relaxed);
  Status status;
  std::mutex own;
  std::unique_lock lock(own);
  while (!group_.turn_.try_lock()) {
    group_.turn_over_.wait_for(lock, kTurnSlice);
    if (bounds.interrupted != nullptr && bounds.interrupted()) {
      status = {.code = Code::interrupted, .reporter = group_.rank_};
    } else if (Clock::now() >= bounds.deadline) {
      status = {.code = Code::timeout, .peer = group_.rank_, .reporter = group_.rank_};
    }
    if (!status.ok()) {
      status = group_.abort(status);
      break;
    }
  }
  group_.waiting_for_turn_.fetch_sub(1, std::memory_order_relaxed);
  return status;
}

Record Group::record_of(const Fingerprint& own, const Bounds& bounds) const {
  const Caller& caller = current_caller();
  const bool known = bounds.begin != Clock::time_point{};
  return {.begin = nanoseconds(known ? bounds.begin : Clock::now()),
          .sequence = own.sequence,
          .count = own.count,
          .peer = static_cast<std::int16_t>(own.root),
          .dtype = own.dtype,
          .op = own.op,
          .thread = caller.thread,
          .site = caller.site,
          .group = box_group_,
          .kind = own.kind};
}

void Group::begin_record(const Fingerprint& own, const Bounds& bounds) {
  if (box_ == nullptr) {
    return;
  }
  record_ = record_of(own, bounds);
  longest_wait_ = {};
  longest_peer_ = -1;
  if (note_ != nullptr) {
    note_->sequence.store(own.sequence, std::memory_order_relaxed);
  }
  place_ = box_->begin(record_);
  recording_ = true;
}

void Group::set_names(std::vector<std::int16_t> names, std::uint64_t identity) {
  names_ = std::move(names);
  if (note_ != nullptr) {
    note_->identity.store(identity, std::memory_order_release);  // as in the constructor
  }
}

std::uint64_t Group::begin(Fingerprint own, const Bounds& bounds) {
  if (!composed_) {
    own.sequence = sequence() + 1;
    sequence_.store(own.sequence, std::memory_order_relaxed);
    current_ = own;
    begin_record(own, bounds);
  }
  return sequence();
}

Status Group::compose(const Fingerprint& own, const Bounds& bounds) {
  const Turn turn(*this, bounds);
  if (!turn.status().ok()) {
    return turn.status();
  }
  const Status status = meet(own, bounds);
  composed_ = status.ok();
  return status;
}

void Group::compose_end(Code outcome) {
  const std::lock_guard turn(turn_);
  composed_ = false;
  record_.outcome = outcome;
  end_record();
}

void Group::compose_waits(std::int16_t name) {
  const std::lock_guard turn(turn_);
  show_name(name);
}

void Group::compose_waited(std::int16_t name, Clock::duration waited) {
  const std::lock_guard turn(turn_);
  note_name(name, waited);
}

Status Group::refuse(Fingerprint own, const Bounds& bounds, const Status& why) {
  if (composed_) {
    return outcome(why);
  }
  own.sequence = sequence() + 1;
  sequence_.store(own.sequence, std::memory_order_relaxed);
  if (!refused_) {
    refused_ = true;
    begin_record(own, bounds);
  }
  return outcome(why);
}

void Group::show_wait(int peer) { show_name(name_of(peer)); }

void Group::show_name(std::int16_t name) {
  if (recording_ && place_ >= 0) {
    record_.waiting_for = name;
    box_->waiting_for(place_, record_);
  }
}

void Group::note_wait(int peer, Clock::duration waited) { note_name(name_of(peer), waited); }

void Group::note_name(std::int16_t name, Clock::duration waited) {
  if (!recording_) {
    return;
  }
  record_.waited += static_cast<std::uint64_t>(std::chrono::nanoseconds(waited).count());
  if (waited >= longest_wait_) {
    longest_wait_ = waited;
    longest_peer_ = name;
  }
  record_.waiting_for = -1;
  if (place_ >= 0) {
    box_->waiting_for(place_, record_);
  }
}

void Group::end_record() {
  if (!recording_ || composed_) {
    return;
  }
  recording_ = false;
  record_.end = nanoseconds(Clock::now());
  if (record_.waiting_for < 0) {
    record_.waiting_for = longest_peer_;
  } else {  // a wait that was in vain
    record_.waited = record_.end - record_.begin;
  }
  box_->end(place_, record_);
}

}  // namespace phalanx
