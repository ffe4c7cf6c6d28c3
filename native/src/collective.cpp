#include "phalanx/collective.h"

#include <algorithm>
#include <cstring>

#include "phalanx/copy.h"

namespace phalanx {
namespace {

// The time that a thread waits for the lock before it checks deadline, signals and the group.
constexpr auto kLockSlice = std::chrono::milliseconds(10);

}  // namespace

Collective::Collective(Group& group, const Fingerprint& own, const Bounds& bounds)
    : group_(group), bounds_(bounds), ranks_(group.ranks()), own_(own) {
  status_ = acquire_lock();
  if (!status_.ok()) {
    return;
  }
  if (!group_.composite_) {
    own_.sequence = group_.sequence() + 1;
    group_.sequence_.store(own_.sequence, std::memory_order_relaxed);
  }
  own_.sequence = group_.sequence();
  if (!group_.composite_) {
    group_.current_ = own_;
    group_.recording_ =
        group_.recorder_ == nullptr ? Group::Recording::none : Group::Recording::due;
  }
  status_ = group_.failure();
  if (!status_.ok()) {
    status_ = group_.refuse(status_);
    return;
  }
  const std::uint64_t number = group_.entries_ + 1;
  for (auto& pieces : group_.pieces_) {
    pieces[group_.entries_ % kEntries].done = group_.step_;
    pieces[number % kEntries] = {};
  }
  // The next entry takes the place of the one kEntries before it.
  status_ = ensure_entered(number < kEntries ? 0 : number - kEntries + 1);
}

Collective::~Collective() {
  if (!locked_) {
    return;
  }
  group_.end_record();
  unlock_and_notify(event());
  // A thread that begins to wait at this moment finds the lock free in its next slice.
  if (group_.collective_waiters_.load(std::memory_order_relaxed) != 0) {
    group_.collective_released_.notify_one();
  }
}

Status Collective::acquire_lock() {
  locked_ = try_lock(event());
  if (locked_) {
    return {};
  }
  bounds_.block();
  const auto deadline = bounds_.deadline(Clock::now());
  group_.collective_waiters_.fetch_add(1, std::memory_order_relaxed);
  Status status;
  std::mutex own;
  std::unique_lock lock(own);
  while (status.ok() && !(locked_ = try_lock(event()))) {
    group_.collective_released_.wait_for(lock, kLockSlice);
    if (bounds_.interrupted != nullptr && bounds_.interrupted()) {
      status = {.code = Code::interrupted, .reporter = self()};
    } else if (Clock::now() >= deadline) {
      status = {.code = Code::timeout, .peer = self(), .reporter = self()};
    }
  }
  group_.collective_waiters_.fetch_sub(1, std::memory_order_relaxed);
  return status.ok() ? status : group_.abort(status);
}

// ---- places for data ----

Status Collective::reserve(std::size_t bytes) {
  if (bytes == 0) {
    return {};
  }
  if (bytes <= kEntryPayload) {
    place_ |= kPayload;
    data_ = payload();
    return {};
  }
  return reserve_piece(whole_lines(bytes));
}

Status Collective::reserve_piece(std::size_t bytes) {
  const bool large = bytes > kSmallPiece;
  if (large && !group_.large_ring_ready_) {
    if (Status status = prepare_large_ring(); !status.ok()) {
      return status;
    }
  }
  const Segment& segment = *group_.segment_;
  const std::size_t ring = large ? segment.large_ring_bytes() : kSmallRing;
  std::size_t& position = group_.ring_positions_[large];
  const std::size_t begin = position + bytes <= ring ? position : 0;
  const std::size_t end = begin + bytes;
  const std::uint64_t number = group_.entries_ + 1;
  auto& pieces = group_.pieces_[large];
  // The last collective whose piece overlaps this one. All before it have ended everywhere then, as
  // have those whose entries are gone.
  for (std::uint64_t past = number - 1; past != 0 && past + kEntries > number; --past) {
    const auto& piece = pieces[past % kEntries];
    if (piece.begin < end && begin < piece.end) {
      if (Status status = ensure_finished(past, piece); !status.ok()) {
        return status;
      }
      break;
    }
  }
  pieces[number % kEntries] = {begin, end, 0};
  position = end;
  place_ |= begin | (large ? kLarge : kSmall);
  data_ = (large ? segment.large_ring(self()) : segment.small_ring(self())) + begin;
  return {};
}

Status Collective::prepare_large_ring() {
  PHALANX_STEP("reserve: prefault");
  const Segment& segment = *group_.segment_;
  Status status = prefault(segment.large_ring(self()), segment.large_ring_bytes());
  if (!status.ok()) {
    status.reporter = self();
    return fail(status);
  }
  group_.large_ring_ready_ = true;
  return {};
}

Status Collective::reserve_exchange(std::size_t bytes) {
  const Segment& segment = *group_.segment_;
  if (bytes > kExchangeReady && !group_.exchange_ready_) {
    PHALANX_STEP("reserve: prefault");
    Status status = prefault(segment.exchange_buffer(0), 2 * kExchangeBytes);
    if (!status.ok()) {
      status.reporter = self();
      return fail(status);
    }
    group_.exchange_ready_ = true;
  }
  place_ |= kExchange;
  data_ = own_exchange_buffer();
  return {};
}

const std::byte* Collective::data(int peer) const {
  Entry& theirs = entry(peer, group_.entries_);
  const std::uint64_t offset = theirs.data & ~(kPlaceBits | kLocated);
  switch (theirs.data & kPlaceBits) {
    case kPayload: return theirs.payload;
    case kSmall: return group_.segment_->small_ring(peer) + offset;
    case kLarge: return group_.segment_->large_ring(peer) + offset;
    case kExchange: return exchanged();
    default: return nullptr;
  }
}

// ---- the entry ----

Status Collective::enter(Peers peers, bool staged) {
  publish(kStepsToEnter, staged ? 0 : 1);
  if (!bounds_.runs_ahead) {
    peers = Peers::all;
  }
  if (event().sleepers.load(std::memory_order_relaxed) != kLocked) {
    notify(event());
  }
  group_.begin_record();  // while the entry is on its way
  const int first = peers == Peers::root ? own_.root : 0;
  const int end = peers == Peers::root ? own_.root + 1 : peers == Peers::all ? ranks_ : 0;
  int peer = first;
  const auto all_have_entered = [&] {
    while (peer < end && (peer == self() || has_entered(peer))) {
      ++peer;
    }
    return peer == end;
  };
  // A sleeper that this rank has not seen yet is woken at the end of a small collective, when the
  // lock is released anyway.
  const bool was_short = look_briefly(all_have_entered);
  if (was_short) {
    group_.spin_policy_.record_short_wait();
  }
  if (!was_short || is_long_) {
    notify(event());
  }
  for (peer = first; peer < end; ++peer) {
    if (peer == self()) {
      continue;
    }
    if (const Status status = wait_for_entry(peer); !status.ok()) {
      return status;
    }
    if (const Status status = compare(peer); !status.ok()) {
      return status;
    }
  }
  if (peers == Peers::all) {
    met_ = true;
    group_.all_entered_ = group_.entries_;
  }
  return {};
}

Status Collective::enter_together(bool staged) {
  if (group_.tree_.empty()) {
    return enter(Peers::all, staged);
  }
  Status status = enter_tree();
  if (status.ok()) {
    pass_up();
    status = await_parent();
  }
  if (status.ok()) {
    pass_down(staged);
  }
  return status;
}

Status Collective::enter_tree() {
  publish(kStepsToMeet, 3);
  notify(event());
  group_.begin_record();
  for (const int child : group_.tree_.children()) {
    if (const Status status = meet_neighbour(child, base_ - 2); !status.ok()) {
      return status;
    }
  }
  return {};
}

Status Collective::await_parent() {
  const Tree& tree = group_.tree_;
  return tree.is_root() ? Status{} : meet_neighbour(tree.parent(), base_ - 1);
}

void Collective::pass_down(bool staged) {
  met_ = true;
  group_.all_entered_ = group_.entries_;
  group_.advance_to(staged ? base_ : base_ - 1);
}

Status Collective::meet_neighbour(int peer, std::uint64_t step) {
  const auto here = [&] { return has_entered(peer); };
  Status status;
  if (!look_briefly(here)) {
    status = group_.wait_for(peer, bounds_, here);
  }
  if (status.ok()) {
    status = compare(peer);
  }
  const auto ready = [&] {
    // Pairs with the store in Group::advance_to. What a rank below or above has published before
    // that of its own neighbour is visible too.
    return group_.segment_->control(peer).step.load(std::memory_order_acquire) >= step;
  };
  if (!status.ok() || look_briefly(ready)) {
    return status;
  }
  return group_.wait_for(peer, bounds_, ready);
}

void Collective::publish(std::uint64_t steps, std::uint64_t before_base) {
  packed_ = PackedFingerprint(own_);
  group_.history_ = extend_history(group_.history_, packed_);
  for (const PackedFingerprint& part : parts_) {
    group_.history_ = extend_history(group_.history_, part);
  }
  const std::uint64_t number = ++group_.entries_;
  base_ = group_.step_ + steps;
  group_.step_ = base_ - before_base;
  RankControl& control = group_.segment_->control(self());
  Entry& mine = control.entries[number % kEntries];
  PHALANX_STEP("enter: publish the entry");
  // Each a release, so that none comes before the number is cleared. Pairs with `agrees`.
  mine.number.store(0, std::memory_order_relaxed);
  mine.fingerprint.store(packed_);
  mine.history.store(group_.history_, std::memory_order_release);
  mine.data = place_;
  // Publishes the entry and the data. Pairs with has_entered.
  mine.number.store(number, std::memory_order_release);
  PHALANX_STEP("enter: publish the progress");
  control.step.store(group_.step_, std::memory_order_release);   // pairs with Group::wait_step
  control.entered.store(number, std::memory_order_release);      // pairs with ensure_entered
  prefetch_to_write(&control.entries[(number + 1) % kEntries]);  // for the next collective
}

bool Collective::has_entered(int peer) const {
  // Pairs with the store in publish.
  return entry(peer, group_.entries_).number.load(std::memory_order_acquire) == group_.entries_;
}

Status Collective::wait_for_entry(int peer) {
  return group_.wait_for(peer, bounds_, [&] { return has_entered(peer); });
}

Status Collective::meet() {
  for (int peer = 0; !met_ && peer < ranks_; ++peer) {
    if (peer == self()) {
      continue;
    }
    if (const Status status = wait_for_entry(peer); !status.ok()) {
      return status;
    }
    if (const Status status = compare(peer); !status.ok()) {
      return status;
    }
  }
  met_ = true;
  group_.all_entered_ = group_.entries_;
  return {};
}

Status Collective::ensure_entered(std::uint64_t number) {
  if (group_.all_entered_ >= number) {
    return {};
  }
  std::uint64_t all = group_.entries_;
  for (int peer = 0; peer < ranks_; ++peer) {
    if (peer == self()) {
      continue;
    }
    const RankControl& control = group_.segment_->control(peer);
    std::uint64_t entered = 0;
    const auto ready = [&] {
      // Pairs with the store in publish: the peer has finished its earlier collectives.
      entered = control.entered.load(std::memory_order_acquire);
      return entered >= number;
    };
    if (const Status status = group_.wait_for(peer, bounds_, ready); !status.ok()) {
      return status;
    }
    if (const Status status = compare_last(peer); !status.ok()) {
      return status;
    }
    all = std::min(all, entered);
  }
  group_.all_entered_ = all;
  return {};
}

Status Collective::ensure_finished(std::uint64_t number, const Group::Piece& piece) {
  if (group_.all_entered_ > number) {
    return {};
  }
  const Status status = ensure_entered(number);
  return status.ok() ? group_.wait_steps(piece.done, bounds_) : status;
}

// ---- comparison ----

Status Collective::compare(int peer) {
  PHALANX_STEP("enter: compare");
  PackedFingerprint theirs;
  if (agrees(peer, group_.entries_, theirs)) {
    return {};
  }
  if (theirs != packed_) {
    return mismatch(peer, packed_, theirs);
  }
  const Status status = compare_parts(peer);
  return status.ok() ? compare_last(peer) : status;
}

Status Collective::compare_parts(int peer) {
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    PackedFingerprint mine = parts_[i];
    PackedFingerprint theirs;
    std::memcpy(&theirs, data(peer) + i * sizeof theirs, sizeof theirs);
    if (theirs != mine) {
      mine.sequence = theirs.sequence = own_.sequence;
      return mismatch(peer, mine, theirs);
    }
  }
  return {};
}

// Compares the entries of a peer that this rank has not waited for, as far as both still have them.
Status Collective::compare_last(int peer) {
  const std::uint64_t last = group_.entries_;
  for (std::uint64_t number = last - std::min(last, kEntries - 1); number <= last; ++number) {
    PackedFingerprint theirs;
    if (number != 0 && !agrees(peer, number, theirs)) {
      return mismatch(peer, entry(self(), number).fingerprint.load(), theirs);
    }
  }
  return {};
}

bool Collective::agrees(int peer, std::uint64_t number, PackedFingerprint& theirs) const {
  const Entry& mine = entry(self(), number);
  const Entry& other = entry(peer, number);
  // The first load pairs with the last store in publish, and the others with those before.
  const bool there = other.number.load(std::memory_order_acquire) == number;
  theirs = other.fingerprint.load();
  const std::uint64_t history = other.history.load(std::memory_order_acquire);
  if (!there || other.number.load(std::memory_order_relaxed) != number) {
    return true;
  }
  return theirs == mine.fingerprint.load() &&
         history == mine.history.load(std::memory_order_relaxed);
}

Status Collective::mismatch(int peer, const PackedFingerprint& mine,
                            const PackedFingerprint& theirs) {
  return fail(
      {{.code = Code::mismatch, .peer = peer, .reporter = self()}, mine.unpack(), theirs.unpack()});
}

// ---- composite collectives ----

Status Group::begin_composite(const Fingerprint& own, const Bounds& bounds) {
  Collective collective(*this, own, bounds);
  Status status = collective.status();
  if (status.ok()) {
    status = collective.enter_together();
  }
  composite_ = status.ok();
  return status;
}

}  // namespace phalanx
