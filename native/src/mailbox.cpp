#include "phalanx/mailbox.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <utility>

namespace phalanx {
namespace {

// What is published at once: small enough for the receiver to read while the sender writes on.
constexpr std::size_t kPiece = 32 * 1024;

// How soon serve() sees an operation that nobody waits for, and for how long it expects more.
constexpr auto kGlance = std::chrono::milliseconds(1);
constexpr auto kWatchful = std::chrono::milliseconds(100);

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

Mailbox::Mailbox(Group& group)
    : group_(group),
      patience_(group.ranks()),
      sends_(static_cast<std::size_t>(group.ranks())),
      incoming_(static_cast<std::size_t>(group.ranks())),
      early_(static_cast<std::size_t>(group.ranks())),
      prefaulted_(static_cast<std::size_t>(group.ranks())) {}

MessagePtr Mailbox::send(const void* data, std::size_t count, DType dtype, int destination,
                         std::int32_t tag, bool detached) {
  const std::lock_guard lock(mutex_);
  auto message = std::make_shared<Message>();
  message->kind_ = Kind::send;
  message->peer_ = destination;
  message->tag_ = tag;
  // Never written through: the buffer of a send is only read.
  message->data_ = static_cast<std::byte*>(const_cast<void*>(data));
  message->count_ = count;
  message->dtype_ = dtype;
  const auto index = static_cast<std::size_t>(destination);
  if (!prefaulted_[index]) {
    Status status = group_.segment().prefault(&to(destination), sizeof(Channel));
    if (!status.ok()) {
      status.reporter = group_.rank();
      fail_all(group_.abort(status));
    }
    prefaulted_[index] = true;
  }
  ++outstanding_;
  sends_[index].push_back(message);
  return post(std::move(message), detached);
}

MessagePtr Mailbox::recv(void* data, std::size_t count, DType dtype, int source, std::int32_t tag,
                         bool detached) {
  const std::lock_guard lock(mutex_);
  auto message = std::make_shared<Message>();
  message->kind_ = Kind::recv;
  message->peer_ = source;
  message->tag_ = tag;
  message->data_ = static_cast<std::byte*>(data);
  message->count_ = count;
  message->dtype_ = dtype;
  ++outstanding_;
  if (failed_ || !take_early(message)) {
    recvs_.push_back(message);
  }
  return post(std::move(message), detached);
}

MessagePtr Mailbox::post(MessagePtr message, bool detached) {
  message->id_ = ++posted_;
  if (const Status status = group_.broken(); !status.ok()) {
    fail_all(status);
  }
  drive();
  if (detached && !message->done()) {
    last_detached_ = Clock::now();
    rouse();
  }
  return message;
}

Status Mailbox::wait(Message& message, const Bounds& bounds) {
  if (message.done()) {
    return message.status();
  }
  std::unique_lock lock(mutex_);
  ++waiters_;
  Patience patience = patience_;
  lock.unlock();
  const auto ready = [&] {
    const std::lock_guard guard(mutex_);
    drive();
    return message.done();
  };
  const auto trouble = [&] {
    const std::lock_guard guard(mutex_);
    return settled_trouble();
  };
  Status status = wait_until(bell(group_.rank()), patience, bounds, ready, trouble);
  lock.lock();
  patience_ = patience;
  if (!status.ok() && !message.done()) {
    if (status.reporter < 0) {  // not the trouble of some operation, but the end of this one's wait
      status.mine = message.fingerprint();
      status.reporter = group_.rank();
      status.peer = message.peer_;
    }
    status = group_.abort(status);
    fail_all(status);
  }
  --waiters_;
  if (waiters_ == 0 && outstanding_ > 0) {
    rouse();
  }
  return status.code == Code::interrupted ? status : message.status();
}

std::vector<MessagePtr> Mailbox::serve() {
  std::unique_lock lock(mutex_);
  const auto relieved = [this] {
    return stopped_ || !to_report_.empty() || outstanding_ == 0 || waiters_ > 0;
  };
  while (!stopped_ && to_report_.empty()) {
    if (relieved()) {
      rest(lock);
      continue;
    }
    Patience patience(kMaxRanks);  // never in a hurry: somebody else may need the core
    lock.unlock();
    const auto ready = [&] {
      const std::lock_guard guard(mutex_);
      drive();
      return relieved();
    };
    const auto problem = [&] {
      const std::lock_guard guard(mutex_);
      return settled_trouble();
    };
    const Status status = wait_until(bell(group_.rank()), patience, Bounds{}, ready, problem);
    lock.lock();
    if (!status.ok()) {
      fail_all(group_.abort(status));
    }
  }
  return stopped_ ? std::vector<MessagePtr>{} : std::exchange(to_report_, {});
}

// Most isends are waited for at once: waking a thread for each would cost more than the message. So
// while such come, the thread looks by itself every millisecond, and only later needs to be woken.
void Mailbox::rest(std::unique_lock<std::mutex>& lock) {
  if (Clock::now() - last_detached_ < kWatchful) {
    idle_.wait_for(lock, kGlance);
    return;
  }
  dozing_ = true;
  idle_.wait(lock);
  dozing_ = false;
}

void Mailbox::rouse() {
  if (dozing_) {
    idle_.notify_one();
  }
}

void Mailbox::stop() {
  const std::lock_guard lock(mutex_);
  stopped_ = true;
  idle_.notify_all();
  notify_always(bell(group_.rank()));
}

void Mailbox::watch(const MessagePtr& message) {
  const std::lock_guard lock(mutex_);
  if (!std::exchange(message->watched_, true) && message->done()) {
    to_report_.push_back(message);
  }
  // Wherever serve() sleeps.
  idle_.notify_one();
  notify(bell(group_.rank()));
}

std::size_t Mailbox::outstanding() {
  const std::lock_guard lock(mutex_);
  return outstanding_;
}

void Mailbox::drive() {
  if (outstanding_ == 0) {
    return;
  }
  if (failed_) {
    fail_all(group_.broken());
    return;
  }
  for (int peer = 0; peer < group_.ranks(); ++peer) {
    drive_sends(peer);
    drive_recvs(peer);
  }
  if (outstanding_ != 0) {
    if (const Status status = group_.broken(); !status.ok()) {
      fail_all(status);
    }
  }
}

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

void Mailbox::finish(const MessagePtr& message, const Status& status) {
  message->status_ = status;
  --outstanding_;
  // Publishes status, peer and data to other threads of this process; pairs with Message::done.
  message->done_.store(true, std::memory_order_seq_cst);
  if (message->watched_) {
    to_report_.push_back(message);
    idle_.notify_one();
  }
  notify(bell(group_.rank()));
}

void Mailbox::fail_all(const Status& status) {
  failed_ = true;
  std::vector<MessagePtr> failed(recvs_.begin(), recvs_.end());
  recvs_.clear();
  for (auto& queue : sends_) {
    failed.insert(failed.end(), queue.begin(), queue.end());
    queue.clear();
  }
  for (Incoming& incoming : incoming_) {
    if (incoming.receiver) {
      failed.push_back(std::move(incoming.receiver));
    }
    incoming = Incoming{};
  }
  for (const MessagePtr& message : failed) {
    finish(message, status);
  }
}

Status Mailbox::trouble_with(const Message& message) const {
  if (message.peer_ != kAnySource) {
    return group_.trouble_with(message.peer_);
  }
  int left = 0;
  Status last;
  for (int peer = 0; peer < group_.ranks(); ++peer) {
    const Status status = peer == group_.rank() ? group_.broken() : group_.trouble_with(peer);
    if (status.code == Code::left) {
      ++left;
      last = status;
    } else if (!status.ok()) {
      return status;
    }
  }
  return left + 1 == group_.ranks() ? last : Status{};
}

Status Mailbox::trouble() const {
  const auto of = [this](const MessagePtr& message) {
    Status status = trouble_with(*message);
    status.mine = message->fingerprint();
    return status;
  };
  for (const auto& queue : sends_) {
    if (!queue.empty()) {
      if (const Status status = of(queue.front()); !status.ok()) {
        return status;
      }
    }
  }
  for (const MessagePtr& message : recvs_) {
    if (const Status status = of(message); !status.ok()) {
      return status;
    }
  }
  for (const Incoming& incoming : incoming_) {
    if (incoming.receiver) {
      if (const Status status = of(incoming.receiver); !status.ok()) {
        return status;
      }
    }
  }
  return {};
}

// The trouble that remains after a second look. What a peer published before it left or died still
// counts, and may have come after the last look at its channel.
Status Mailbox::settled_trouble() {
  if (const Status status = trouble(); status.ok()) {
    return status;
  }
  drive();
  return trouble();
}

}  // namespace phalanx
