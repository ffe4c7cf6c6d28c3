// The half of the mailbox that moves bytes: through the channels, and to those who asked for them.
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <utility>

#include "phalanx/mailbox.h"

namespace phalanx {
namespace {

// What is published at once: small enough for the receiver to read while the sender writes on.
constexpr std::size_t kPiece = 32 * 1024;

// Messages begin on cache lines, so that an envelope never wraps around the end of the ring.
constexpr std::size_t padded(std::size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

// Copies between a buffer and the ring, around its end.
void to_ring(Channel& channel, std::uint64_t position, const std::byte* from, std::size_t bytes) {
  const std::size_t start = position & (kRingBytes - 1);
  const std::size_t first = std::min(bytes, kRingBytes - start);
  std::memcpy(channel.ring + start, from, first);
  std::memcpy(channel.ring, from + first, bytes - first);
}

void from_ring(const Channel& channel, std::uint64_t position, std::byte* to, std::size_t bytes) {
  const std::size_t start = position & (kRingBytes - 1);
  const std::size_t first = std::min(bytes, kRingBytes - start);
  std::memcpy(to, channel.ring + start, first);
  std::memcpy(to + first, channel.ring, bytes - first);
}

}  // namespace

void Mailbox::drive_sends(int peer) {
  auto& queue = sends_[static_cast<std::size_t>(peer)];
  Channel& channel = to(peer);
  while (!queue.empty()) {
    const std::uint64_t head = channel.head.load(std::memory_order_relaxed);
    // Pairs with the store in drive_recvs: what is overwritten has been read.
    const std::uint64_t tail = channel.tail.load(std::memory_order_seq_cst);
    const std::size_t room = kRingBytes - (head - tail);
    Message& message = *queue.front();
    const std::size_t moved = move_out(message, channel, head, room);
    if (moved == 0) {
      return;
    }
    message.moved_ += moved;
    // Publishes the bytes. Pairs with the load in drive_recvs; seq_cst for the sake of notify.
    channel.head.store(head + moved, std::memory_order_seq_cst);
    notify(bell(peer));
    const std::size_t bytes = message.count_ * size_of(message.dtype_);
    if (message.moved_ == sizeof(Envelope) + padded(bytes)) {
      const MessagePtr done = std::move(queue.front());
      queue.pop_front();
      finish(done, {});
    }
  }
}

// Writes the next piece behind `head`; how many bytes, padding included. Always whole lines.
std::size_t Mailbox::move_out(Message& message, Channel& channel, std::uint64_t head,
                              std::size_t room) {
  const std::size_t bytes = message.count_ * size_of(message.dtype_);
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
    to_ring(channel, head, reinterpret_cast<const std::byte*>(&envelope), sizeof envelope);
    moved = sizeof envelope;
  }
  const std::size_t done = message.moved_ + moved - sizeof(Envelope);
  const std::size_t piece = std::min({kPiece, room - moved, padded(bytes) - done});
  if (piece != 0) {
    to_ring(channel, head + moved, message.data_ + done, std::min(piece, bytes - done));
  }
  return moved + piece;
}

void Mailbox::drive_recvs(int peer) {
  Incoming& incoming = incoming_[static_cast<std::size_t>(peer)];
  Channel& channel = from(peer);
  while (incoming.begun || awaited(peer)) {
    std::uint64_t tail = channel.tail.load(std::memory_order_relaxed);
    // Pairs with the store in drive_sends.
    const std::uint64_t head = channel.head.load(std::memory_order_seq_cst);
    if (head == tail) {
      return;
    }
    if (!incoming.begun) {
      if (!begin(peer, incoming, channel, tail)) {
        return;
      }
      tail += sizeof(Envelope);
    }
    const std::size_t bytes = incoming.envelope.bytes;
    const std::size_t piece = std::min({kPiece, head - tail, padded(bytes) - incoming.moved});
    if (piece != 0) {
      std::byte* target = incoming.aside ? incoming.aside.get() : incoming.receiver->data_;
      from_ring(channel, tail, target + incoming.moved, std::min(piece, bytes - incoming.moved));
      incoming.moved += piece;
    }
    // Gives the room back. Pairs with the load in drive_sends; seq_cst for the sake of notify.
    channel.tail.store(tail + piece, std::memory_order_seq_cst);
    notify(bell(peer));
    if (incoming.moved == padded(bytes)) {
      end(peer, incoming);
    }
  }
}

// False when there is no memory to put the message aside: the group is broken then.
bool Mailbox::begin(int peer, Incoming& incoming, const Channel& channel, std::uint64_t tail) {
  from_ring(channel, tail, reinterpret_cast<std::byte*>(&incoming.envelope), sizeof(Envelope));
  incoming.receiver = match(peer, incoming.envelope.tag);
  if (incoming.receiver && !fits(*incoming.receiver, peer, incoming.envelope)) {
    finish(std::exchange(incoming.receiver, nullptr), group_.broken());
  }
  if (!incoming.receiver) {
    incoming.aside.reset(new (std::nothrow) std::byte[incoming.envelope.bytes]);
    if (!incoming.aside) {
      const int rank = group_.rank();
      (void)group_.abort({.code = Code::out_of_memory, .reporter = rank, .error = ENOMEM});
      return false;
    }
  }
  incoming.begun = true;
  return true;
}

void Mailbox::end(int peer, Incoming& incoming) {
  const MessagePtr receiver = std::move(incoming.receiver);
  if (!receiver) {
    early_[static_cast<std::size_t>(peer)].push_back(
        {incoming.envelope, std::move(incoming.aside)});
  } else if (incoming.aside) {
    deliver(*receiver, peer, incoming.envelope, incoming.aside.get());
    finish(receiver, {});
  } else {
    finish(receiver, {});
  }
  incoming = Incoming{};
}

// Gives a new recv a message that has come, or is coming, before it was asked for.
bool Mailbox::take_early(const MessagePtr& message) {
  for (int peer = 0; peer < group_.ranks(); ++peer) {
    if (message->peer_ != kAnySource && message->peer_ != peer) {
      continue;
    }
    auto& queue = early_[static_cast<std::size_t>(peer)];
    const auto found = std::find_if(queue.begin(), queue.end(), [&](const Early& early) {
      return early.envelope.tag == message->tag_;
    });
    if (found != queue.end()) {
      if (fits(*message, peer, found->envelope)) {
        deliver(*message, peer, found->envelope, found->data.get());
        queue.erase(found);
        finish(message, {});
      } else {
        finish(message, group_.broken());
      }
      return true;
    }
    Incoming& incoming = incoming_[static_cast<std::size_t>(peer)];
    if (incoming.begun && !incoming.receiver && incoming.envelope.tag == message->tag_) {
      if (fits(*message, peer, incoming.envelope)) {
        message->peer_ = peer;
        incoming.receiver = message;
      } else {
        finish(message, group_.broken());
      }
      return true;
    }
  }
  return false;
}

bool Mailbox::awaited(int peer) const {
  return std::any_of(recvs_.begin(), recvs_.end(), [peer](const MessagePtr& message) {
    return message->peer_ == kAnySource || message->peer_ == peer;
  });
}

MessagePtr Mailbox::match(int peer, std::int32_t tag) {
  const auto found = std::find_if(recvs_.begin(), recvs_.end(), [&](const MessagePtr& message) {
    return message->tag_ == tag && (message->peer_ == kAnySource || message->peer_ == peer);
  });
  if (found == recvs_.end()) {
    return nullptr;
  }
  MessagePtr message = std::move(*found);
  recvs_.erase(found);
  message->peer_ = peer;
  return message;
}

void Mailbox::deliver(Message& message, int source, const Envelope& envelope,
                      const std::byte* data) {
  message.peer_ = source;
  if (envelope.bytes != 0) {
    std::memcpy(message.data_, data, envelope.bytes);
  }
}

// Whether the message is what the recv asks for; breaks the group when it is not.
bool Mailbox::fits(Message& message, int source, const Envelope& envelope) {
  if (message.count_ == envelope.count && message.dtype_ == envelope.dtype) {
    return true;
  }
  message.peer_ = source;
  const Fingerprint theirs{
      .count = envelope.count, .root = group_.rank(), .kind = Kind::send, .dtype = envelope.dtype};
  const Status status = group_.abort(Status{.code = Code::mismatch,
                                            .peer = source,
                                            .reporter = group_.rank(),
                                            .mine = message.fingerprint(),
                                            .theirs = theirs});
  return status.ok();
}

}  // namespace phalanx
