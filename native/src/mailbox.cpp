#include "phalanx/mailbox.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <new>
#include <utility>

#include "phalanx/copy.h"
#include "phalanx/hooks.h"

namespace phalanx {
namespace {

// The interval of checks in a wait during which messages move all the time.
constexpr auto kCheckInterval = std::chrono::milliseconds(100);

// A round of progress ends after so many pieces, so that other threads of this rank get the lock.
constexpr int kPiecesPerRound = 16;

constexpr auto kPollInterval = std::chrono::milliseconds(1);
constexpr int kIdlePollsBeforeSleep = 100;

}  // namespace

// Holds the mutex of a mailbox.
//
// A thread that posts blocks on it. A thread that makes progress releases it after each round, and
// posting threads get it first. A thread that waits for a message only tries to lock, since another
// thread may make progress on all operations for a long time; meanwhile its own message may be
// done, or its deadline may come. A failed try loses nothing: `lock_missed_` makes the holder
// notify the rank's own message event after the unlock, in the order of an event count (see
// wait.h):
//   try:      missed = true; if (!try_lock()) sleep on the event
//   holder:   unlock; if (missed) notify the event
// A failed try comes before the unlock, so its store of `lock_missed_` does too.
class Mailbox::MailboxLock {
 public:
  explicit MailboxLock(Mailbox& mailbox) : mailbox_(mailbox), owns_(true) {
    if (!mailbox_.mutex_.try_lock()) {
      mailbox_.lock_waiters_.fetch_add(1, std::memory_order_seq_cst);
      mailbox_.mutex_.lock();
      mailbox_.lock_waiters_.fetch_sub(1, std::memory_order_seq_cst);
    }
  }
  MailboxLock(Mailbox& mailbox, std::try_to_lock_t) : mailbox_(mailbox), owns_(try_lock()) {
    if (!owns_) {
      // Pairs with the exchange below.
      mailbox_.lock_missed_.store(true, std::memory_order_seq_cst);
      owns_ = try_lock();
    }
  }
  MailboxLock(const MailboxLock&) = delete;
  MailboxLock& operator=(const MailboxLock&) = delete;
  ~MailboxLock() {
    if (!owns_) {
      return;
    }
    mailbox_.mutex_.unlock();
    if (mailbox_.lock_missed_.load(std::memory_order_seq_cst) &&
        mailbox_.lock_missed_.exchange(false, std::memory_order_seq_cst)) {
      notify(mailbox_.message_event(mailbox_.group_.rank()));
    }
  }

  bool owns_lock() const { return owns_; }

 private:
  // A thread that waits for the lock does not have it yet, so a later unlock is certain.
  bool try_lock() {
    return mailbox_.lock_waiters_.load(std::memory_order_seq_cst) == 0 &&
           mailbox_.mutex_.try_lock();
  }

  Mailbox& mailbox_;
  bool owns_;
};

Mailbox::Mailbox(Group& group)
    : group_(group),
      sends_(static_cast<std::size_t>(group.ranks())),
      matching_(group.ranks()),
      incoming_(static_cast<std::size_t>(group.ranks())),
      prefaulted_(static_cast<std::size_t>(group.ranks())),
      spin_policy_(group.ranks()) {
  for (int peer = 0; peer < group.ranks(); ++peer) {
    senders_.emplace_back(group.segment().channel(group.rank(), peer));
    receivers_.emplace_back(group.segment().channel(peer, group.rank()));
  }
}

MessagePtr Mailbox::isend(const void* data, std::size_t count, DType dtype, int destination,
                          std::int32_t tag, bool detached) {
  // Never written through: the buffer of a send is only read.
  auto* bytes = static_cast<std::byte*>(const_cast<void*>(data));
  return post(std::make_shared<Message>(Kind::send, bytes, count, dtype, destination, tag),
              detached);
}

MessagePtr Mailbox::irecv(void* data, std::size_t count, DType dtype, int source, std::int32_t tag,
                          bool detached) {
  auto* bytes = static_cast<std::byte*>(data);
  return post(std::make_shared<Message>(Kind::recv, bytes, count, dtype, source, tag), detached);
}

Status Mailbox::send(const void* data, std::size_t count, DType dtype, int destination,
                     std::int32_t tag, const Bounds& bounds) {
  if (send_at_once(data, {.count = count, .tag = tag, .dtype = dtype}, destination)) {
    return {};
  }
  bounds.block();
  return wait(*isend(data, count, dtype, destination, tag, false), bounds);
}

Status Mailbox::recv(void* data, std::size_t count, DType dtype, int source, std::int32_t tag,
                     const Bounds& bounds, int* actual_source) {
  const Envelope envelope{.count = count, .tag = tag, .dtype = dtype};
  if (source != kAnySource) {
    Record record = group_.record_of(envelope.fingerprint(Kind::recv, source));
    const ChannelReceiver& receiver = receivers_[static_cast<std::size_t>(source)];
    if (look_briefly([&] { return receiver.has_message(); }) &&
        recv_at_once(data, envelope, source, record)) {
      return {};
    }
  }
  bounds.block();
  const MessagePtr message = irecv(data, count, dtype, source, tag, false);
  const Status status = wait(*message, bounds);
  if (actual_source != nullptr) {
    *actual_source = message->peer();
  }
  return status;
}

bool Mailbox::send_at_once(const void* data, const Envelope& envelope, int destination) {
  const auto index = static_cast<std::size_t>(destination);
  const MailboxLock lock(*this, std::try_to_lock);
  if (!lock.owns_lock() || !failed_.ok() || !sends_[index].empty() || !prefaulted_[index] ||
      !senders_[index].has_room(envelope.bytes()) || !group_.failure().ok()) {
    return false;
  }
  record_poster(destination);
  Record record = group_.record_of(envelope.fingerprint(Kind::send, destination));
  std::size_t moved = 0;
  (void)senders_[index].begin(envelope, static_cast<const std::byte*>(data), moved);
  notify_peer(message_event(destination));
  record_short(record);
  return true;
}

// Only if no recv before this one may match the message, and none of its kind is in private memory.
bool Mailbox::recv_at_once(void* data, const Envelope& envelope, int source, Record& record) {
  const auto index = static_cast<std::size_t>(source);
  ChannelReceiver& receiver = receivers_[index];
  const MailboxLock lock(*this, std::try_to_lock);
  if (!lock.owns_lock() || !failed_.ok() || incoming_[index].begun ||
      matching_.has_recv_for(source) || matching_.has_unexpected() || !receiver.has_message() ||
      receiver.next() != envelope || !receiver.is_complete() || !group_.failure().ok()) {
    return false;
  }
  record_poster(source);
  auto* to = static_cast<std::byte*>(data);
  const std::size_t bytes = envelope.bytes();
  (void)receiver.begin(to);
  if (bytes > kSlotPayload) {
    (void)receiver.read(to, bytes, bytes);
  }
  notify_peer(message_event(source));
  record_short(record);
  return true;
}

void Mailbox::record_short(Record& record) {
  if (group_.recorder_ != nullptr) {
    record.peer = group_.global_rank(record.peer);
    record.end = std::max(record.begin, RecordClock::now());
    group_.recorder_->record(record);
  }
}

MessagePtr Mailbox::post(MessagePtr message, bool detached) {
  {
    const MailboxLock lock(*this);
    message->id_ = ++posted_;
    record_poster(message->peer_);
    begin_record(*message);
    // seq_cst: pairs with the load in idle().
    outstanding_.fetch_add(1, std::memory_order_seq_cst);
    if (message->kind_ == Kind::send) {
      prefault(message->peer_);
      sends_[static_cast<std::size_t>(message->peer_)].push_back(message);
    } else if (!failed_.ok() || !take_unexpected(message)) {
      matching_.post_recv(message);
    }
    const Status status = failed_.ok() ? group_.failure() : failed_;
    if (status.ok()) {
      (void)progress_for(*message);
    } else {
      fail_all(status);
    }
  }
  if (detached && !message->done()) {
    detached_.fetch_add(1, std::memory_order_relaxed);
    wake();
  }
  return message;
}

Status Mailbox::wait(Message& message, const Bounds& bounds) {
  if (message.done()) {
    return outcome_of(message);
  }
  bounds.block();  // before the mutex, whose holder may need what the caller holds
  waits_.fetch_add(1, std::memory_order_relaxed);
  waiters_.fetch_add(1, std::memory_order_seq_cst);
  auto [spin_policy, peer] = [&] {
    const MailboxLock lock(*this);
    message.awaited_ = true;
    begin_wait(message);
    return std::pair(spin_policy_, message.peer());
  }();
  auto next_check = Clock::now() + kCheckInterval;
  const auto ready = [&] { return message.done() || try_progress() || message.done(); };
  Failure failure = Status{};
  const auto peer_status = [&] {
    failure = recheck_peers();
    return failure.status;
  };
  Status status;
  // Each wait ends when anything moves, so that a long message is awaited piece by piece.
  while (status.ok() && !message.done()) {
    spin_policy.set_same_core(peer >= 0 && group_.shares_core(peer));
    status = wait_until(message_event(group_.rank()), spin_policy, bounds, ready, peer_status);
    if (status.ok() && !message.done()) {
      failure = check_wait(bounds, next_check);
      status = failure.status;
    }
  }
  if (!status.ok()) {
    status = fail(message, {status, failure.mine});
  }
  {
    const MailboxLock lock(*this);
    spin_policy_ = spin_policy;
  }
  // seq_cst: pairs with the loads in idle().
  if (waiters_.fetch_sub(1, std::memory_order_seq_cst) == 1 && outstanding() != 0) {
    wake();
  }
  return status.code == Code::interrupted ? status : outcome_of(message);
}

// The status of a message that is done. The failure of one that has ended alone breaks the group
// now that somebody has waited for it, so that the other ranks see why this one does not go on.
Status Mailbox::outcome_of(const Message& message) {
  if (message.unanswered_) {
    const MailboxLock lock(*this);
    fail_all(group_.abort(message.failure_));
  }
  return message.status();
}

bool Mailbox::test(Message& message) {
  if (!message.done()) {
    (void)try_progress();
  }
  return message.done();
}

bool Mailbox::withdraw(Message& message, std::int16_t global_rank) {
  const MailboxLock lock(*this);
  if (message.done()) {
    return false;
  }
  const MessagePtr withdrawn = matching_.withdraw(message);
  if (!withdrawn) {
    return false;
  }
  withdrawn->global_rank_ = global_rank;
  finish(withdrawn, {});
  return true;
}

void Mailbox::expect_remote(bool may_come) {
  const MailboxLock lock(*this);
  expects_remote_ = may_come;
}

void Mailbox::close() {
  const MailboxLock lock(*this);
  const int rank = group_.rank();
  fail_all({.code = Code::left, .peer = rank, .reporter = rank});
}

bool Mailbox::try_progress() {
  const MailboxLock lock(*this, std::try_to_lock);
  return lock.owns_lock() && progress();
}

Failure Mailbox::check_wait(const Bounds& bounds, Clock::time_point& next_check) {
  const auto now = Clock::now();
  if (now >= bounds.deadline(now)) {
    return Status{.code = Code::timeout};
  }
  if (now < next_check) {
    return Status{};
  }
  next_check = now + kCheckInterval;
  if (bounds.interrupted != nullptr && bounds.interrupted()) {
    return Status{.code = Code::interrupted};
  }
  return recheck_peers();
}

bool Mailbox::progress() {
  if (outstanding() == 0) {
    return false;
  }
  const bool moved = progress_channels();
  if (outstanding() != 0) {
    if (const Status status = failed_.ok() ? group_.failure() : failed_; !status.ok()) {
      // Messages that peers published before the group broke still count, and may have arrived
      // since.
      while (failed_.ok() && progress_channels()) {
      }
      fail_all(failed_.ok() ? status : failed_);
      return true;
    }
  }
  return moved;
}

bool Mailbox::progress_channels() {
  bool moved = false;
  for (int peer = 0; failed_.ok() && peer < group_.ranks(); ++peer) {
    moved = progress_sends(peer) || moved;
    moved = progress_recvs(peer) || moved;
  }
  return moved;
}

bool Mailbox::progress_for(const Message& message) {
  if (message.kind_ == Kind::send) {
    return progress_sends(message.peer_);
  }
  if (message.peer_ != kAnySource) {
    return progress_recvs(message.peer_);
  }
  return progress();
}

// A message of any source may come from this rank itself, even if all others have left. That is
// assumed to be possible once it has sent to itself, or once a second thread has posted anything.
void Mailbox::record_poster(int peer) {
  const std::thread::id self = std::this_thread::get_id();
  if (first_poster_ == std::thread::id()) {
    first_poster_ = self;
  }
  may_send_to_self_ = may_send_to_self_ || first_poster_ != self || peer == group_.rank();
}

void Mailbox::prefault(int peer) {
  const auto index = static_cast<std::size_t>(peer);
  if (prefaulted_[index]) {
    return;
  }
  prefaulted_[index] = true;
  PHALANX_STEP("send: prefault");
  Channel& channel = group_.segment().channel(group_.rank(), peer);
  Status status = phalanx::prefault(&channel, sizeof(Channel));
  if (!status.ok()) {
    status.reporter = group_.rank();
    (void)group_.abort(status);
  }
}

void Mailbox::finish(const MessagePtr& message, const Status& status) {
  if (!status.ok()) {
    message->failure_ = group_.failure_report();
    message->failure_.status = status;
  }
  complete(message);
}

void Mailbox::complete(const MessagePtr& message) {
  end_record(*message);
  outstanding_.fetch_sub(1, std::memory_order_seq_cst);
  // Publishes status, peer and data to other threads of this process; pairs with Message::done.
  message->done_.store(true, std::memory_order_release);
  if (message->watched_) {
    report(message);
  }
  notify(message_event(group_.rank()));
}

void Mailbox::fail_all(const Status& status) {
  failed_ = status;
  std::vector<MessagePtr> failed = matching_.take_all_receives();
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

// Ends a failed wait, and thereby breaks the group. Returns the status to report.
Status Mailbox::fail(const Message& message, Failure failure) {
  const MailboxLock lock(*this);
  Status& status = failure.status;
  if (status.reporter < 0) {  // not the failure of another operation, but the end of this wait
    failure.mine = message.fingerprint();
    status.reporter = group_.rank();
    status.peer = message.peer_;
  }
  if (!message.done()) {
    status = group_.abort(failure);
    fail_all(status);
  }
  return status;
}

Failure Mailbox::check_peer(int peer) const {
  const auto index = static_cast<std::size_t>(peer);
  MessagePtr message = incoming_[index].receiver;
  if (!message && !sends_[index].empty()) {
    message = sends_[index].front();
  }
  if (!message && !matching_.has_recv_from(peer)) {
    return Status{};
  }
  const Status status = group_.peer_status(peer);
  if (status.ok()) {
    return status;
  }
  // A rank that is leaving completes what it has posted: only new messages of it never come. This
  // rank gives them up by itself if it is leaving too.
  if (status.code == Code::left && group_.is_leaving(peer) &&
      (message != nullptr || group_.is_leaving(group_.rank()))) {
    return Status{};
  }
  return {status, (message ? message : matching_.any_recv_from(peer))->fingerprint()};
}

// A message of any source cannot come if all others have left, unless this rank may send to itself
// (record_poster). If one of the others has died, it may have been the intended sender.
Failure Mailbox::check_any_source() const {
  int left = 0;
  Failure last = Status{};
  for (int peer = 0; peer < group_.ranks(); ++peer) {
    const Status status = peer == group_.rank() ? group_.failure() : group_.peer_status(peer);
    if (status.ok()) {
      continue;
    }
    last = {status, matching_.any_recv_from(kAnySource)->fingerprint()};
    if (status.code != Code::left) {
      return last;
    }
    ++left;
  }
  const bool all_left = left + 1 == group_.ranks();
  const bool waits = !group_.is_leaving(group_.rank());  // otherwise it gives them up by itself
  return all_left && waits && !may_send_to_self_ && !expects_remote_ ? last : Status{};
}

Failure Mailbox::check_peers() {
  std::erase_if(watched_, [](const MessagePtr& message) { return message->done(); });
  for (const MessagePtr& message : watched_) {
    if (Clock::now() >= message->deadline_) {
      return {{.code = Code::timeout, .peer = message->peer_, .reporter = group_.rank()},
              message->fingerprint()};
    }
  }
  for (int peer = 0; peer < group_.ranks(); ++peer) {
    if (const Failure failure = check_peer(peer); !failure.status.ok()) {
      return failure;
    }
  }
  return matching_.has_recv_from(kAnySource) ? check_any_source() : Status{};
}

// The status after a second check. Messages that a peer published before it left or died still
// count, and may have arrived after the last check of its channel. While anything moves, the wait
// continues, and there will be another check.
Failure Mailbox::recheck_peers() {
  const MailboxLock lock(*this);
  if (check_peers().status.ok() || progress()) {
    return Status{};
  }
  end_unanswered_recvs();
  return check_peers();
}

// A recv to which a rank that has left has sent nothing, and for which nobody waits, ends alone: a
// server may have posted one for each of its clients, and goes on with those that remain.
void Mailbox::end_unanswered_recvs() {
  for (int peer = 0; peer < group_.ranks(); ++peer) {
    if (incoming_[static_cast<std::size_t>(peer)].receiver || !matching_.has_recv_from(peer)) {
      continue;
    }
    const Status status = check_peer(peer).status;
    if (status.code != Code::left || !group_.failure().ok()) {
      continue;
    }
    for (const MessagePtr& recv : matching_.take_unawaited_recvs(peer)) {
      recv->failure_ = {status, recv->fingerprint()};
      recv->unanswered_ = true;
      complete(recv);
    }
  }
}

// ---- moving bytes: through the channels, and to their receivers ----

bool Mailbox::progress_sends(int peer) {
  const auto index = static_cast<std::size_t>(peer);
  auto& queue = sends_[index];
  int pieces = 0;
  for (; pieces < kPiecesPerRound && !queue.empty(); ++pieces) {
    Message& message = *queue.front();
    const std::size_t left = message.bytes() - message.moved_;
    std::size_t moved = 0;
    if (message.begun_) {
      moved = senders_[index].write(message.data_ + message.moved_, left);
    } else {
      message.begun_ = senders_[index].begin(message.envelope(), message.data_, moved);
    }
    if (!message.begun_ || (moved == 0 && left != 0 && message.moved_ != 0)) {
      break;
    }
    message.moved_ += moved;
    notify_peer(message_event(peer));
    if (moved == left) {
      const MessagePtr done = std::move(queue.front());
      queue.pop_front();
      finish(done, {});
    } else if (moved == 0) {
      break;
    }
  }
  return pieces != 0;
}

bool Mailbox::progress_recvs(int peer) {
  const auto index = static_cast<std::size_t>(peer);
  Incoming& incoming = incoming_[index];
  ChannelReceiver& receiver = receivers_[index];
  int pieces = 0;
  for (; pieces < kPiecesPerRound && (incoming.begun || matching_.has_recv_for(peer)); ++pieces) {
    const bool begins = !incoming.begun;
    if (begins) {
      if (!receiver.has_message()) {
        break;
      }
      if (!begin_message(peer, incoming)) {
        fail_all(group_.failure());
        return true;
      }
    }
    const std::size_t bytes = incoming.envelope.bytes();
    std::size_t moved = 0;
    if (incoming.moved != bytes) {
      moved = receiver.read(incoming.target() + incoming.moved, bytes - incoming.moved, bytes);
    }
    if (moved == 0 && !begins) {
      break;
    }
    incoming.moved += moved;
    notify_peer(message_event(peer));
    if (incoming.moved == bytes) {
      end_message(peer, incoming);
    }
  }
  return pieces != 0;
}

// Begins the next message, which has been published. False if it does not match its recv, or if
// there is no memory for an unexpected one: the group is broken then.
bool Mailbox::begin_message(int peer, Incoming& incoming) {
  ChannelReceiver& receiver = receivers_[static_cast<std::size_t>(peer)];
  const Envelope envelope = receiver.next();
  incoming.receiver = matching_.match(peer, envelope.tag);
  if (incoming.receiver && !matches(*incoming.receiver, peer, envelope)) {
    return false;
  }
  if (!incoming.receiver) {
    incoming.buffer.reset(new (std::nothrow) std::byte[envelope.bytes()]);
    if (!incoming.buffer) {
      const int rank = group_.rank();
      (void)group_.abort(Status{.code = Code::out_of_memory, .reporter = rank, .error = ENOMEM});
      return false;
    }
    const std::size_t unexpected = matching_.unexpected_bytes() + envelope.bytes();
    if (unexpected > unexpected_peak_.load(std::memory_order_relaxed)) {
      unexpected_peak_.store(unexpected, std::memory_order_relaxed);
    }
  }
  incoming.begun = true;
  incoming.envelope = receiver.begin(incoming.target());
  incoming.moved = envelope.bytes() <= kSlotPayload ? envelope.bytes() : 0;
  return true;
}

void Mailbox::end_message(int peer, Incoming& incoming) {
  const MessagePtr receiver = std::move(incoming.receiver);
  if (!receiver) {
    matching_.add_unexpected(peer, {incoming.envelope, std::move(incoming.buffer)});
  } else if (incoming.buffer) {
    copy_bytes(receiver->data_, incoming.buffer.get(), incoming.envelope.bytes());
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
      copy_bytes(recv->data_, unexpected->data.get(), unexpected->envelope.bytes());
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
  (void)group_.abort({{.code = Code::mismatch, .peer = source, .reporter = group_.rank()},
                      message.fingerprint(),
                      theirs});
  return false;
}

// ---- the service thread ----

// The service thread makes progress on operations while no thread waits for
// them.
//
// Most operations are waited for soon after they are posted. So the thread is not woken for each,
// and does not compete with waiting threads. While operations are posted, it polls every
// millisecond, and takes over only if one is outstanding and no wait has begun since the last poll.
// After a while without new operations it sleeps until the next one wakes it.

std::vector<MessagePtr> Mailbox::serve() {
  std::unique_lock lock(service_mutex_);
  while (!stopped_.load(std::memory_order_seq_cst) && pending_reports_.empty()) {
    idle(lock);
    const bool no_new_waits = waits_.load(std::memory_order_relaxed) == waits_seen_;
    if (!should_yield() && (std::exchange(service_now_, false) || no_new_waits)) {
      lock.unlock();
      service();
      lock.lock();
    }
  }
  if (stopped_.load(std::memory_order_seq_cst)) {
    return {};
  }
  has_reports_.store(false, std::memory_order_seq_cst);
  return std::exchange(pending_reports_, {});
}

bool Mailbox::should_yield() const {
  // Pair with the stores of threads that post, wait, finish and stop.
  return stopped_.load(std::memory_order_seq_cst) || has_reports_.load(std::memory_order_seq_cst) ||
         outstanding() == 0 || waiters_.load(std::memory_order_seq_cst) != 0;
}

void Mailbox::idle(std::unique_lock<std::mutex>& lock) {
  const std::uint64_t detached = detached_.load(std::memory_order_relaxed);
  idle_polls_ = detached == detached_seen_ ? idle_polls_ + 1 : 0;
  detached_seen_ = detached;
  waits_seen_ = waits_.load(std::memory_order_relaxed);
  if (idle_polls_ <= kIdlePollsBeforeSleep || !should_yield()) {
    service_event_.wait_for(lock, kPollInterval);
    return;
  }
  // Pairs with the load in wake(): either that load sees that this thread must be woken, or this
  // thread sees the reason here.
  asleep_.store(true, std::memory_order_seq_cst);
  if (should_yield() && !service_now_ && pending_reports_.empty() &&
      !stopped_.load(std::memory_order_seq_cst)) {
    service_event_.wait(lock);
  }
  asleep_.store(false, std::memory_order_seq_cst);
  idle_polls_ = 0;
  --waits_seen_;  // not a count of waits: forces a poll next
}

void Mailbox::wake() {
  if (asleep_.load(std::memory_order_seq_cst)) {
    const std::lock_guard service_lock(
        service_mutex_);  // so that it sleeps already, or checks again
    service_event_.notify_one();
  }
}

void Mailbox::service() {
  SpinPolicy spin_policy = SpinPolicy::no_spin();  // computing threads need the core
  const auto ready = [this] { return should_yield() || try_progress(); };
  Failure failure = Status{};
  const auto peer_status = [&] {
    failure = recheck_peers();
    return failure.status;
  };
  while (!should_yield()) {
    const Status status =
        wait_until(message_event(group_.rank()), spin_policy, Bounds{}, ready, peer_status);
    if (!status.ok()) {
      const MailboxLock lock(*this);
      fail_all(group_.abort(failure));
    }
  }
}

void Mailbox::stop() {
  {
    const std::lock_guard service_lock(service_mutex_);
    stopped_.store(true, std::memory_order_seq_cst);
    service_event_.notify_all();
  }
  notify_always(message_event(group_.rank()));
}

void Mailbox::watch(const MessagePtr& message, Clock::time_point deadline) {
  const MailboxLock lock(*this);
  if (std::exchange(message->watched_, true)) {
    return;
  }
  if (message->done()) {
    report(message);
    return;
  }
  message->deadline_ = deadline;
  watched_.push_back(message);
  const std::lock_guard service_lock(service_mutex_);
  service_now_ = true;
  service_event_.notify_one();
}

void Mailbox::report(const MessagePtr& message) {
  {
    const std::lock_guard service_lock(service_mutex_);
    pending_reports_.push_back(message);
    // Pairs with the load in should_yield().
    has_reports_.store(true, std::memory_order_seq_cst);
    service_event_.notify_one();
  }
  notify(message_event(group_.rank()));  // on either event that serve() sleeps on
}

// ---- records in the flight recorder ----

MessagePtr Mailbox::begin_remote(Kind kind, std::size_t count, DType dtype,
                                 std::int16_t global_rank, std::int32_t tag) {
  auto message = std::make_shared<Message>(kind, nullptr, count, dtype, kAnySource, tag);
  message->global_rank_ = global_rank;
  const MailboxLock lock(*this);
  begin_record(*message);
  return message;
}

void Mailbox::begin_remote_wait(Message& message) {
  const MailboxLock lock(*this);
  begin_wait(message);
}

void Mailbox::end_remote(Message& message, Code outcome, std::int16_t global_rank) {
  const MailboxLock lock(*this);
  if (!message.done()) {
    message.global_rank_ = global_rank;
    message.failure_.status.code = outcome;
    end_record(message);
    message.done_.store(true, std::memory_order_release);  // pairs with Message::done
  }
}

std::int16_t Mailbox::global_rank_of(const Message& message) const {
  return message.global_rank_ >= 0 ? message.global_rank_ : group_.global_rank(message.peer_);
}

void Mailbox::begin_record(Message& message) {
  // Only the first operation that a broken group refuses is recorded; see Group::refuse.
  if (group_.recorder_ != nullptr && failed_.ok()) {
    message.record_ = group_.record_of(message.fingerprint());
    message.record_.peer = global_rank_of(message);
    message.slot_ = group_.recorder_->begin(message.record_);
  }
}

void Mailbox::begin_wait(Message& message) {
  if (message.record_.number == 0 || message.done()) {
    return;
  }
  message.wait_began_ = RecordClock::now();
  message.record_.waiting_for = global_rank_of(message);
  if (message.slot_ >= 0) {
    group_.recorder_->waiting_for(message.slot_, message.record_);
  }
}

void Mailbox::end_record(Message& message) {
  Record& record = message.record_;
  if (record.number == 0) {
    return;
  }
  record.end = std::max(record.begin, RecordClock::now());
  record.outcome = message.failure_.status.code;
  record.peer = global_rank_of(message);
  if (message.wait_began_ != 0) {
    record.waited = record.end - message.wait_began_;
    record.waiting_for = record.peer;
  }
  group_.recorder_->end(message.slot_, record);
}

}  // namespace phalanx
