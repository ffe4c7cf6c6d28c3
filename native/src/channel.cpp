#include "phalanx/channel.h"

#include <algorithm>

#include "phalanx/copy.h"

namespace phalanx {
namespace {

// The unit of publication: small enough for the receiver to read while the sender writes on.
constexpr std::size_t kPieceBytes = 16 * 1024;

}  // namespace

bool ChannelSender::has_slot() {
  if (sent_ - taken_ == kSlots) {
    PHALANX_STEP("send: check for a slot");
    // Pairs with the store in ChannelReceiver::begin: the slots have been read.
    taken_ = channel_.taken.load(std::memory_order_seq_cst);
  }
  return sent_ - taken_ != kSlots;
}

// Returns the bytes that can be written now; `wanted` bytes are enough.
std::size_t ChannelSender::room(std::size_t wanted) {
  if (kRingBytes - (head_ - tail_) < wanted) {
    PHALANX_STEP("send: check for space");
    // Pairs with the store in ChannelReceiver::read: the bytes have been read.
    tail_ = channel_.tail.load(std::memory_order_seq_cst);
  }
  return kRingBytes - (head_ - tail_);
}

bool ChannelSender::has_room(std::size_t bytes) {
  return has_slot() && (bytes <= kSlotPayload || (bytes <= kPieceBytes && room(bytes) >= bytes));
}

bool ChannelSender::begin(const Envelope& envelope, const std::byte* payload, std::size_t& moved) {
  if (!has_slot()) {
    return false;
  }
  Slot& slot = channel_.slots[sent_ % kSlots];
  const std::size_t bytes = envelope.bytes();
  slot.count = envelope.count;
  slot.tag = envelope.tag;
  slot.dtype = envelope.dtype;
  if (bytes <= kSlotPayload) {
    copy_bytes(slot.payload, payload, bytes);
    moved = bytes;
  } else {
    moved = write_piece(payload, bytes);
    slot.ready = static_cast<std::uint32_t>(moved);
    channel_.head.store(head_, std::memory_order_relaxed);
  }
  PHALANX_STEP("send: publish the slot");
  // Publishes the slot and the bytes. Pairs with the loads in has_message; seq_cst for the sake of
  // notify_peer.
  slot.number.store(++sent_, std::memory_order_seq_cst);
  return true;
}

std::size_t ChannelSender::write(const std::byte* from, std::size_t left) {
  const std::size_t piece = write_piece(from, left);
  if (piece != 0) {
    PHALANX_STEP("send: publish the head");
    // Publishes the bytes. Pairs with the load in ChannelReceiver::read; seq_cst for the sake of
    // notify_peer.
    channel_.head.store(head_, std::memory_order_seq_cst);
  }
  return piece;
}

// Writes to the ring, and does not publish. The next message begins on a cache line.
std::size_t ChannelSender::write_piece(const std::byte* from, std::size_t left) {
  const std::size_t wanted = std::min(kPieceBytes, left);
  const std::size_t piece = std::min(wanted, room(wanted));
  const std::size_t start = head_ & (kRingBytes - 1);
  const std::size_t first = std::min(piece, kRingBytes - start);
  copy_bytes(channel_.ring + start, from, first);
  copy_bytes(channel_.ring, from + first, piece - first);
  head_ += whole_lines(piece);
  return piece;
}

bool ChannelReceiver::has_message() const {
  const std::uint64_t taken = taken_.load(std::memory_order_relaxed);
  PHALANX_STEP("recv: check for a message");
  // Pairs with the store in ChannelSender::begin.
  return channel_.slots[taken % kSlots].number.load(std::memory_order_seq_cst) == taken + 1;
}

Envelope ChannelReceiver::next() const {
  return {.count = slot().count, .tag = slot().tag, .dtype = slot().dtype};
}

bool ChannelReceiver::is_complete() const {
  const std::size_t bytes = next().bytes();
  return bytes <= kSlotPayload || slot().ready == bytes;
}

Envelope ChannelReceiver::begin(std::byte* to) {
  const Slot& message = slot();
  const Envelope envelope = next();
  if (envelope.bytes() <= kSlotPayload) {
    copy_bytes(to, message.payload, envelope.bytes());
  } else {
    head_ = std::max(head_, tail_ + whole_lines(message.ready));
  }
  const std::uint64_t taken = taken_.load(std::memory_order_relaxed) + 1;
  taken_.store(taken, std::memory_order_relaxed);
  PHALANX_STEP("recv: return the slot");
  // Pairs with the load in ChannelSender::begin; seq_cst for the sake of notify_peer.
  channel_.taken.store(taken, std::memory_order_seq_cst);
  return envelope;
}

std::size_t ChannelReceiver::read(std::byte* to, std::size_t left, std::size_t whole) {
  if (head_ == tail_) {
    PHALANX_STEP("recv: check for bytes");
    // Pairs with the store in ChannelSender::write.
    head_ = channel_.head.load(std::memory_order_seq_cst);
    if (head_ == tail_) {
      return 0;
    }
  }
  const std::size_t piece = std::min({kPieceBytes, left, static_cast<std::size_t>(head_ - tail_)});
  const std::size_t start = tail_ & (kRingBytes - 1);
  const std::size_t first = std::min(piece, kRingBytes - start);
  deliver(to, channel_.ring + start, first, whole);
  deliver(to + first, channel_.ring, piece - first, whole);
  tail_ += whole_lines(piece);
  PHALANX_STEP("recv: return the bytes");
  // Pairs with the load in ChannelSender::write_piece; seq_cst for the sake of notify_peer.
  channel_.tail.store(tail_, std::memory_order_seq_cst);
  return piece;
}

}  // namespace phalanx
