// Messages between two ranks: send and recv.
//
// From each rank to each other runs a channel, a ring of bytes in the segment that carries whole
// messages in the order in which they were sent. A message whose turn comes and that no posted recv
// matches is moved out of the way, into private memory, as soon as a later one is asked for: so any
// order of isend and irecv on both sides completes, with one more copy where the orders differ.
// Messages of one source and tag keep their order.
//
// Nothing here has a thread of its own. Whoever waits drives all operations of the rank, not only
// its own; `serve` is what a progress thread runs so that they go on while nobody waits.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <vector>

#include "phalanx/group.h"

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
static_assert(sizeof(Envelope) == kLine);

// One send or recv. Shared by its caller and, until it is done, by the mailbox; `data` must live
// until then. Fields are guarded by the mailbox's mutex until done() is true.
class Message {
 public:
  std::uint64_t id() const { return id_; }
  bool done() const { return done_.load(std::memory_order_acquire); }
  // When done: ok, or why it failed; the rank that it came from or went to.
  const Status& status() const { return status_; }
  int peer() const { return peer_; }

 private:
  friend class Mailbox;

  Fingerprint fingerprint() const {
    return {.count = count_, .root = peer_, .kind = kind_, .dtype = dtype_};
  }

  std::uint64_t id_ = 0;
  Kind kind_ = Kind::send;
  int peer_ = kAnySource;
  std::int32_t tag_ = 0;
  std::byte* data_ = nullptr;
  std::size_t count_ = 0;
  DType dtype_ = DType::uint8;
  std::size_t moved_ = 0;  // of a send: bytes of envelope, payload and padding in the channel
  bool watched_ = false;
  Status status_;
  std::atomic<bool> done_ = false;  // writer: who drives the mailbox; pairs with done()
};

using MessagePtr = std::shared_ptr<Message>;

class Mailbox {
 public:
  explicit Mailbox(Group& group);

  // Posts an operation and moves what can be moved at once. A send is done when the message stands
  // in the channel, a recv when it stands in `data`. `detached`: the caller goes on without
  // waiting, so serve() takes over.
  MessagePtr send(const void* data, std::size_t count, DType dtype, int destination,
                  std::int32_t tag, bool detached);
  // `source` may be kAnySource. Count and dtype must be those of the message.
  MessagePtr recv(void* data, std::size_t count, DType dtype, int source, std::int32_t tag,
                  bool detached);

  // Blocks until the message is done; drives all operations meanwhile.
  Status wait(Message& message, const Bounds& bounds);

  // Drives the operations that nobody waits for. Returns messages that are watched and done; none
  // once stop() was called. Sleeps while there is nothing to do.
  std::vector<MessagePtr> serve();
  void stop();
  // Asks that serve() returns the message, once, when it is done (at once if it is done already).
  void watch(const MessagePtr& message);

  // Operations that are not done.
  std::size_t outstanding();

 private:
  // A message that stands in private memory because another was asked for first.
  struct Early {
    Envelope envelope;
    std::unique_ptr<std::byte[]> data;
  };
  // The message at the head of a channel, from its envelope on.
  struct Incoming {
    bool begun = false;
    Envelope envelope;
    std::size_t moved = 0;  // bytes of payload and padding
    MessagePtr receiver;
    std::unique_ptr<std::byte[]> aside;  // where the payload goes when nobody had asked for it
  };

  Channel& to(int peer) const { return group_.segment().channel(group_.rank(), peer); }
  Channel& from(int peer) const { return group_.segment().channel(peer, group_.rank()); }
  Event& bell(int rank) const { return group_.segment().control(rank).bell; }

  // All with mutex_ held.
  MessagePtr post(MessagePtr message, bool detached);
  void rest(std::unique_lock<std::mutex>& lock);
  void rouse();
  void drive();
  void drive_sends(int peer);
  std::size_t move_out(Message& message, Channel& channel, std::uint64_t head, std::size_t room);
  void drive_recvs(int peer);
  bool begin(int peer, Incoming& incoming, const Channel& channel, std::uint64_t tail);
  void end(int peer, Incoming& incoming);
  bool take_early(const MessagePtr& message);
  bool awaited(int peer) const;
  MessagePtr match(int peer, std::int32_t tag);
  void deliver(Message& message, int source, const Envelope& envelope, const std::byte* data);
  bool fits(Message& message, int source, const Envelope& envelope);
  void finish(const MessagePtr& message, const Status& status);
  void fail_all(const Status& status);
  Status trouble_with(const Message& message) const;
  Status trouble() const;
  Status settled_trouble();

  Group& group_;
  std::mutex mutex_;
  std::condition_variable idle_;
  Patience patience_;
  std::uint64_t posted_ = 0;
  std::vector<std::deque<MessagePtr>> sends_;  // by destination
  std::list<MessagePtr> recvs_;                // unmatched, in the order posted
  std::vector<Incoming> incoming_;             // by source
  std::vector<std::deque<Early>> early_;       // by source
  std::vector<bool> prefaulted_;               // by destination
  std::vector<MessagePtr> to_report_;          // watched and done
  std::size_t outstanding_ = 0;
  int waiters_ = 0;      // threads in wait(): serve() stands back while there are some
  bool failed_ = false;  // the group is broken: channels may stand in the middle of a message
  bool stopped_ = false;
  bool dozing_ = false;  // serve() has to be woken
  Clock::time_point last_detached_{};
};

}  // namespace phalanx
