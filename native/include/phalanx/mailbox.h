// Messages between two ranks: send and recv.
//
// A channel runs from each rank to each other rank: a ring buffer in the segment that carries whole
// messages in the order in which they were sent. A message at the head of a channel that matches no
// posted recv is unexpected. It moves to private memory as soon as a later message is requested. So
// any order of isend and irecv on both sides completes, with one more copy if the orders differ.
// Messages of one source and tag keep their order.
//
// The mailbox has no thread of its own. Every waiting thread makes progress on all operations of
// the rank, not only its own. `serve` is run by a service thread, so that operations progress while
// no thread waits.
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

  // Block until the message is in the channel, or in `data`: isend or irecv, and wait. A short
  // message that can be moved at once is not posted. `*actual_source`: of a message of any source.
  Status send(const void* data, std::size_t count, DType dtype, int destination, std::int32_t tag,
              const Bounds& bounds);
  Status recv(void* data, std::size_t count, DType dtype, int source, std::int32_t tag,
              const Bounds& bounds, int* actual_source = nullptr);

  // Posts an operation and moves what can be moved at once; `data` must live until it is done. A
  // send is done when the message is in the channel, a recv when it is in `data`. `detached`: the
  // caller continues without waiting, so serve() takes over.
  MessagePtr isend(const void* data, std::size_t count, DType dtype, int destination,
                   std::int32_t tag, bool detached);
  // `source` may be kAnySource. Count and dtype must equal those of the message.
  MessagePtr irecv(void* data, std::size_t count, DType dtype, int source, std::int32_t tag,
                   bool detached);

  // Blocks until the message is done, and makes progress on all operations meanwhile. A deadline or
  // an interrupt breaks the group.
  Status wait(Message& message, const Bounds& bounds);
  // Moves what can be moved now. Returns whether the message is done.
  bool test(Message& message);
  // Withdraws a recv of any source, for which a message has come from another host. Returns whether
  // it was withdrawn, which requires that no message of this host has matched it. It is done then.
  // `global_rank`: the sender.
  bool withdraw(Message& message, std::int16_t global_rank);
  // Sets whether messages may come from other hosts. If so, recvs of any source keep waiting even
  // if all ranks of this host have left.
  void expect_remote(bool may_come);
  // Record a message to or from another host, which is moved elsewhere: its begin, the wait for it,
  // and its end with an outcome. `global_rank`: the rank on the other host, -1 for any. Nothing
  // else of such a message is used.
  MessagePtr begin_remote(Kind kind, std::size_t count, DType dtype, std::int16_t global_rank,
                          std::int32_t tag);
  void begin_remote_wait(Message& message);
  void end_remote(Message& message, Code outcome, std::int16_t global_rank);

  // Makes progress on operations that no thread waits for. Returns watched messages that are done;
  // none once stop() was called. Sleeps while there is nothing to do.
  std::vector<MessagePtr> serve();
  void stop();
  // Makes serve() return the message, once, when it is done (at once if it is done already), and
  // gives it a deadline of its own. A second call does nothing.
  void watch(const MessagePtr& message, Clock::time_point deadline);
  // Ends all operations, of all threads, because this rank leaves the group.
  void close();

  // The number of operations that are not done.
  std::size_t outstanding() const { return outstanding_.load(std::memory_order_seq_cst); }
  // The peak number of bytes of unexpected messages in private memory.
  std::size_t unexpected_peak() const { return unexpected_peak_.load(std::memory_order_relaxed); }

 private:
  class MailboxLock;  // of mutex_

  // The message at the head of a channel, from its envelope on.
  struct Incoming {
    bool begun = false;
    Envelope envelope{};
    std::size_t moved = 0;  // bytes of payload
    MessagePtr receiver;
    std::unique_ptr<std::byte[]> buffer;  // destination of the payload of an unexpected message

    std::byte* target() const { return buffer ? buffer.get() : receiver->data_; }
  };

  Event& message_event(int rank) const { return group_.segment().control(rank).message_event; }

  // The short ways. Each returns whether the message has been moved.
  bool send_at_once(const void* data, const Envelope& envelope, int destination);
  bool recv_at_once(void* data, const Envelope& envelope, int source, Record& record);
  void record_short(Record& record);

  // Without mutex_.
  MessagePtr post(MessagePtr message, bool detached);
  bool try_progress();
  Failure recheck_peers();
  Failure check_wait(const Bounds& bounds, Clock::time_point& next_check);
  Status fail(const Message& message, Failure failure);
  Status outcome_of(const Message& message);
  void service();
  bool should_yield() const;
  void idle(std::unique_lock<std::mutex>& lock);
  void wake();

  // The rest with mutex_ held. progress...: returns whether something moved.
  bool progress();
  bool progress_channels();
  bool progress_for(const Message& message);
  bool progress_sends(int peer);
  bool progress_recvs(int peer);
  bool begin_message(int peer, Incoming& incoming);
  void end_message(int peer, Incoming& incoming);
  bool take_unexpected(const MessagePtr& recv);
  bool attach_receiver(const MessagePtr& recv, int peer);
  bool matches(Message& message, int source, const Envelope& envelope);
  void prefault(int peer);
  void record_poster(int peer);
  void finish(const MessagePtr& message, const Status& status);
  void complete(const MessagePtr& message);
  void end_unanswered_recvs();
  std::int16_t global_rank_of(const Message& message) const;
  void begin_record(Message& message);
  void begin_wait(Message& message);
  void end_record(Message& message);
  void report(const MessagePtr& message);
  void fail_all(const Status& status);
  Failure check_peers();
  Failure check_peer(int peer) const;
  Failure check_any_source() const;

  Group& group_;
  std::mutex mutex_;
  // Guarded by mutex_.
  std::uint64_t posted_ = 0;
  std::deque<ChannelSender> senders_;          // by destination
  std::deque<ChannelReceiver> receivers_;      // by source
  std::vector<std::deque<MessagePtr>> sends_;  // by destination
  Matching matching_;
  std::vector<Incoming> incoming_;   // by source
  std::vector<bool> prefaulted_;     // by destination
  std::vector<MessagePtr> watched_;  // pruned by check_peers
  SpinPolicy spin_policy_;
  std::thread::id first_poster_;  // the first thread that posted
  bool expects_remote_ = false;
  bool may_send_to_self_ = false;  // whether this rank may send to itself while it waits
  Status failed_;  // why the group is broken or left; channels may end in the middle of a message

  // Writers: the holder of mutex_.
  std::atomic<std::size_t> outstanding_ = 0;
  std::atomic<std::size_t> unexpected_peak_ = 0;
  // Writers: threads in wait(). While there are any, serve() yields.
  std::atomic<int> waiters_ = 0;
  std::atomic<std::uint64_t> waits_ = 0;  // total number of waits
  // Writers: threads that post and do not wait.
  std::atomic<std::uint64_t> detached_ = 0;  // total number of operations
  // See MailboxLock. Writers: threads that wait for mutex_, and those that try to lock it.
  std::atomic<int> lock_waiters_ = 0;
  std::atomic<bool> lock_missed_ = false;

  // The service thread: its input from other threads, and the event on which it sleeps.
  std::mutex service_mutex_;  // locked after mutex_
  std::condition_variable service_event_;
  std::vector<MessagePtr> pending_reports_;  // watched and done; guarded by service_mutex_
  bool service_now_ = false;                 // a message is watched; guarded by service_mutex_
  std::atomic<bool> has_reports_ = false;    // whether there are any; writers hold service_mutex_
  std::atomic<bool> stopped_ = false;        // writer: stop()
  std::atomic<bool> asleep_ = false;         // writer: the service thread; it must be woken
  // Used by the service thread only: counts at its last poll, and the polls since the last post.
  std::uint64_t waits_seen_ = 0;
  std::uint64_t detached_seen_ = 0;
  int idle_polls_ = 0;
};

}  // namespace phalanx
