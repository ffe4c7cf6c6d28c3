// Blocks of shared memory that a process leases to others on its host, for data that it sends.
//
// The owner makes segments of blocks; the blocks of a segment have one size. It leases a block to
// one process, the holder, copies data into it, and sends the holder the number of the block. The
// holder maps the segment and reads the data in place. When it needs them no more it returns the
// block, and the owner may lease it again: its pages are allocated already, and often still in the
// cache. The owner takes back the blocks of a holder that has died.
//
// Layout: Header, with a word for each block, in the first page | blocks
//
// The word of a block holds the number of its lease and its state:
//   free -> filling                   owner: leases the block, and begins to copy
//   filling -> leased                 owner: the copy is complete
//   filling -> unwritten              owner: there will be no copy, but the holder may be waiting
//   filling -> free                   owner: the holder is dead, or cannot know of the lease
//   leased or unwritten -> free       holder: returns the block; or the owner takes it back
// The owner may send the number of a block in any state but free. So a large copy and the delivery
// of the message overlap, and the holder waits for the end of the copy.
//
// The holder returns a block by a compare-and-swap from its own lease. So it changes nothing if the
// owner has taken the block back and leased it to another process meanwhile.
//
// Data are written after the owner has read `free` (acquire), and before it stores `leased`
// (release); they are read after the holder has read `leased` (acquire), and before it stores
// `free` (release). A process that dies at any time leaves its last store, and the owner, or the
// holder, finds out by other means.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "phalanx/sealed_memory.h"
#include "phalanx/segment.h"
#include "phalanx/status.h"
#include "phalanx/wait.h"

namespace phalanx {

inline constexpr std::uint64_t kLeasesMagic = 0x5341454c58485003;  // "\3PHXLEAS"
inline constexpr std::uint32_t kLeasesVersion = 1;
inline constexpr std::uint32_t kMaxBlocks = 256;
inline constexpr std::size_t kMaxBlockBytes = std::size_t{1} << 54;

enum class BlockState : std::uint8_t { free = 0, filling = 1, leased = 2, unwritten = 3 };

struct LeaseHeader {
  // Written by the owner before the segment's address is published, constant from then on.
  std::uint64_t magic;
  std::uint32_t version;
  std::uint32_t blocks;
  std::uint64_t nonce;
  std::uint64_t number;  // of the segment, among all that its owner has ever had
  std::uint64_t block_bytes;
  // Notified by the owner when a copy ends.
  Event copy_event;
  // The number of the last lease * 4 + the state. Writers: the owner, and the holder of a block
  // that is leased or unwritten.
  alignas(kCacheLine) std::atomic<std::uint64_t> words[kMaxBlocks];
};
static_assert(offsetof(LeaseHeader, copy_event) == kCacheLine);
static_assert(offsetof(LeaseHeader, words) == 2 * kCacheLine);
static_assert(sizeof(LeaseHeader) == 2 * kCacheLine + kMaxBlocks * 8);
static_assert(sizeof(LeaseHeader) <= kPage, "a changed layout needs a new kLeasesVersion");

// The owner's side of a segment. All calls are thread-safe.
class LeaseSegment {
 public:
  // Null with `system` and errno; EINVAL: no valid number or size of blocks.
  static std::unique_ptr<LeaseSegment> create(std::uint64_t number, std::size_t block_bytes,
                                              std::uint32_t blocks, std::uint64_t nonce,
                                              Status& status);

  struct Lease {
    std::uint32_t block = 0;
    std::uint64_t number = 0;
  };
  // Leases the lowest free block, the likeliest to be in the cache. Its state is filling: `finish`
  // must follow. None if no block is free.
  std::optional<Lease> lease(std::int64_t holder);
  std::byte* data(std::uint32_t block) const;
  // Ends the copy into a block. `state`: leased, unwritten, or free if the holder cannot know of
  // the block. If the block was taken back meanwhile it becomes free. Does nothing if the copy was
  // finished before, even if the block has been leased again since.
  void finish(const Lease& lease, BlockState state);
  // Takes back a block; if a copy into it is under way, it becomes free at the end of that.
  // `holder`: only if it holds the block.
  void take_back(std::uint32_t block, std::optional<std::int64_t> holder);
  // Takes back all blocks of a holder that reads no more of them.
  void take_back_all(std::int64_t holder);

  std::uint64_t number() const { return number_; }
  std::uint32_t blocks() const { return static_cast<std::uint32_t>(holders_.size()); }
  std::size_t block_bytes() const { return block_bytes_; }
  std::size_t bytes() const { return memory_.bytes(); }
  int descriptor() const { return memory_.descriptor(); }
  // No process can open the segment from then on; those that have may keep it.
  void close_descriptor() { memory_.close_descriptor(); }
  // The number of blocks that are not free.
  std::size_t leased() const;
  // The number of blocks that were ever leased, whose pages are thus allocated.
  std::size_t used() const;

 private:
  friend class LeaseSegmentView;

  LeaseSegment(SealedMemory memory, std::uint64_t number, std::size_t block_bytes,
               std::uint32_t blocks);

  LeaseHeader& header() const { return *reinterpret_cast<LeaseHeader*>(memory_.base()); }
  void release(std::uint32_t block, std::uint64_t word);

  SealedMemory memory_;
  // Not read from the header, which other processes can write.
  std::uint64_t number_;
  std::size_t block_bytes_;
  mutable std::mutex mutex_;
  // Guarded by mutex_.
  std::vector<std::int64_t> holders_;  // by block; kNobody: taken back, or free
  std::size_t used_ = 0;
};

// A holder's side: the segment of another process. All calls are thread-safe.
class LeaseSegmentView {
 public:
  // Null with `system` and errno; EPROTO: it is something else, or has another nonce.
  static std::shared_ptr<LeaseSegmentView> open(int pid, int descriptor, std::uint64_t nonce,
                                                Status& status);

  // A view of the memory that `owner` keeps mapped, as Segment::share.
  static std::shared_ptr<LeaseSegmentView> share(const LeaseSegment& owner);

  struct Block {
    BlockState state = BlockState::free;
    std::uint64_t word = 0;  // identifies the lease, for give_back
    std::byte* data = nullptr;
  };
  // Takes a block that was leased to this process. The state is leased: `bytes` of data are there
  // until `give_back`; unwritten: they will never be, and the block was returned; filling: the copy
  // is still under way; free: the owner has leased no block of this number and size.
  Block take(std::uint32_t block, std::size_t bytes);
  // Waits until a block that was filling when it was taken no longer is, or past the deadline.
  void wait_for_copy(std::uint32_t block, Clock::time_point deadline);
  // Returns a block that was taken. Does nothing in a forked child, which must not return blocks of
  // its parent.
  void give_back(std::uint32_t block, std::uint64_t word);

  std::uint64_t number() const { return number_; }

 private:
  LeaseSegmentView(SealedMemory memory, std::byte* base, std::uint64_t number,
                   std::size_t block_bytes, std::uint32_t blocks);

  LeaseHeader& header() const { return *reinterpret_cast<LeaseHeader*>(base_); }

  SealedMemory memory_;  // none in a view of another object's
  std::byte* base_;
  std::uint64_t number_;
  std::size_t block_bytes_;
  std::uint32_t blocks_;
  int pid_;  // of the process that opened it
};

}  // namespace phalanx
