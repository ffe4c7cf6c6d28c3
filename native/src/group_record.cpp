// The part of a group that locks collectives and writes the flight recorder: kinds, begins, ends
// and waits of its collectives.
#include <algorithm>
#include <utility>

#include "phalanx/call_site.h"
#include "phalanx/group.h"

namespace phalanx {
namespace {

// The time that a thread waits for the lock before it checks deadline, signals and the group.
constexpr auto kLockSlice = std::chrono::milliseconds(10);

}  // namespace

Group::CollectiveLock::CollectiveLock(Group& group, const Bounds& bounds) : group_(group) {
  if (!group_.collective_mutex_.try_lock()) {
    status_ = acquire(bounds);
  }
}

Group::CollectiveLock::~CollectiveLock() {
  if (!status_.ok()) {
    return;
  }
  group_.end_record();
  group_.collective_mutex_.unlock();
  // A thread that begins to wait at this moment finds the lock free in its next slice.
  if (group_.collective_waiters_.load(std::memory_order_relaxed) != 0) {
    group_.collective_released_.notify_one();
  }
}

Status Group::CollectiveLock::acquire(const Bounds& bounds) {
  group_.collective_waiters_.fetch_add(1, std::memory_order_relaxed);
  Status status;
  std::mutex own;
  std::unique_lock lock(own);
  while (!group_.collective_mutex_.try_lock()) {
    group_.collective_released_.wait_for(lock, kLockSlice);
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
  group_.collective_waiters_.fetch_sub(1, std::memory_order_relaxed);
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
          .group = recorder_group_,
          .kind = own.kind};
}

void Group::begin_record(const Fingerprint& own, const Bounds& bounds) {
  if (recorder_ == nullptr) {
    return;
  }
  record_ = record_of(own, bounds);
  longest_wait_ = {};
  longest_wait_rank_ = -1;
  if (entry_ != nullptr) {
    entry_->sequence.store(own.sequence, std::memory_order_relaxed);
  }
  slot_ = recorder_->begin(record_);
  recording_ = true;
}

void Group::set_global_ranks(std::vector<std::int16_t> global_ranks, std::uint64_t identity) {
  global_ranks_ = std::move(global_ranks);
  if (entry_ != nullptr) {
    entry_->identity.store(identity, std::memory_order_release);  // as in the constructor
  }
}

std::uint64_t Group::begin_collective(Fingerprint own, const Bounds& bounds) {
  if (!composite_) {
    own.sequence = sequence() + 1;
    sequence_.store(own.sequence, std::memory_order_relaxed);
    current_ = own;
    begin_record(own, bounds);
  }
  return sequence();
}

Status Group::begin_composite(const Fingerprint& own, const Bounds& bounds) {
  const CollectiveLock lock(*this, bounds);
  if (!lock.status().ok()) {
    return lock.status();
  }
  const Status status = enter_collective(own, bounds);
  composite_ = status.ok();
  return status;
}

void Group::end_composite(Code outcome) {
  const std::lock_guard lock(collective_mutex_);
  composite_ = false;
  record_.outcome = outcome;
  end_record();
}

void Group::begin_composite_wait(std::int16_t global_rank) {
  const std::lock_guard lock(collective_mutex_);
  begin_wait_for(global_rank);
}

void Group::end_composite_wait(std::int16_t global_rank, Clock::duration waited) {
  const std::lock_guard lock(collective_mutex_);
  end_wait_for(global_rank, waited);
}

Status Group::refuse(Fingerprint own, const Bounds& bounds, const Status& why) {
  if (composite_) {
    return record_outcome(why);
  }
  own.sequence = sequence() + 1;
  sequence_.store(own.sequence, std::memory_order_relaxed);
  if (!refused_) {
    refused_ = true;
    begin_record(own, bounds);
  }
  return record_outcome(why);
}

void Group::begin_wait(int peer) { begin_wait_for(global_rank(peer)); }

void Group::begin_wait_for(std::int16_t global_rank) {
  if (recording_ && slot_ >= 0) {
    record_.waiting_for = global_rank;
    recorder_->waiting_for(slot_, record_);
  }
}

void Group::end_wait(int peer, Clock::duration waited) { end_wait_for(global_rank(peer), waited); }

void Group::end_wait_for(std::int16_t global_rank, Clock::duration waited) {
  if (!recording_) {
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
  if (!recording_ || composite_) {
    return;
  }
  recording_ = false;
  record_.end = nanoseconds(Clock::now());
  if (record_.waiting_for < 0) {
    record_.waiting_for = longest_wait_rank_;
  } else {  // the wait failed
    record_.waited = record_.end - record_.begin;
  }
  recorder_->end(slot_, record_);
}

}  // namespace phalanx
