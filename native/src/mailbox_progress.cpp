// The part of the mailbox that moves bytes: through the channels, and to their receivers.
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <utility>

#include "phalanx/hooks.h"
#include "phalanx/mailbox.h"

namespace phalanx {
namespace {

// The unit of publication: small enough for the receiver to read while the sender writes on.
constexpr std::size_t kPieceBytes = 32 * 1024;
// A round of progress ends after so many pieces, so that other threads of this rank get the lock.
constexpr int kPiecesPerRound = 16;

// Messages begin on cache lines, so that an envelope never wraps around the end of the ring.
constexpr std::size_t padded(std::size_t bytes) {
  return (bytes + kCacheLine - 1) / kCacheLine * kCacheLine;
}

// memcpy does not accept the null pointer of an empty tensor.
void copy_bytes(std::byte* to, const std::byte* from, std::size_t bytes) {
  if (bytes != 0) {
    PHALANX_STEP("message: copy");
    std::memcpy(to, from, bytes);
  }
}

// Copy between a buffer and the ring, which wraps around.
void write_ring(Channel& channel, std::uint64_t position, const std::byte* from,
                std::size_t bytes) {
  const std::size_t start = position & (kRingBytes - 1);
  const std::size_t first = std::min(bytes, kRingBytes - start);
  copy_bytes(channel.ring + start, from, first);
  copy_bytes(channel.ring, from + first, bytes - first);
}

void read_ring(const Channel& channel, std::uint64_t position, std::byte* to, std::size_t bytes) {
  const std::size_t start = position & (kRingBytes - 1);
  const std::size_t first = std::min(bytes, kRingBytes - start);
  copy_bytes(to, channel.ring + start, first);
  copy_bytes(to + first, channel.ring, bytes - first);
}

}  // namespace

bool Mailbox::progress_sends(int peer) {
  auto& queue = sends_[static_cast<std::size_t>(peer)];
  Channel& channel = send_channel(peer);
  int pieces = 0;
  for (; pieces < kPiecesPerRound && !queue.empty(); ++pieces) {
    const std::uint64_t head = channel.head.load(std::memory_order_relaxed);
    PHALANX_STEP("send: check for space");
    // Pairs with the store in progress_recvs: overwritten bytes have been read.
    const std::uint64_t tail = channel.tail.load(std::memory_order_seq_cst);
    const std::size_t room = kRingBytes - (head - tail);
    Message& message = *queue.front();
    const std::size_t moved = write_piece(message, channel, head, room);
    if (moved == 0) {
      break;
    }
    message.moved_ += moved;
    PHALANX_STEP("send: publish the head");
    // Publishes the bytes. Pairs with the load in progress_recvs; seq_cst for the sake of notify.
    channel.head.store(head + moved, std::memory_order_seq_cst);
    notify(message_event(peer));
    if (message.moved_ == sizeof(Envelope) + padded(message.bytes())) {
      const MessagePtr done = std::move(queue.front());
      queue.pop_front();
      finish(done, {});
    }
  }
  return pieces != 0;
}

// Writes the next piece after `head`. Returns the number of bytes, padding included: whole lines.
std::size_t Mailbox::write_piece(Message& message, Channel& channel, std::uint64_t head,
                                 std::size_t room) {
  const std::size_t bytes = message.bytes();
  std::size_t moved = 0;
  if (message.moved_ == 0) {
    if (room < sizeof(Envelope)) {
      return 0;
    }
    const Envelope envelope{.count = message.count_,
                            .bytes = bytes,
                            .tag = message.tag_,
                            .dtype = message.dtype_,
                            .reserved = {}};
    write_ring(channel, head, reinterpret_cast<const std::byte*>(&envelope), sizeof envelope);
    moved = sizeof envelope;
  }
  const std::size_t done = message.moved_ + moved - sizeof(Envelope);
  const std::size_t piece = std::min({kPieceBytes, room - moved, padded(bytes) - done});
  if (piece != 0) {
    write_ring(channel, head + moved, message.data_ + done, std::min(piece, bytes - done));
  }
  return moved + piece;
}

bool Mailbox::progress_recvs(int peer) {
  Incoming& incoming = incoming_[static_cast<std::size_t>(peer)];
  Channel& channel = recv_channel(peer);
  int pieces = 0;
  for (; pieces < kPiecesPerRound && (incoming.begun || matching_.has_recv_for(peer)); ++pieces) {
    std::uint64_t tail = channel.tail.load(std::memory_order_relaxed);
    PHALANX_STEP("recv: check for bytes");
    // Pairs with the store in progress_sends.
    const std::uint64_t head = channel.head.load(std::memory_order_seq_cst);
    if (head == tail) {
      break;
    }
    if (!incoming.begun) {
      if (!begin_message(peer, incoming, channel, tail)) {
        fail_all(group_.failure());
        return true;
      }
      tail += sizeof(Envelope);
    }
    const std::size_t moved = read_piece(incoming, channel, tail, head - tail);
    PHALANX_STEP("recv: publish the tail");
    // Returns the space. Pairs with the load in progress_sends; seq_cst for the sake of notify.
    channel.tail.store(tail + moved, std::memory_order_seq_cst);
    notify(message_event(peer));
    if (incoming.moved == padded(incoming.envelope.bytes)) {
      end_message(peer, incoming);
    }
  }
  return pieces != 0;
}

// Reads the next piece after `tail`, of which `available` bytes have arrived. Returns the number of
// bytes, padding included.
std::size_t Mailbox::read_piece(Incoming& incoming, const Channel& channel, std::uint64_t tail,
                                std::size_t available) {
  const std::size_t bytes = incoming.envelope.bytes;
  const std::size_t piece = std::min({kPieceBytes, available, padded(bytes) - incoming.moved});
  if (piece != 0) {
    std::byte* target = incoming.buffer ? incoming.buffer.get() : incoming.receiver->data_;
    read_ring(channel, tail, target + incoming.moved, std::min(piece, bytes - incoming.moved));
    incoming.moved += piece;
  }
  return piece;
}

// False if the message does not match its recv, or if there is no memory for an unexpected one: the
// group is broken then.
bool Mailbox::begin_message(int peer, Incoming& incoming, const Channel& channel,
                            std::uint64_t tail) {
  read_ring(channel, tail, reinterpret_cast<std::byte*>(&incoming.envelope), sizeof(Envelope));
  const Envelope& envelope = incoming.envelope;
  incoming.receiver = matching_.match(peer, envelope.tag);
  if (incoming.receiver) {
    incoming.begun = matches(*incoming.receiver, peer, envelope);
    return incoming.begun;
  }
  incoming.buffer.reset(new (std::nothrow) std::byte[envelope.bytes]);
  if (!incoming.buffer) {
    const int rank = group_.rank();
    (void)group_.abort({.code = Code::out_of_memory, .reporter = rank, .error = ENOMEM});
    return false;
  }
  const std::size_t unexpected = matching_.unexpected_bytes() + envelope.bytes;
  if (unexpected > unexpected_peak_.load(std::memory_order_relaxed)) {
    unexpected_peak_.store(unexpected, std::memory_order_relaxed);
  }
  incoming.begun = true;
  return true;
}

void Mailbox::end_message(int peer, Incoming& incoming) {
  const MessagePtr receiver = std::move(incoming.receiver);
  if (!receiver) {
    matching_.add_unexpected(peer, {incoming.envelope, std::move(incoming.buffer)});
  } else if (incoming.buffer) {
    copy_bytes(receiver->data_, incoming.buffer.get(), incoming.envelope.bytes);
  }
  incoming = Incoming{};
  if (receiver) {
    finish(receiver, {});
  }
}

// Gives a new recv an unexpected message that has arrived, or is arriving.
bool Mailbox::take_unexpected(const MessagePtr& recv) {
  int source = kAnySource;
  if (const UnexpectedMessage* unexpected = matching_.find_unexpected(*recv, &source);
      unexpected != nullptr) {
    if (matches(*recv, source, unexpected->envelope)) {
      recv->peer_ = source;
      copy_bytes(recv->data_, unexpected->data.get(), unexpected->envelope.bytes);
      matching_.drop_unexpected(source, recv->tag_);
      finish(recv, {});
    } else {
      finish(recv, group_.failure());
    }
    return true;
  }
  if (recv->peer_ != kAnySource) {
    return attach_receiver(recv, recv->peer_);
  }
  for (int peer = 0; peer < group_.ranks(); ++peer) {
    if (attach_receiver(recv, peer)) {
      return true;
    }
  }
  return false;
}

// Makes a recv the receiver of a message that is moving to private memory, if it matches.
bool Mailbox::attach_receiver(const MessagePtr& recv, int peer) {
  Incoming& incoming = incoming_[static_cast<std::size_t>(peer)];
  if (!incoming.begun || incoming.receiver || incoming.envelope.tag != recv->tag_) {
    return false;
  }
  if (matches(*recv, peer, incoming.envelope)) {
    recv->peer_ = peer;
    incoming.receiver = recv;
  } else {
    finish(recv, group_.failure());
  }
  return true;
}

// Whether the message has the count and dtype of the recv; breaks the group if it does not.
bool Mailbox::matches(Message& message, int source, const Envelope& envelope) {
  if (message.count_ == envelope.count && message.dtype_ == envelope.dtype) {
    return true;
  }
  message.peer_ = source;
  const Fingerprint theirs{.sequence = static_cast<std::uint64_t>(envelope.tag),
                           .count = envelope.count,
                           .root = group_.rank(),
                           .kind = Kind::send,
                           .dtype = envelope.dtype};
  (void)group_.abort(Status{.code = Code::mismatch,
                            .peer = source,
                            .reporter = group_.rank(),
                            .mine = message.fingerprint(),
                            .theirs = theirs});
  return false;
}

}  // namespace phalanx
