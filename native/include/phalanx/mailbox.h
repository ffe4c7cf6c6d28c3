// Messages between two ranks: send and recv.
//
// From each rank to each other runs a channel, a ring of bytes in the segment that carries whole
// messages in the order in which they were sent. A message whose turn comes and that no posted recv
// matches is moved out of the way, into private memory, as soon as a later one is asked for: so any
// order of isend and irecv on both sides completes, with one more copy where the orders differ.
// Messages of one source and tag keep their order.
//
// Nothing here has a thread of its own. Whoever waits drives all operations of the rank, not only
// its own; `serve` is what a service thread runs so that they go on while nobody waits.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "phalanx/group.h"
#include "phalanx/message.h"

namespace phalanx {

class Mailbox {
 public:
  explicit Mailbox(Group& group);

  // Posts an operation and moves what can be moved at once; `data` must live until it is done. A
  // send is done when the message stands in the channel, a recv when it stands in `data`.
  // `detached`: the caller goes on without waiting, so serve() takes over.
  MessagePtr send(const void* data, std::size_t count, DType dtype, int destination,
                  std::int32_t tag, bool detached);
  // `source` may be kAnySource. Count and dtype must be those of the message.
  MessagePtr recv(void* data, std::size_t count, DType dtype, int source, std::int32_t tag,
                  bool detached);

  // Blocks until the message is done; drives all operations meanwhile. A deadline or an interrupt
  // breaks the group.
  Status wait(Message& message, const Bounds& bounds);
  // Moves what can be moved now; whether the message is done.
  bool test(Message& message);
  // Takes back a recv of any source, for which a message has come from another host: whether it
  // could, because none of this host had. It is done then; `name`: what the flight recorder calls the
  // rank that sent it.
  bool withdraw(Message& message, std::int16_t name);
  // Says whether messages may come from other hosts: those of any source are waited for then even
  // if all ranks of this one have left.
  void expect_foreign(bool may_come);
  // What the flight recorder says of a message that others move, to or from a rank of another host: it
  // begins, is waited for, and has ended with an outcome, to or from that rank. `name`: of the
  // rank, -1 for any. Nothing else of the message is ever used.
  MessagePtr begin_foreign(Kind kind, std::size_t count, DType dtype, std::int16_t name,
                           std::int32_t tag);
  void foreign_waits(Message& message);
  void end_foreign(Message& message, Code outcome, std::int16_t name);

  // Drives the operations that nobody waits for. Returns messages that are watched and done; none
  // once stop() was called. Sleeps while there is nothing to do.
  std::vector<MessagePtr> serve();
  void stop();
  // Asks that serve() returns the message, once, when it is done (at once if it is done already),
  // and gives it a deadline of its own. Of two calls, the second does nothing.
  void watch(const MessagePtr& message, Clock::time_point deadline);
  // Ends all operations, of whichever thread, because this rank leaves the group.
  void close();

  // Operations that are not done.
  std::size_t outstanding() const { return outstanding_.load(std::memory_order_seq_cst); }
  // The most bytes of messages that ever stood in private memory, since they came before their
  // recv.
  std::size_t early_peak() const { return early_peak_.load(std::memory_order_relaxed); }

 private:
  class Hold;  // of mutex_

  // The message at the head of a channel, from its envelope on.
  struct Incoming {
    bool begun = false;
    Envelope envelope{};
    std::size_t moved = 0;  // bytes of payload and padding
    MessagePtr receiver;
    std::unique_ptr<std::byte[]> aside;  // where the payload goes when nobody had asked for it
  };

  Channel& to(int peer) const { return group_.segment().channel(group_.rank(), peer); }
  Channel& from(int peer) const { return group_.segment().channel(peer, group_.rank()); }
  Event& bell(int rank) const { return group_.segment().control(rank).bell; }

  // Without mutex_.
  MessagePtr post(MessagePtr message, bool detached);
  bool try_drive();
  Status settled_trouble();
  Status look_around(const Bounds& bounds, Clock::time_point& next_look);
  Status fail(const Message& message, Status status);
  void attend();
  bool relieved() const;
  void rest(std::unique_lock<std::mutex>& idle);
  void rouse();

  // The rest with mutex_ held. drive...: whether something moved.
  bool drive();
  bool drive_channels();
  bool drive_for(const Message& message);
  bool drive_sends(int peer);
  bool drive_recvs(int peer);
  std::size_t move_out(Message& message, Channel& channel, std::uint64_t head, std::size_t room);
  std::size_t move_in(Incoming& incoming, const Channel& channel, std::uint64_t tail,
                      std::size_t there);
  bool begin(int peer, Incoming& incoming, const Channel& channel, std::uint64_t tail);
  void end(int peer, Incoming& incoming);
  bool take_early(const MessagePtr& recv);
  bool adopt(const MessagePtr& recv, int peer);
  bool fits(Message& message, int source, const Envelope& envelope);
  void prefault(int peer);
  void note_poster(const Message& message);
  void finish(const MessagePtr& message, const Status& status);
  std::int16_t name_of(const Message& message) const;
  void begin_record(Message& message);
  void show_wait(Message& message);
  void end_record(Message& message);
  void report(const MessagePtr& message);
  void fail_all(const Status& status);
  Status trouble();
  Status trouble_from(int peer) const;
  Status trouble_from_any() const;

  Group& group_;
  std::mutex mutex_;
  // Guarded by mutex_.
  std::uint64_t posted_ = 0;
  std::vector<std::deque<MessagePtr>> sends_;  // by destination
  Matching matching_;
  std::vector<Incoming> incoming_;   // by source
  std::vector<bool> prefaulted_;     // by destination
  std::vector<MessagePtr> watched_;  // those that are done go when somebody looks for trouble
  Patience patience_;
  std::thread::id poster_;  // who posted first
  bool foreign_ = false;
  bool to_itself_ = false;  // whether this rank may send to itself while it waits
  Status failed_;  // why the group is broken, or left: channels may end in the middle of a message

  // Writers: who holds mutex_.
  std::atomic<std::size_t> outstanding_ = 0;
  std::atomic<std::size_t> early_peak_ = 0;
  // Writers: threads in wait(). While there are some, serve() stands back.
  std::atomic<int> waiters_ = 0;
  std::atomic<std::uint64_t> waits_ = 0;  // how many there were
  // Writers: threads that post and don't wait.
  std::atomic<std::uint64_t> detached_ = 0;  // how many operations
  // See Hold. Writers: threads that want mutex_, and those that try.
  std::atomic<int> wanted_ = 0;
  std::atomic<bool> missed_ = false;

  // The service thread: what others tell it, and where it sleeps while it has nothing to do.
  std::mutex idle_mutex_;  // comes after mutex_
  std::condition_variable idle_;
  std::vector<MessagePtr> to_report_;  // watched and done; guarded by idle_mutex_
  bool hurry_ = false;                 // somebody waits for a report; guarded by idle_mutex_
  std::atomic<bool> reports_ = false;  // whether there are some; writers hold idle_mutex_
  std::atomic<bool> stopped_ = false;  // writer: stop()
  std::atomic<bool> dozing_ = false;   // writer: the service thread; it has to be woken
  // Its own: what it saw at its last glance, and how many have passed since something was posted.
  std::uint64_t waits_seen_ = 0;
  std::uint64_t detached_seen_ = 0;
  int quiet_glances_ = 0;
};

}  // namespace phalanx
