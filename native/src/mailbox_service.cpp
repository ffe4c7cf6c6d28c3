// The service thread of a mailbox, which makes progress on operations while no thread waits for
// them.
//
// Most operations are waited for soon after they are posted. So the thread is not woken for each,
// and does not compete with waiting threads. While operations are posted, it polls every
// millisecond, and takes over only if one is outstanding and no wait has begun since the last poll.
// After a while without new operations it sleeps until the next one wakes it.
#include <utility>

#include "mailbox_lock.h"
#include "phalanx/mailbox.h"

namespace phalanx {
namespace {

constexpr auto kPollInterval = std::chrono::milliseconds(1);
constexpr int kIdlePollsBeforeSleep = 100;

}  // namespace

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
  const auto peer_status = [this] { return recheck_peers(); };
  while (!should_yield()) {
    const Status status =
        wait_until(message_event(group_.rank()), spin_policy, Bounds{}, ready, peer_status);
    if (!status.ok()) {
      const MailboxLock lock(*this);
      fail_all(group_.abort(status));
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

}  // namespace phalanx
