#include "phalanx/group.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "phalanx/call_site.h"

namespace phalanx {
namespace {

// The abort word: the code, three ranks of twelve bits, plus one so that "none" fits, and the
// errno. The witness is the rank whose `trouble` holds the fingerprints.
constexpr int kPeer = 8;
constexpr int kReporter = 20;
constexpr int kWitness = 32;
constexpr int kError = 44;
constexpr std::uint64_t kRankBits = 0xfff;
static_assert(kMaxRanks < static_cast<int>(kRankBits));

// A look at a process takes some 10 us. This many others are looked at once in a slice.
constexpr int kOthersPerLook = 8;

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

Group::Group(std::unique_ptr<Segment> segment, int rank, std::uint16_t note)
    : segment_(std::move(segment)),
      rank_(rank),
      patience_(segment_->ranks()),
      processes_(static_cast<std::size_t>(segment_->ranks())),
      arenas_(static_cast<std::size_t>(segment_->ranks())) {
  RankControl& own = segment_->control(rank_);
  own.pid.store(getpid(), std::memory_order_relaxed);
  own.box.store(box_ == nullptr ? -1 : box_->descriptor(), std::memory_order_relaxed);
  if (box_ != nullptr) {
    box_group_ = note != 0 ? note : box_->add_group(rank_, ranks());
    note_ = box_->group(box_group_);
  }
  if (note_ != nullptr) {
    // Who finds it in a copy of the box may read name and members.
    note_->identity.store(segment_->header().nonce, std::memory_order_release);
  }
  own.presence.store(Presence::joined, std::memory_order_seq_cst);
}

Status Group::connect() {
  for (int peer = 0; peer < ranks(); ++peer) {
    if (peer == rank_ || pid(peer) == getpid()) {
      continue;  // ranks of one process (the native tests) live and die together
    }
    const int error = processes_[static_cast<std::size_t>(peer)].open(pid(peer));
    if (error == ESRCH) {
      return abort(Status{.code = Code::peer_lost, .peer = peer, .reporter = rank_});
    }
    if (error != 0) {
      return Status{.code = Code::system, .error = error};
    }
  }
  segment_->close_descriptor();
  return {};
}

Status Group::meet(Fingerprint own, const Bounds& bounds) {
  if (const Status status = broken(); !status.ok()) {
    return refuse(own, bounds, status);
  }
  own.sequence = begin(own, bounds);
  ++meetings_;
  PHALANX_STEP("meet: publish the fingerprint");
  segment_->control(rank_).fingerprints[meetings_ & 1].store(own);
  advance();
  met_ = step_;
  for (int peer = 0; peer < ranks(); ++peer) {
    if (peer == rank_) {
      continue;
    }
    if (const Status status = wait_step(peer, met_, bounds); !status.ok()) {
      return status;
    }
    PHALANX_STEP("meet: compare");
    const Fingerprint theirs = segment_->control(peer).fingerprints[meetings_ & 1].load();
    if (theirs != own) {
      return fails(Status{
          .code = Code::mismatch, .peer = peer, .reporter = rank_, .mine = own, .theirs = theirs});
    }
  }
  return {};
}

Status Group::prepare(const Fingerprint& own, const Bounds& bounds, bool staging) {
  if (const Status status = broken(); !status.ok()) {
    return refuse(own, bounds, status);
  }
  if (!staging || staging_ready_) {
    return {};
  }
  PHALANX_STEP("prepare: get pages");
  Status status = Segment::prefault(segment_->staging(rank_, 0), 2 * segment_->chunk_bytes());
  if (!status.ok()) {
    status.reporter = rank_;
    return refuse(own, bounds, abort(status));
  }
  staging_ready_ = true;
  return {};
}

std::byte* Group::reach(int owner, const Place& place, Status& status) {
  if (owner == rank_ || pid(owner) == getpid()) {
    const Arena* arena = Arena::own(status);
    return arena == nullptr ? nullptr : arena->base() + place.offset;
  }
  auto& view = arenas_[static_cast<std::size_t>(owner)];
  if (!view) {
    PHALANX_STEP("reach: map the arena");
    view = ArenaView::open(pid(owner), place.descriptor, status);
    // What was opened may belong to a later process of the same pid, and what was not to one that
    // is ending: it closes its files first.
    if (lost(owner)) {
      view = nullptr;
      status = Status{.code = Code::peer_lost, .mine = current_};
    }
  }
  if (!view) {
    status.peer = owner;
    status.reporter = rank_;
    status = fails(status);
    return nullptr;
  }
  return view->at(place.offset);
}

void Group::advance() {
  RankControl& own = segment_->control(rank_);
  PHALANX_STEP("advance: publish the step");
  // Publishes all that was written before. Pairs with the load in wait_step; seq_cst, not release,
  // for the sake of notify.
  own.step.store(++step_, std::memory_order_seq_cst);
  notify(own.stepped);
}

Status Group::wait_step(int peer, std::uint64_t target, const Bounds& bounds) {
  RankControl& control = segment_->control(peer);
  // Pairs with the store in advance.
  const auto ready = [&] { return control.step.load(std::memory_order_seq_cst) >= target; };
  if (ready()) {
    return {};
  }
  show_wait(peer);
  const auto trouble = [&] { return trouble_while_awaiting(peer); };
  Status status = wait_until(control.stepped, patience_, bounds, ready, trouble);
  if (status.ok()) {
    note_wait(peer, patience_.last());
    return status;
  }
  if (status.code == Code::timeout) {
    status.peer = peer;
  }
  if (status.reporter < 0) {
    status.reporter = rank_;
  }
  status.mine = current_;
  return fails(status);
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

std::vector<int> Group::behind(int rank) const {
  const auto step_of = [this](int r) {
    return segment_->control(r).step.load(std::memory_order_relaxed);
  };
  std::vector<int> late;
  for (int peer = 0; peer < ranks(); ++peer) {
    if (step_of(peer) < step_of(rank)) {
      late.push_back(peer);
    }
  }
  return late;
}

bool Group::awaited() const {
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

Status Group::abort(Status why, bool wake) {
  const std::lock_guard lock(aborting_);
  // Who is interrupted reports that, whatever else went wrong: its own signal handler raised. What
  // this rank has published of an earlier failure stays, since peers read it.
  if (const Status earlier = broken(); !earlier.ok()) {
    return why.code == Code::interrupted ? why : earlier;
  }
  if (why.code == Code::aborted && failing(rank_)) {
    // An exception ends this process, which gives up what it has under way.
    why = Status{.code = Code::peer_lost, .peer = rank_, .reporter = rank_};
  }
  RankControl& own = segment_->control(rank_);
  PHALANX_STEP("abort: publish what differs");
  own.trouble[0].store(why.mine);
  own.trouble[1].store(why.theirs);
  std::uint64_t none = 0;
  auto& word = segment_->header().abort_word;
  PHALANX_STEP("abort: claim the word");
  // Pairs with the load in broken: who sees the word may read the witness's fingerprints.
  if (word.compare_exchange_strong(none, pack(why, rank_), std::memory_order_seq_cst)) {
    PHALANX_STEP("abort: wake all");
    for (int rank = 0; wake && rank < ranks(); ++rank) {
      notify_always(segment_->control(rank).stepped);
      notify_always(segment_->control(rank).bell);
    }
  } else if (why.code == Code::interrupted) {
    return why;
  }
  return broken();
}

Status Group::broken() const {
  PHALANX_STEP("broken: look at the word");
  const std::uint64_t word = segment_->header().abort_word.load(std::memory_order_seq_cst);
  if (word == 0) {
    return {};
  }
  const RankControl& witness = segment_->control(rank_in(word, kWitness));
  return Status{.code = static_cast<Code>(word & 0xff),
                .peer = rank_in(word, kPeer),
                .reporter = rank_in(word, kReporter),
                .error = static_cast<std::int32_t>(word >> kError),
                .mine = witness.trouble[0].load(),
                .theirs = witness.trouble[1].load()};
}

void Group::leave() {
  // A forked child inherits the object, not the membership, nor its parent's flight recorder.
  if (left_ || pid(rank_) != getpid()) {
    return;
  }
  left_ = true;
  if (note_ != nullptr) {
    note_->left_at.store(current_caller().site, std::memory_order_relaxed);
    // Who finds it in a copy of the box may read where.
    note_->left.store(1, std::memory_order_release);
    box_->publish_sites();
  }
  // Who has said that it ends by an exception is lost to its peers, however it ends.
  announce(failing(rank_) ? Presence::failing : Presence::left, true);
}

void Group::fail(bool wake) { announce(Presence::failing, wake); }

void Group::announce(Presence presence, bool wake) {
  // A forked child inherits the object, not the membership.
  if (pid(rank_) != getpid()) {
    return;
  }
  PHALANX_STEP("leave: say so");
  segment_->control(rank_).presence.store(presence, std::memory_order_seq_cst);
  if (!wake) {
    return;
  }
  notify(segment_->control(rank_).stepped);
  for (int rank = 0; rank < ranks(); ++rank) {
    notify(segment_->control(rank).bell);
  }
}

Status Group::trouble_with(int peer) const {
  if (Status status = broken(); !status.ok()) {
    return status;
  }
  if (lost(peer)) {
    return Status{.code = Code::peer_lost, .peer = peer, .reporter = rank_};
  }
  if (segment_->control(peer).presence.load(std::memory_order_seq_cst) == Presence::left) {
    // It may have left because another rank is dead, which it has met in another group.
    for (int other = 0; other < ranks(); ++other) {
      if (other != rank_ && lost(other)) {
        return Status{.code = Code::peer_lost, .peer = other, .reporter = rank_};
      }
    }
    return Status{.code = Code::left, .peer = peer, .reporter = rank_};
  }
  return {};
}

bool Group::lost(int peer) const {
  // Looked at first: what a process that has ended says of itself is final.
  const bool ended = processes_[static_cast<std::size_t>(peer)].ended();
  PHALANX_STEP("trouble: look for who left");
  const auto presence = segment_->control(peer).presence.load(std::memory_order_seq_cst);
  return presence == Presence::failing || (ended && presence != Presence::left);
}

Status Group::trouble_while_awaiting(int peer) {
  Status status = trouble_with(peer);
  for (int i = 0; status.ok() && i < std::min(kOthersPerLook, ranks()); ++i) {
    next_other_ = (next_other_ + 1) % ranks();
    const int other = next_other_;
    const auto missing = [&] {
      return segment_->control(other).step.load(std::memory_order_seq_cst) < met_;
    };
    if (other == rank_ || other == peer || !missing()) {
      continue;
    }
    status = trouble_with(other);
    if (!missing()) {
      status = {};  // it came before its end
    }
  }
  return status;
}

}  // namespace phalanx
