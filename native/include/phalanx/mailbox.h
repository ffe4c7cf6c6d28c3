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
  // could, because none of this host had. It is done then; `name`: what the flight recorder calls
  // the rank that sent it.
  bool withdraw(Message& message, std::int16_t global_rank);
  // Says whether messages may come from other hosts: those of any source are waited for then even
  // if all ranks of this one have left.
  void expect_remote(bool may_come);
  // What the flight recorder says of a message that others move, to or from a rank of another host:
  // it begins, is waited for, and has ended with an outcome, to or from that rank. `name`: of the
  // rank, -1 for any. Nothing else of the message is ever used.
  MessagePtr begin_remote(Kind kind, std::size_t count, DType dtype, std::int16_t global_rank,
                          std::int32_t tag);
  void begin_remote_wait(Message& message);
  void end_remote(Message& message, Code outcome, std::int16_t global_rank);

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
  std::size_t unexpected_peak() const { return unexpected_peak_.load(std::memory_order_relaxed); }

 private:
  class MailboxLock;  // of mutex_

  // The message at the head of a channel, from its envelope on.
  struct Incoming {
    bool begun = false;
    Envelope envelope{};
    std::size_t moved = 0;  // bytes of payload and padding
    MessagePtr receiver;
    std::unique_ptr<std::byte[]> buffer;  // where the payload goes when nobody had asked for it
  };

  Channel& send_channel(int peer) const { return group_.segment().channel(group_.rank(), peer); }
  Channel& recv_channel(int peer) const { return group_.segment().channel(peer, group_.rank()); }
  Event& message_event(int rank) const { return group_.segment().control(rank).message_event; }

  // Without mutex_.
  MessagePtr post(MessagePtr message, bool detached);
  bool try_progress();
  Status recheck_peers();
  Status check_wait(const Bounds& bounds, Clock::time_point& next_check);
  Status fail(const Message& message, Status status);
  void service();
  bool should_yield() const;
  void idle(std::unique_lock<std::mutex>& lock);
  void wake();

  // The rest with mutex_ held. drive...: whether something moved.
  bool progress();
  bool progress_channels();
  bool progress_for(const Message& message);
  bool progress_sends(int peer);
  bool progress_recvs(int peer);
  std::size_t write_piece(Message& message, Channel& channel, std::uint64_t head, std::size_t room);
  std::size_t read_piece(Incoming& incoming, const Channel& channel, std::uint64_t tail,
                         std::size_t available);
  bool begin_message(int peer, Incoming& incoming, const Channel& channel, std::uint64_t tail);
  void end_message(int peer, Incoming& incoming);
  bool take_unexpected(const MessagePtr& recv);
  bool attach_receiver(const MessagePtr& recv, int peer);
  bool matches(Message& message, int source, const Envelope& envelope);
  void prefault(int peer);
  void record_poster(const Message& message);
  void finish(const MessagePtr& message, const Status& status);
  std::int16_t global_rank_of(const Message& message) const;
  void begin_record(Message& message);
  void begin_wait(Message& message);
  void end_record(Message& message);
  void report(const MessagePtr& message);
  void fail_all(const Status& status);
  Status check_peers();
  Status check_peer(int peer) const;
  Status check_any_source() const;

  Group& group_;
  std::mutex mutex_;
  // Guarded by mutex_.
  std::uint64_t posted_ = 0;
  std::vector<std::deque<MessagePtr>> sends_;  // by destination
  Matching matching_;
  std::vector<Incoming> incoming_;   // by source
  std::vector<bool> prefaulted_;     // by destination
  std::vector<MessagePtr> watched_;  // those that are done go when somebody looks for trouble
  SpinPolicy spin_policy_;
  std::thread::id first_poster_;  // who posted first
  bool expects_remote_ = false;
  bool may_send_to_self_ = false;  // whether this rank may send to itself while it waits
  Status failed_;  // why the group is broken, or left: channels may end in the middle of a message

  // Writers: who holds mutex_.
  std::atomic<std::size_t> outstanding_ = 0;
  std::atomic<std::size_t> unexpected_peak_ = 0;
  // Writers: threads in wait(). While there are some, serve() stands back.
  std::atomic<int> waiters_ = 0;
  std::atomic<std::uint64_t> waits_ = 0;  // how many there were
  // Writers: threads that post and don't wait.
  std::atomic<std::uint64_t> detached_ = 0;  // how many operations
  // See Hold. Writers: threads that want mutex_, and those that try.
  std::atomic<int> lock_waiters_ = 0;
  std::atomic<bool> lock_missed_ = false;

  // The service thread: what others tell it, and where it sleeps while it has nothing to do.
  std::mutex service_mutex_;  // comes after mutex_
  std::condition_variable service_event_;
  std::vector<MessagePtr> pending_reports_;  // watched and done; guarded by idle_mutex_
  bool service_now_ = false;                 // somebody waits for a report; guarded by idle_mutex_
  std::atomic<bool> has_reports_ = false;    // whether there are some; writers hold idle_mutex_
  std::atomic<bool> stopped_ = false;        // writer: stop()
  std::atomic<bool> asleep_ = false;         // writer: the service thread; it has to be woken
  // Its own: what it saw at its last glance, and how many have passed since something was posted.
  std::uint64_t waits_seen_ = 0;
  std::uint64_t detached_seen_ = 0;
  int idle_polls_ = 0;
};

}  // namespace phalanx
