// The shared memory of a group on a host.
//
// One rank creates it. The others open it, and check magic, layout version, size and nonce.
//
// Layout, each part on a page boundary:
//   Header | RankControl x ranks | small rings: ranks | large rings: ranks
//   | exchange buffers: 2, if there are two ranks | Channel x ranks^2
//   | AgreementRound x 2 (ranks + 1)
// The creator allocates the first two parts and the beginning of the exchange buffers at once, and
// each rank its own small ring, which is on its NUMA node then: some 33 KiB per rank, since
// entering a small collective must not fail for lack of memory. The others are allocated when first
// used.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "phalanx/fingerprint.h"
#include "phalanx/sealed_memory.h"
#include "phalanx/status.h"

namespace phalanx {

inline constexpr std::uint64_t kMagic = 0x584e414c41485001;  // "\1PHALANX"
inline constexpr std::uint32_t kLayoutVersion = 5;
inline constexpr std::size_t kCacheLine = 64;
inline constexpr int kMaxRanks = 512;

constexpr std::size_t whole_lines(std::size_t bytes) {
  return (bytes + kCacheLine - 1) / kCacheLine * kCacheLine;
}

// The entries of a rank that its peers may still read: it may be ahead of them by three.
inline constexpr std::uint64_t kEntries = 4;
// Data up to this size are a part of the entry itself.
inline constexpr std::size_t kEntryPayload = 24;
// Up to this size every rank reads the data of all others. Larger data are combined in slices.
inline constexpr std::size_t kSmallBytes = 16 * 1024;
// The unit of transfer: small enough for the caches of a core. If there are more ranks than cores,
// waiting for a peer takes time slices rather than nanoseconds, and fewer, larger chunks cost less.
inline constexpr std::size_t kChunkBytes = 256 * 1024;
inline constexpr std::size_t kOversubscribedChunkBytes = 1024 * 1024;
// A rank stages data in two rings, from which each collective takes one piece. The first is for
// pieces of up to kSmallPiece bytes, so that a group of small operations needs little memory.
inline constexpr std::size_t kSmallPiece = 4 * 1024;
inline constexpr std::size_t kSmallRing = 8 * kSmallPiece;
inline constexpr std::size_t kLargeRing = 2 * kOversubscribedChunkBytes;
// The two buffers of a group of two ranks; see Collective::exchange_buffer.
inline constexpr std::size_t kExchangeBytes = kOversubscribedChunkBytes / 2;
// The part of each that is allocated at once.
inline constexpr std::size_t kExchangeReady = kSmallBytes;
// The capacity of a channel, for messages on their way from one rank to another: their number, and
// the bytes of those that do not fit into their slots.
inline constexpr std::uint64_t kSlots = 1024;
inline constexpr std::size_t kSlotPayload = 32;
inline constexpr std::size_t kRingBytes = 256 * 1024;

// An event on which ranks sleep; see wait.h.
struct alignas(kCacheLine) Event {
  // Writers: ranks that go to sleep here, and wake up; and the owner, which keeps a lock in it.
  std::atomic<std::uint32_t> sleepers;
  std::atomic<std::uint32_t> ticket;  // writers: ranks that wake others
  // The time of the last wake-up, in nanoseconds of the monotonic clock; writers: the same.
  std::atomic<std::uint64_t> woken_at;
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

// failing: an uncaught exception ends the process, which takes no further part. leaving: the rank
// posts no more operations, and takes part until those that it has posted have ended.
enum class Presence : std::uint32_t { absent = 0, joined = 1, left = 2, failing = 3, leaving = 4 };

// The entry of a rank into a collective, in one cache line; writer: the rank. A peer that awaits it
// reads the rest once it finds the number. A rank writes the next entry to this place only when all
// peers have entered the collective after this one. Peers that look at an older entry meanwhile
// check the number before and after; it is 0 while the rest is being written.
struct alignas(kCacheLine) Entry {
  std::atomic<std::uint64_t> number;   // counts the rank's entries, from 1
  SharedFingerprint fingerprint;       // of the collective
  std::atomic<std::uint64_t> history;  // a hash of all fingerprints up to this one
  std::uint64_t data;                  // the place of the rank's data; see Collective
  std::byte payload[kEntryPayload];
};
static_assert(sizeof(Entry) == kCacheLine);

struct RankControl {
  Entry entries[kEntries];  // by number
  // The rank's progress; writer: the rank.
  alignas(kCacheLine) std::atomic<std::uint64_t> step;
  std::atomic<std::uint64_t> entered;  // the number of its last entry
  // Notified when an entry is published or `step` advances.
  Event step_event;
  // Notified when messages, or space to send them, arrive for the owner.
  Event message_event;
  // The last line; writer: the owner.
  alignas(kCacheLine) std::atomic<std::int32_t> pid;
  std::atomic<Presence> presence;
  SharedFingerprint failure_fingerprints[2];  // both operations, when the owner breaks the group
  std::atomic<std::int32_t>
      recorder_descriptor;  // the owner's descriptor of its flight recorder; -1: none
  // The processor on which the owner began its last longer wait, from 1; 0: unknown. Writers:
  // threads of the owner.
  std::atomic<std::int32_t> processor;
};
static_assert(sizeof(RankControl) == 8 * kCacheLine);
static_assert(offsetof(RankControl, step) == 4 * kCacheLine);
static_assert(offsetof(RankControl, step_event) == 5 * kCacheLine);
static_assert(offsetof(RankControl, message_event) == 6 * kCacheLine);
static_assert(offsetof(RankControl, pid) == 7 * kCacheLine);

// A message in a channel; writer: the sender.
struct alignas(kCacheLine) Slot {
  std::atomic<std::uint64_t> number;  // of the message, from 1; written last
  std::uint64_t count;                // elements
  std::int32_t tag;
  std::uint32_t ready;  // bytes of payload that were in the ring when the slot was published
  DType dtype;
  std::byte payload[kSlotPayload];  // of a message that fits
};
static_assert(sizeof(Slot) == kCacheLine);

// Messages from one rank to another; see channel.h.
struct Channel {
  alignas(kCacheLine) std::atomic<std::uint64_t> head;  // writer: the sender; bytes written
  alignas(kCacheLine) std::atomic<std::uint64_t> tail;  // writer: the receiver; bytes read
  std::atomic<std::uint64_t> taken;                     // writer: the receiver; messages
  alignas(kPage) Slot slots[kSlots];                    // by number
  alignas(kPage) std::byte ring[kRingBytes];            // writer: the sender
};
static_assert(offsetof(Channel, tail) == kCacheLine);
static_assert(offsetof(Channel, slots) == kPage);
static_assert(offsetof(Channel, ring) == kPage + kSlots * sizeof(Slot));
static_assert((kRingBytes & (kRingBytes - 1)) == 0);

// The decision on a rank in a round of an agreement; see agreement.h.
enum class Decision : std::uint8_t { none = 0, joined = 1, stranded = 2, excluded = 3 };

// A round of the agreement on the ranks that go on after a failure; see agreement.h. It begins with
// this line; the decisions on the ranks, a byte each, follow.
struct alignas(kCacheLine) AgreementRound {
  // The location of the segment that the members of the round enter. Writer: the lowest of them.
  std::atomic<std::uint32_t> is_published;  // written last
  std::int32_t pid;
  std::int32_t descriptor;
  std::uint64_t nonce;
};
static_assert(sizeof(AgreementRound) == kCacheLine);
static_assert(offsetof(AgreementRound, nonce) == 16);
static_assert(sizeof(std::atomic<Decision>) == 1);

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
  // The size of a round of an agreement.
  static constexpr std::size_t round_bytes(std::size_t ranks) {
    return sizeof(AgreementRound) + whole_lines(ranks);
  }
  // The chunk size for this number of ranks, given the cores that this process may use.
  static std::size_t fitting_chunk(int ranks);

  // Allocates the small ring of `rank`, on the NUMA node of the calling thread.
  Status allocate(int rank) const { return prefault(small_ring(rank), kSmallRing); }

  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  int ranks() const { return static_cast<int>(header().ranks); }
  // The chunk size of this group, chosen by its creator and the same on all ranks.
  std::size_t chunk_bytes() const { return header().chunk_bytes; }
  // The creator's descriptor, for peers to open; -1 elsewhere and after close_descriptor().
  int descriptor() const { return memory_.descriptor(); }
  void close_descriptor() { memory_.close_descriptor(); }

  Header& header() const { return *reinterpret_cast<Header*>(base_); }
  RankControl& control(int rank) const { return controls_[rank]; }
  // A rank's rings, for pieces of up to kSmallPiece bytes and for larger ones. Only the first
  // large_ring_bytes() of the second are used.
  std::byte* small_ring(int rank) const {
    return small_rings_ + static_cast<std::size_t>(rank) * kSmallRing;
  }
  std::byte* large_ring(int rank) const {
    return large_rings_ + static_cast<std::size_t>(rank) * kLargeRing;
  }
  std::size_t large_ring_bytes() const { return std::min(4 * chunk_bytes(), kLargeRing); }
  // One of the two exchange buffers of a group of two ranks.
  std::byte* exchange_buffer(std::uint64_t index) const {
    return exchange_ + (index & 1) * kExchangeBytes;
  }
  Channel& channel(int source, int destination) const;
  // The number of rounds that an agreement may have: a rank that dies ends at most two of them.
  int agreement_rounds() const { return 2 * ranks() + 2; }
  AgreementRound& agreement_round(int round) const {
    return *reinterpret_cast<AgreementRound*>(agreement_ + static_cast<std::size_t>(round) *
                                                               round_bytes(header().ranks));
  }
  // Writers: the rank itself and those that exclude it (compare-and-swap from none).
  std::atomic<Decision>& decision(int round, int rank) const {
    auto* first = reinterpret_cast<std::atomic<Decision>*>(&agreement_round(round) + 1);
    return first[rank];
  }
  // Allocates the pages of a round and of the next one, where ranks look before they decide. They
  // are not needed before an agreement.
  Status allocate_round(int round) const {
    const int rounds = std::min(2, agreement_rounds() - round);
    return prefault(&agreement_round(round),
                    static_cast<std::size_t>(rounds) * round_bytes(header().ranks));
  }

 private:
  // `memory` is empty in a view of another object's.
  Segment(SealedMemory memory, std::byte* base, int ranks);

  SealedMemory memory_;
  std::byte* base_;
  RankControl* controls_;
  std::byte* small_rings_;
  std::byte* large_rings_;
  std::byte* exchange_;
  Channel* channels_;
  std::byte* agreement_;
};

}  // namespace phalanx
