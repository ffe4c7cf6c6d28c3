// The shared memory of a group on a host.
//
// One rank creates it. The others open it, and check magic, layout version, size and nonce.
//
// Layout, each part on a page boundary:
//   Header | RankControl x ranks | inline buffers: 2 x ranks | staging: ranks | Channel x ranks^2
// The creator allocates the pages up to the staging areas at once, some 33 KiB per rank, since
// entering a collective must not fail for lack of memory. The others are allocated when first used.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "phalanx/fingerprint.h"
#include "phalanx/sealed_memory.h"
#include "phalanx/status.h"

namespace phalanx {

inline constexpr std::uint64_t kMagic = 0x584e414c41485001;  // "\1PHALANX"
inline constexpr std::uint32_t kLayoutVersion = 2;
inline constexpr std::size_t kCacheLine = 64;
inline constexpr int kMaxRanks = 512;

// Payloads up to this size are published beside the fingerprint, with one synchronisation.
inline constexpr std::size_t kInlineBytes = 16 * 1024;
// The unit of transfer: small enough for the caches of a core. If there are more ranks than cores,
// waiting for a peer takes time slices rather than nanoseconds, and fewer, larger chunks cost less.
inline constexpr std::size_t kChunkBytes = 256 * 1024;
inline constexpr std::size_t kOversubscribedChunkBytes = 1024 * 1024;
// A rank's staging area holds two chunks, so that one is filled while the other is read.
inline constexpr std::size_t kStagingBytes = 2 * kOversubscribedChunkBytes;
// The capacity of a channel, for messages on their way from one rank to another.
inline constexpr std::size_t kRingBytes = 256 * 1024;

// An event on which ranks sleep; see wait.h.
struct alignas(kCacheLine) Event {
  std::atomic<std::uint32_t> sleepers;  // writers: ranks that go to sleep here, and wake up
  std::atomic<std::uint32_t> ticket;    // writers: ranks that wake others
};

struct Header {
  // Written by the creator before the segment's address is published, constant from then on.
  std::uint64_t magic;
  std::uint32_t layout_version;
  std::uint32_t ranks;
  std::uint64_t nonce;
  std::uint64_t bytes;
  std::uint64_t chunk_bytes;
  // Writer: the first rank that fails (compare-and-swap from 0); see Group::abort.
  alignas(kCacheLine) std::atomic<std::uint64_t> abort_word;
};
static_assert(sizeof(Header) == 2 * kCacheLine);
static_assert(offsetof(Header, abort_word) == kCacheLine);

// failing: an uncaught exception ends the process, which takes no further part.
enum class Presence : std::uint32_t { absent = 0, joined = 1, left = 2, failing = 3 };

struct RankControl {
  // Line 1, writer: the owner. Read by all peers in every collective.
  alignas(kCacheLine) std::atomic<std::uint64_t> step;
  SharedFingerprint fingerprints[2];  // of the operation with sequence & 1
  // Line 2: notified when `step` advances.
  Event step_event;
  // Line 3: notified when messages, or space to send them, arrive for the owner.
  Event message_event;
  // Line 4, writer: the owner.
  alignas(kCacheLine) std::atomic<std::int32_t> pid;
  std::atomic<Presence> presence;
  SharedFingerprint failure_fingerprints[2];  // both operations, when the owner breaks the group
  std::atomic<std::int32_t>
      recorder_descriptor;  // the owner's descriptor of its flight recorder; -1: none
  std::int32_t reserved;
};
static_assert(sizeof(RankControl) == 4 * kCacheLine);
static_assert(offsetof(RankControl, step_event) == 1 * kCacheLine);
static_assert(offsetof(RankControl, message_event) == 2 * kCacheLine);
static_assert(offsetof(RankControl, pid) == 3 * kCacheLine);

// Messages from one rank to another: a ring buffer; positions count all bytes ever written.
struct Channel {
  alignas(kCacheLine) std::atomic<std::uint64_t> head;  // writer: the sender; bytes written
  alignas(kCacheLine) std::atomic<std::uint64_t> tail;  // writer: the receiver; bytes read
  alignas(kPage) std::byte ring[kRingBytes];            // writer: the sender
};
static_assert(offsetof(Channel, tail) == kCacheLine);
static_assert(offsetof(Channel, ring) == kPage);
static_assert((kRingBytes & (kRingBytes - 1)) == 0);

class Segment {
 public:
  // Each returns null and fills `status` if it fails (system, with errno; EPROTO: not a segment of
  // this layout version, size or nonce; EINVAL: `ranks` is not from 1 to kMaxRanks).
  static std::unique_ptr<Segment> create(int ranks, std::uint64_t nonce, Status& status) {
    return create(ranks, nonce, fitting_chunk(ranks), status);
  }
  // `chunk_bytes`: whole cache lines, at most kOversubscribedChunkBytes.
  static std::unique_ptr<Segment> create(int ranks, std::uint64_t nonce, std::size_t chunk_bytes,
                                         Status& status);
  static std::unique_ptr<Segment> open(int pid, int fd, int ranks, std::uint64_t nonce,
                                       Status& status);
  // A view of the memory that `owner` keeps mapped, for ranks that are threads of one process. A
  // sanitizer identifies memory by address, so it cannot see a race between two mappings of one
  // page.
  static std::unique_ptr<Segment> share(const Segment& owner);

  static std::size_t bytes_for(int ranks);
  // The chunk size for this number of ranks, given the cores that this process may use.
  static std::size_t fitting_chunk(int ranks);

  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  int ranks() const { return static_cast<int>(header().ranks); }
  // The chunk size of this group, chosen by its creator and the same on all ranks.
  std::size_t chunk_bytes() const { return header().chunk_bytes; }
  // The creator's descriptor, for peers to open; -1 elsewhere and after close_descriptor().
  int descriptor() const { return memory_.descriptor(); }
  void close_descriptor() { memory_.close_descriptor(); }

  Header& header() const { return *reinterpret_cast<Header*>(base_); }
  RankControl& control(int rank) const;
  std::byte* inline_buffer(int rank, std::uint64_t sequence) const;
  std::byte* staging(int rank, std::uint64_t chunk) const;
  Channel& channel(int source, int destination) const;

 private:
  explicit Segment(SealedMemory memory) : memory_(std::move(memory)), base_(memory_.base()) {}
  explicit Segment(std::byte* base) : base_(base) {}

  SealedMemory memory_;  // none in a view of another object's
  std::byte* base_;
};

}  // namespace phalanx
