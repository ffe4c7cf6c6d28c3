// One send or recv, and the books of those that haven't met their counterpart yet.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "phalanx/flight_recorder.h"
#include "phalanx/segment.h"
#include "phalanx/status.h"
#include "phalanx/wait.h"

namespace phalanx {

inline constexpr int kAnySource = -1;

// What stands before every message in a channel.
struct Envelope {
  std::uint64_t count;
  std::uint64_t bytes;
  std::int32_t tag;
  DType dtype;
  std::uint8_t reserved[43];
};
static_assert(sizeof(Envelope) == kCacheLine);

// Shared by its caller and, until it is done, by the mailbox. Fields are guarded by the mailbox's
// mutex until done() is true.
class Message {
 public:
  Message(Kind kind, std::byte* data, std::size_t count, DType dtype, int peer, std::int32_t tag)
      : kind_(kind), data_(data), count_(count), dtype_(dtype), peer_(peer), tag_(tag) {}

  std::uint64_t id() const { return id_; }
  // Pairs with the store in Mailbox::finish.
  bool done() const { return done_.load(std::memory_order_acquire); }
  // When done: ok, or why it failed; the rank that it came from or went to.
  const Status& status() const { return status_; }
  int peer() const { return peer_; }

 private:
  friend class Mailbox;
  friend class Matching;

  // A message has no place in the sequence of collectives: the field tells the tag.
  Fingerprint fingerprint() const {
    return {.sequence = static_cast<std::uint64_t>(tag_),
            .count = count_,
            .root = peer_,
            .kind = kind_,
            .dtype = dtype_};
  }
  std::size_t bytes() const { return count_ * size_of(dtype_); }

  std::uint64_t id_ = 0;  // grows in the order of the posts
  Kind kind_;
  std::byte* data_;  // of a send: only read
  std::size_t count_;
  DType dtype_;
  int peer_;
  std::int32_t tag_;
  std::int16_t global_rank_ = -1;  // of a rank of another host, which it is from or for
  std::size_t moved_ = 0;  // of a send: bytes of envelope, payload and padding in the channel
  bool watched_ = false;
  Clock::time_point deadline_ = Clock::time_point::max();  // when watched
  Status status_;
  // What the flight recorder says of it, and where.
  Record record_;
  int slot_ = -1;
  std::uint64_t wait_began_ = 0;    // nanoseconds; 0: nobody waits for it
  std::atomic<bool> done_ = false;  // writer: who drives the mailbox; pairs with done()
};

using MessagePtr = std::shared_ptr<Message>;

// A message in private memory, because another one of its channel was asked for first.
struct UnexpectedMessage {
  Envelope envelope{};
  std::unique_ptr<std::byte[]> data;
};

// Recvs that wait for their message, and messages that wait for their recv: first come, first
// served among those of one source and tag. A look-up costs the same however many there are; one
// for messages of any source costs that for every rank.
class Matching {
 public:
  explicit Matching(int ranks) : recv_counts_(static_cast<std::size_t>(ranks)) {}

  void post_recv(MessagePtr recv);
  // The oldest recv that a message of `source` is for, taken out; null where there is none.
  MessagePtr match(int source, std::int32_t tag);
  // Whether a message of `source` may be for some recv.
  bool has_recv_for(int source) const { return has_recv_from(source) || any_source_recvs_ != 0; }
  // Whether some recv names just this source, which may be kAnySource.
  bool has_recv_from(int source) const {
    return source == kAnySource ? any_source_recvs_ != 0
                                : recv_counts_[static_cast<std::size_t>(source)] != 0;
  }
  // One of those. Looks through all of them.
  MessagePtr any_recv_from(int source) const;
  // Takes out one that is still there; null if it isn't.
  MessagePtr withdraw(const Message& recv);
  // Takes out all recvs.
  std::vector<MessagePtr> take_all_receives();

  void add_unexpected(int source, UnexpectedMessage unexpected);
  // The oldest message for a recv, whose source may be kAnySource, and where it came from.
  const UnexpectedMessage* find_unexpected(const Message& recv, int* source) const;
  void drop_unexpected(int source, std::int32_t tag);
  // Payload of the messages kept.
  std::size_t unexpected_bytes() const { return unexpected_bytes_; }

 private:
  using Key = std::uint64_t;
  static Key key(int source, std::int32_t tag) {
    return static_cast<Key>(static_cast<std::uint32_t>(source)) << 32 |
           static_cast<std::uint32_t>(tag);
  }
  std::size_t& recv_count(int source) {
    return source == kAnySource ? any_source_recvs_
                                : recv_counts_[static_cast<std::size_t>(source)];
  }

  // No queue in them is empty.
  std::unordered_map<Key, std::list<MessagePtr>> recvs_;
  std::unordered_map<Key, std::list<UnexpectedMessage>> unexpected_;
  std::vector<std::size_t> recv_counts_;  // by source: how many recvs wait for it by name
  std::size_t any_source_recvs_ = 0;
  std::size_t unexpected_bytes_ = 0;
};

}  // namespace phalanx
