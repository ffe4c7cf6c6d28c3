// The part of the mailbox that posts, waits and fails. mailbox_progress.cpp moves bytes, and
// mailbox_service.cpp is the service thread.
#include "phalanx/mailbox.h"

#include <algorithm>
#include <utility>

#include "mailbox_lock.h"

namespace phalanx {
namespace {

// The interval of checks in a wait during which messages move all the time.
constexpr auto kCheckInterval = std::chrono::milliseconds(100);

}  // namespace

Mailbox::Mailbox(Group& group)
    : group_(group),
      sends_(static_cast<std::size_t>(group.ranks())),
      matching_(group.ranks()),
      incoming_(static_cast<std::size_t>(group.ranks())),
      prefaulted_(static_cast<std::size_t>(group.ranks())),
      spin_policy_(group.ranks()) {}

MessagePtr Mailbox::send(const void* data, std::size_t count, DType dtype, int destination,
                         std::int32_t tag, bool detached) {
  // Never written through: the buffer of a send is only read.
  auto* bytes = static_cast<std::byte*>(const_cast<void*>(data));
  return post(std::make_shared<Message>(Kind::send, bytes, count, dtype, destination, tag),
              detached);
}

MessagePtr Mailbox::recv(void* data, std::size_t count, DType dtype, int source, std::int32_t tag,
                         bool detached) {
  auto* bytes = static_cast<std::byte*>(data);
  return post(std::make_shared<Message>(Kind::recv, bytes, count, dtype, source, tag), detached);
}

MessagePtr Mailbox::post(MessagePtr message, bool detached) {
  {
    const MailboxLock lock(*this);
    message->id_ = ++posted_;
    record_poster(*message);
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
    return message.status();
  }
  waits_.fetch_add(1, std::memory_order_relaxed);
  waiters_.fetch_add(1, std::memory_order_seq_cst);
  SpinPolicy spin_policy = [&] {
    const MailboxLock lock(*this);
    begin_wait(message);
    return spin_policy_;
  }();
  auto next_check = Clock::now() + kCheckInterval;
  const auto ready = [&] { return message.done() || try_progress() || message.done(); };
  const auto peer_status = [&] { return recheck_peers(); };
  Status status;
  // Each wait ends when anything moves, so that a long message is awaited piece by piece.
  while (status.ok() && !message.done()) {
    status = wait_until(message_event(group_.rank()), spin_policy, bounds, ready, peer_status);
    if (status.ok() && !message.done()) {
      status = check_wait(bounds, next_check);
    }
  }
  if (!status.ok()) {
    status = fail(message, status);
  }
  {
    const MailboxLock lock(*this);
    spin_policy_ = spin_policy;
  }
  // seq_cst: pairs with the loads in idle().
  if (waiters_.fetch_sub(1, std::memory_order_seq_cst) == 1 && outstanding() != 0) {
    wake();
  }
  return status.code == Code::interrupted ? status : message.status();
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

Status Mailbox::check_wait(const Bounds& bounds, Clock::time_point& next_check) {
  const auto now = Clock::now();
  if (now >= bounds.deadline) {
    return {.code = Code::timeout};
  }
  if (now < next_check) {
    return {};
  }
  next_check = now + kCheckInterval;
  if (bounds.interrupted != nullptr && bounds.interrupted()) {
    return {.code = Code::interrupted};
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
void Mailbox::record_poster(const Message& message) {
  const std::thread::id self = std::this_thread::get_id();
  if (first_poster_ == std::thread::id()) {
    first_poster_ = self;
  }
  may_send_to_self_ = may_send_to_self_ || first_poster_ != self || message.peer_ == group_.rank();
}

void Mailbox::prefault(int peer) {
  const auto index = static_cast<std::size_t>(peer);
  if (prefaulted_[index]) {
    return;
  }
  prefaulted_[index] = true;
  PHALANX_STEP("send: prefault");
  Status status = group_.segment().prefault(&send_channel(peer), sizeof(Channel));
  if (!status.ok()) {
    status.reporter = group_.rank();
    (void)group_.abort(status);
  }
}

void Mailbox::finish(const MessagePtr& message, const Status& status) {
  message->status_ = status;
  end_record(*message);
  outstanding_.fetch_sub(1, std::memory_order_seq_cst);
  // Publishes status, peer and data to other threads of this process; pairs with Message::done.
  // seq_cst for the sake of notify.
  message->done_.store(true, std::memory_order_seq_cst);
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
Status Mailbox::fail(const Message& message, Status status) {
  const MailboxLock lock(*this);
  if (status.reporter < 0) {  // not the failure of another operation, but the end of this wait
    status.mine = message.fingerprint();
    status.reporter = group_.rank();
    status.peer = message.peer_;
  }
  if (!message.done()) {
    status = group_.abort(status);
    fail_all(status);
  }
  return status;
}

Status Mailbox::check_peer(int peer) const {
  const auto index = static_cast<std::size_t>(peer);
  MessagePtr message = incoming_[index].receiver;
  if (!message && !sends_[index].empty()) {
    message = sends_[index].front();
  }
  if (!message && !matching_.has_recv_from(peer)) {
    return {};
  }
  Status status = group_.peer_status(peer);
  if (!status.ok()) {
    status.mine = (message ? message : matching_.any_recv_from(peer))->fingerprint();
  }
  return status;
}

// A message of any source cannot come if all others have left, unless this rank may send to itself
// (record_poster). If one of the others has died, it may have been the intended sender.
Status Mailbox::check_any_source() const {
  int left = 0;
  Status last;
  for (int peer = 0; peer < group_.ranks(); ++peer) {
    Status status = peer == group_.rank() ? group_.failure() : group_.peer_status(peer);
    if (status.ok()) {
      continue;
    }
    status.mine = matching_.any_recv_from(kAnySource)->fingerprint();
    if (status.code != Code::left) {
      return status;
    }
    ++left;
    last = status;
  }
  return left + 1 == group_.ranks() && !may_send_to_self_ && !expects_remote_ ? last : Status{};
}

Status Mailbox::check_peers() {
  std::erase_if(watched_, [](const MessagePtr& message) { return message->done(); });
  for (const MessagePtr& message : watched_) {
    if (Clock::now() >= message->deadline_) {
      return {.code = Code::timeout,
              .peer = message->peer_,
              .reporter = group_.rank(),
              .mine = message->fingerprint()};
    }
  }
  for (int peer = 0; peer < group_.ranks(); ++peer) {
    if (const Status status = check_peer(peer); !status.ok()) {
      return status;
    }
  }
  return matching_.has_recv_from(kAnySource) ? check_any_source() : Status{};
}

// The status after a second check. Messages that a peer published before it left or died still
// count, and may have arrived after the last check of its channel. While anything moves, the wait
// continues, and there will be another check.
Status Mailbox::recheck_peers() {
  const MailboxLock lock(*this);
  if (const Status status = check_peers(); status.ok() || progress()) {
    return {};
  }
  return check_peers();
}

}  // namespace phalanx
