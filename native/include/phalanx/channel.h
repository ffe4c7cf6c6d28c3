// The two ends of a channel, which carries messages from one rank to another in the order in which
// they were sent.
//
// Every message has a slot: one cache line with its envelope, and with its payload if that is
// small. Other payloads go through a ring of bytes, in pieces. The sender publishes a slot by its
// number, and bytes by `head`; the receiver returns slots by `taken`, and bytes by `tail`. Neither
// end wakes the other: that is for its caller, after a call that has changed something. Except for
// has_message, an end is used by one thread at a time.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "phalanx/segment.h"

namespace phalanx {

// The description of a message.
struct Envelope {
  std::uint64_t count = 0;
  std::int32_t tag = 0;
  DType dtype = DType::uint8;

  std::size_t bytes() const { return count * size_of(dtype); }
  // A message has no number in the sequence of collectives: the field holds the tag.
  Fingerprint fingerprint(Kind kind, int peer) const {
    return {.sequence = static_cast<std::uint64_t>(tag),
            .count = count,
            .root = peer,
            .kind = kind,
            .dtype = dtype};
  }
  friend bool operator==(const Envelope&, const Envelope&) = default;
};

class ChannelSender {
 public:
  explicit ChannelSender(Channel& channel) : channel_(channel) {}

  // Publishes a message, if a slot is free, with as much of its payload as fits into the slot or
  // into a piece of the ring. Returns whether it did; `moved`: the bytes of payload.
  bool begin(const Envelope& envelope, const std::byte* payload, std::size_t& moved);
  // Whether a message of this size can be published at once and whole.
  bool has_room(std::size_t bytes);
  // Publishes the next piece of a payload of which `left` bytes are left. Returns its bytes; 0 if
  // there is no room.
  std::size_t write(const std::byte* from, std::size_t left);

 private:
  bool has_slot();
  std::size_t room(std::size_t wanted);
  std::size_t write_piece(const std::byte* from, std::size_t left);

  Channel& channel_;
  std::uint64_t sent_ = 0;   // messages
  std::uint64_t taken_ = 0;  // of these, as far as known
  std::uint64_t head_ = 0;   // bytes in the ring
  std::uint64_t tail_ = 0;   // as far as known
};

class ChannelReceiver {
 public:
  explicit ChannelReceiver(Channel& channel) : channel_(channel) {}

  // Whether the next message has been published. Callable from any thread.
  bool has_message() const;
  // The next message, which has been published; and whether all of its payload has arrived.
  Envelope next() const;
  bool is_complete() const;
  // Begins the next message. Its payload is in `to` if it fits into a slot, where `to` has room for
  // any such payload.
  Envelope begin(std::byte* to);
  // Reads the next piece of a payload of which `left` bytes are missing. Returns its bytes; 0 if
  // none have arrived. `whole`: the size of the payload.
  std::size_t read(std::byte* to, std::size_t left, std::size_t whole);

 private:
  const Slot& slot() const {
    return channel_.slots[taken_.load(std::memory_order_relaxed) % kSlots];
  }

  Channel& channel_;
  std::atomic<std::uint64_t> taken_ = 0;  // messages; writer: the thread that receives
  std::uint64_t head_ = 0;                // bytes in the ring, as far as known
  std::uint64_t tail_ = 0;
};

}  // namespace phalanx
