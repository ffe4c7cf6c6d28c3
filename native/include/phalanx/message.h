// A send or recv, and the matching of posted recvs with unexpected messages.
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

#include "phalanx/channel.h"
#include "phalanx/flight_recorder.h"
#include "phalanx/segment.h"
#include "phalanx/status.h"
#include "phalanx/wait.h"

namespace phalanx {

inline constexpr int kAnySource = -1;

// Shared by its caller and, until it is done, by the mailbox. The mailbox's mutex guards the fields
// until done() is true.
class Message {
 public:
  Message(Kind kind, std::byte* data, std::size_t count, DType dtype, int peer, std::int32_t tag)
      : kind_(kind), data_(data), count_(count), dtype_(dtype), peer_(peer), tag_(tag) {}

  std::uint64_t id() const { return id_; }
  // Pairs with the store in Mailbox::finish.
  bool done() const { return done_.load(std::memory_order_acquire); }
  // Once done: ok, or the reason of the failure; and the rank that it came from or went to.
  const Status& status() const { return failure_.status; }
  const Failure& failure() const { return failure_; }
  int peer() const { return peer_; }

 private:
  friend class Mailbox;
  friend class Matching;

  Fingerprint fingerprint() const { return envelope().fingerprint(kind_, peer_); }
  Envelope envelope() const { return {.count = count_, .tag = tag_, .dtype = dtype_}; }
  std::size_t bytes() const { return count_ * size_of(dtype_); }

  std::uint64_t id_ = 0;  // in the order of posting
  Kind kind_;
  std::byte* data_;  // only read for a send
  std::size_t count_;
  DType dtype_;
  int peer_;
  std::int32_t tag_;
  std::int16_t global_rank_ = -1;  // of the peer, if it is on another host
  bool begun_ = false;             // for a send: whether the channel has its envelope
  std::size_t moved_ = 0;          // for a send: bytes of payload in the channel
  bool watched_ = false;
  bool awaited_ = false;     // whether a thread waits, or has waited, for it
  bool unanswered_ = false;  // a recv that ended alone; written before done_
  Clock::time_point deadline_ = Clock::time_point::max();  // when watched
  Failure failure_ = Status{};
  // The record in the flight recorder, and its slot.
  Record record_;
  int slot_ = -1;
  std::uint64_t wait_began_ = 0;    // nanoseconds; 0: no thread waits for it
  std::atomic<bool> done_ = false;  // writer: the thread that makes progress; pairs with done()
};

using MessagePtr = std::shared_ptr<Message>;

// A message in private memory, because a later one of its channel was requested first.
struct UnexpectedMessage {
  Envelope envelope{};
  std::unique_ptr<std::byte[]> data;
};

// Posted recvs and unexpected messages, in FIFO order for each source and tag. A look-up takes
// constant time; one for messages of any source takes that for every rank.
class Matching {
 public:
  explicit Matching(int ranks) : recv_counts_(static_cast<std::size_t>(ranks)) {}

  void post_recv(MessagePtr recv);
  // Removes and returns the oldest recv that matches a message of `source`; null if there is none.
  MessagePtr match(int source, std::int32_t tag);
  // Whether a recv may match a message of `source`.
  bool has_recv_for(int source) const { return has_recv_from(source) || any_source_recvs_ != 0; }
  // Whether a recv names exactly this source, which may be kAnySource.
  bool has_recv_from(int source) const {
    return source == kAnySource ? any_source_recvs_ != 0
                                : recv_counts_[static_cast<std::size_t>(source)] != 0;
  }
  // Returns one of those. Searches all of them.
  MessagePtr any_recv_from(int source) const;
  // Removes a recv that is still posted; null if it is not.
  MessagePtr withdraw(const Message& recv);
  // Removes the recvs from a source for which nobody waits. Searches all of them.
  std::vector<MessagePtr> take_unawaited_recvs(int source);
  // Removes all recvs.
  std::vector<MessagePtr> take_all_receives();

  void add_unexpected(int source, UnexpectedMessage unexpected);
  // The oldest message that matches a recv, whose source may be kAnySource, and its source.
  const UnexpectedMessage* find_unexpected(const Message& recv, int* source) const;
  void drop_unexpected(int source, std::int32_t tag);
  bool has_unexpected() const { return !unexpected_.empty(); }
  // The payload bytes of the unexpected messages.
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

  // The maps contain no empty queue.
  std::unordered_map<Key, std::list<MessagePtr>> recvs_;
  std::unordered_map<Key, std::list<UnexpectedMessage>> unexpected_;
  std::vector<std::size_t> recv_counts_;  // by source: number of recvs that name it
  std::size_t any_source_recvs_ = 0;
  std::size_t unexpected_bytes_ = 0;
};

}  // namespace phalanx
