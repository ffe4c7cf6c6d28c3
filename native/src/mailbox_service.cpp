// What the service thread of a mailbox does: operations go on while nobody waits for them.
//
// Most are waited for soon after they were posted. So the thread isn't woken for each, and doesn't
// stand in the way of who waits: while operations come, it glances every millisecond, and takes
// over only when one is outstanding and nobody has waited for a whole glance. When none has come
// for a while it dozes, and then the next one wakes it.
#include <utility>

#include "mailbox_hold.h"
#include "phalanx/mailbox.h"

namespace phalanx {
namespace {

constexpr auto kGlance = std::chrono::milliseconds(1);
constexpr int kGlancesBeforeDoze = 100;

}  // namespace

std::vector<MessagePtr> Mailbox::serve() {
  std::unique_lock idle(idle_mutex_);
  while (!stopped_.load(std::memory_order_seq_cst) && to_report_.empty()) {
    rest(idle);
    const bool unattended = waits_.load(std::memory_order_relaxed) == waits_seen_;
    if (!relieved() && (std::exchange(hurry_, false) || unattended)) {
      idle.unlock();
      attend();
      idle.lock();
    }
  }
  if (stopped_.load(std::memory_order_seq_cst)) {
    return {};
  }
  reports_.store(false, std::memory_order_seq_cst);
  return std::exchange(to_report_, {});
}

bool Mailbox::relieved() const {
  // Pair with the stores of those who post, wait, finish and stop.
  return stopped_.load(std::memory_order_seq_cst) || reports_.load(std::memory_order_seq_cst) ||
         outstanding() == 0 || waiters_.load(std::memory_order_seq_cst) != 0;
}

void Mailbox::rest(std::unique_lock<std::mutex>& idle) {
  const std::uint64_t detached = detached_.load(std::memory_order_relaxed);
  quiet_glances_ = detached == detached_seen_ ? quiet_glances_ + 1 : 0;
  detached_seen_ = detached;
  waits_seen_ = waits_.load(std::memory_order_relaxed);
  if (quiet_glances_ <= kGlancesBeforeDoze || !relieved()) {
    idle_.wait_for(idle, kGlance);
    return;
  }
  // Pairs with the load in rouse(): either that sees that it has to wake this thread, or the thread
  // sees here why.
  dozing_.store(true, std::memory_order_seq_cst);
  if (relieved() && !hurry_ && to_report_.empty() && !stopped_.load(std::memory_order_seq_cst)) {
    idle_.wait(idle);
  }
  dozing_.store(false, std::memory_order_seq_cst);
  quiet_glances_ = 0;
  --waits_seen_;  // no count of waits: the next thing is a glance
}

void Mailbox::rouse() {
  if (dozing_.load(std::memory_order_seq_cst)) {
    const std::lock_guard idle(idle_mutex_);  // so that it sleeps already, or looks again
    idle_.notify_one();
  }
}

void Mailbox::attend() {
  Patience patience = Patience::none();  // who computes meanwhile needs the core
  const auto ready = [this] { return relieved() || try_drive(); };
  const auto troubled = [this] { return settled_trouble(); };
  while (!relieved()) {
    const Status status = wait_until(bell(group_.rank()), patience, Bounds{}, ready, troubled);
    if (!status.ok()) {
      const Hold hold(*this);
      fail_all(group_.abort(status));
    }
  }
}

void Mailbox::stop() {
  {
    const std::lock_guard idle(idle_mutex_);
    stopped_.store(true, std::memory_order_seq_cst);
    idle_.notify_all();
  }
  notify_always(bell(group_.rank()));
}

void Mailbox::watch(const MessagePtr& message, Clock::time_point deadline) {
  const Hold hold(*this);
  if (std::exchange(message->watched_, true)) {
    return;
  }
  if (message->done()) {
    report(message);
    return;
  }
  message->deadline_ = deadline;
  watched_.push_back(message);
  const std::lock_guard idle(idle_mutex_);
  hurry_ = true;
  idle_.notify_one();
}

void Mailbox::report(const MessagePtr& message) {
  {
    const std::lock_guard idle(idle_mutex_);
    to_report_.push_back(message);
    // Pairs with the load in relieved().
    reports_.store(true, std::memory_order_seq_cst);
    idle_.notify_one();
  }
  notify(bell(group_.rank()));  // wherever serve() sleeps
}

}  // namespace phalanx
