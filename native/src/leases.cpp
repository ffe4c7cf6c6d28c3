#include "phalanx/leases.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "phalanx/hooks.h"

namespace phalanx {
namespace {

constexpr std::int64_t kNobody = -1;

constexpr std::uint64_t word_of(std::uint64_t lease, BlockState state) {
  return lease * 4 + static_cast<std::uint64_t>(state);
}
constexpr BlockState state_of(std::uint64_t word) { return static_cast<BlockState>(word % 4); }
constexpr std::uint64_t lease_of(std::uint64_t word) { return word / 4; }

constexpr std::size_t bytes_for(std::size_t block_bytes, std::uint32_t blocks) {
  return kPage + blocks * block_bytes;
}
static_assert(bytes_for(1 << 16, 3) == 4096 + 3 * 65536,
              "a changed layout needs a new kLeasesVersion");

// The product does not overflow.
bool valid(std::size_t block_bytes, std::uint32_t blocks) {
  return blocks >= 1 && blocks <= kMaxBlocks && block_bytes >= 1 && block_bytes <= kMaxBlockBytes;
}

Status system_error(int error) { return Status{.code = Code::system, .error = error}; }

}  // namespace

LeaseSegment::LeaseSegment(SealedMemory memory, std::uint64_t number, std::size_t block_bytes,
                           std::uint32_t blocks)
    : memory_(std::move(memory)),
      number_(number),
      block_bytes_(block_bytes),
      holders_(blocks, kNobody) {}

std::unique_ptr<LeaseSegment> LeaseSegment::create(std::uint64_t number, std::size_t block_bytes,
                                                   std::uint32_t blocks, std::uint64_t nonce,
                                                   Status& status) {
  if (!valid(block_bytes, blocks)) {
    status = system_error(EINVAL);
    return nullptr;
  }
  auto memory = SealedMemory::create("phalanx-leases", bytes_for(block_bytes, blocks), status);
  if (memory.base() == nullptr) {
    return nullptr;
  }
  std::unique_ptr<LeaseSegment> segment(
      new LeaseSegment(std::move(memory), number, block_bytes, blocks));
  LeaseHeader& header = segment->header();
  header.version = kLeasesVersion;
  header.blocks = blocks;
  header.nonce = nonce;
  header.number = number;
  header.block_bytes = block_bytes;
  header.magic = kLeasesMagic;
  return segment;
}

std::optional<LeaseSegment::Lease> LeaseSegment::lease(std::int64_t holder) {
  const std::lock_guard lock(mutex_);
  for (std::uint32_t block = 0; block < holders_.size(); ++block) {
    auto& word = header().words[block];
    PHALANX_STEP("lease: look for a free block");
    // Pairs with give_back: the last holder has read what this lease overwrites.
    const std::uint64_t last = word.load(std::memory_order_acquire);
    if (state_of(last) != BlockState::free) {
      continue;
    }
    const Lease lease{.block = block, .number = lease_of(last) + 1};
    PHALANX_STEP("lease: begin");
    // Publishes nothing: the message that tells the holder of the block comes later. Nobody else
    // writes the word of a free block.
    word.store(word_of(lease.number, BlockState::filling), std::memory_order_relaxed);
    holders_[block] = holder;
    used_ = std::max<std::size_t>(used_, block + 1);
    return lease;
  }
  return std::nullopt;
}

std::byte* LeaseSegment::data(std::uint32_t block) const {
  return memory_.base() + kPage + block * block_bytes_;
}

void LeaseSegment::finish(const Lease& lease, BlockState state) {
  const std::lock_guard lock(mutex_);
  auto& word = header().words[lease.block];
  // Only the owner writes the word of a block that is being filled, and with the mutex.
  if (word.load(std::memory_order_relaxed) != word_of(lease.number, BlockState::filling)) {
    return;
  }
  if (holders_[lease.block] == kNobody || state == BlockState::free) {
    holders_[lease.block] = kNobody;
    state = BlockState::free;
  }
  PHALANX_STEP("lease: publish the end of the copy");
  // Publishes the data. Pairs with the loads in take; seq_cst rather than release, for the sake of
  // notify.
  word.store(word_of(lease.number, state), std::memory_order_seq_cst);
  notify(header().copy_event);
}

// With the mutex held.
void LeaseSegment::release(std::uint32_t block, std::uint64_t word) {
  holders_[block] = kNobody;
  if (state_of(word) == BlockState::leased || state_of(word) == BlockState::unwritten) {
    PHALANX_STEP("lease: take back");
    // The holder reads no more. If it returns the block at this moment, it stores the same.
    header().words[block].store(word_of(lease_of(word), BlockState::free),
                                std::memory_order_relaxed);
  }
}

void LeaseSegment::take_back(std::uint32_t block, std::optional<std::int64_t> holder) {
  const std::lock_guard lock(mutex_);
  if (block < holders_.size() && (!holder || holders_[block] == *holder)) {
    release(block, header().words[block].load(std::memory_order_relaxed));
  }
}

void LeaseSegment::take_back_all(std::int64_t holder) {
  const std::lock_guard lock(mutex_);
  for (std::uint32_t block = 0; block < holders_.size(); ++block) {
    if (holders_[block] == holder) {
      release(block, header().words[block].load(std::memory_order_relaxed));
    }
  }
}

std::size_t LeaseSegment::leased() const {
  const std::lock_guard lock(mutex_);
  std::size_t count = 0;
  for (std::uint32_t block = 0; block < used_; ++block) {
    count += state_of(header().words[block].load(std::memory_order_relaxed)) != BlockState::free;
  }
  return count;
}

std::size_t LeaseSegment::used() const {
  const std::lock_guard lock(mutex_);
  return used_;
}

LeaseSegmentView::LeaseSegmentView(SealedMemory memory, std::byte* base, std::uint64_t number,
                                   std::size_t block_bytes, std::uint32_t blocks)
    : memory_(std::move(memory)),
      base_(base),
      number_(number),
      block_bytes_(block_bytes),
      blocks_(blocks),
      pid_(getpid()) {}

std::shared_ptr<LeaseSegmentView> LeaseSegmentView::open(int pid, int descriptor,
                                                         std::uint64_t nonce, Status& status) {
  auto memory = SealedMemory::open(pid, descriptor, status);
  if (memory.base() == nullptr) {
    return nullptr;
  }
  memory.close_descriptor();
  const LeaseHeader& header = *reinterpret_cast<const LeaseHeader*>(memory.base());
  bool good = memory.bytes() >= kPage && header.magic == kLeasesMagic &&
              header.version == kLeasesVersion && header.nonce == nonce;
  const std::uint32_t blocks = good ? header.blocks : 0;
  const std::size_t block_bytes = good ? header.block_bytes : 0;
  good = valid(block_bytes, blocks) && memory.bytes() == bytes_for(block_bytes, blocks);
  if (!good) {
    status = system_error(EPROTO);
    return nullptr;
  }
  const std::uint64_t number = header.number;
  std::byte* base = memory.base();
  return std::shared_ptr<LeaseSegmentView>(
      new LeaseSegmentView(std::move(memory), base, number, block_bytes, blocks));
}

std::shared_ptr<LeaseSegmentView> LeaseSegmentView::share(const LeaseSegment& owner) {
  return std::shared_ptr<LeaseSegmentView>(new LeaseSegmentView(
      {}, owner.memory_.base(), owner.number(), owner.block_bytes(), owner.blocks()));
}

LeaseSegmentView::Block LeaseSegmentView::take(std::uint32_t block, std::size_t bytes) {
  if (block >= blocks_ || bytes == 0 || bytes > block_bytes_) {
    return {};
  }
  PHALANX_STEP("take: check the block");
  // Pairs with the store in finish: the data are there.
  const std::uint64_t word = header().words[block].load(std::memory_order_acquire);
  if (state_of(word) == BlockState::unwritten) {
    give_back(block, word);
  }
  return {.state = state_of(word), .word = word, .data = base_ + kPage + block * block_bytes_};
}

void LeaseSegmentView::wait_for_copy(std::uint32_t block, Clock::time_point deadline) {
  const auto ready = [&] {
    PHALANX_STEP("take: check for the end of the copy");
    // Pairs with the store in finish; seq_cst for the sake of the event.
    const std::uint64_t word = header().words[block].load(std::memory_order_seq_cst);
    return state_of(word) != BlockState::filling;
  };
  SpinPolicy spin_policy(2);
  // The caller sees in the word whether it was in time.
  (void)wait_until(header().copy_event, spin_policy, Bounds{}.within(deadline - Clock::now()),
                   ready, [] { return Status{}; });
}

void LeaseSegmentView::give_back(std::uint32_t block, std::uint64_t word) {
  if (getpid() != pid_) {
    return;
  }
  const std::uint64_t freed = word_of(lease_of(word), BlockState::free);
  PHALANX_STEP("give back: end the lease");
  // Pairs with the load in LeaseSegment::lease: all reads of the data come before. If it fails, the
  // owner has taken the block back.
  header().words[block].compare_exchange_strong(word, freed, std::memory_order_release,
                                                std::memory_order_relaxed);
}

}  // namespace phalanx
