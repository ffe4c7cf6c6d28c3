#pragma once

#include <mutex>

#include "phalanx/mailbox.h"

namespace phalanx {

// Holds the mutex of a mailbox.
//
// Who posts waits for it; who drives lets it go after each turn, and those who post come first. Who
// waits for a message only tries, since somebody else may drive all operations for a long time, and
// its own may be done, or its deadline come, in between. What a try would have found is not lost:
// `missed_` makes whoever holds the mutex ring the rank's own bell after it, and the order is that
// of an event count (see wait.h):
//   try:      missed = true; if (!try_lock()) sleep on the bell
//   holder:   unlock; if (missed) ring the bell
// A try that fails comes before the unlock, so its store of `missed_` does too.
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
  // Who wants it has not got it yet, so a later unlock is sure.
  bool try_lock() {
    return mailbox_.lock_waiters_.load(std::memory_order_seq_cst) == 0 &&
           mailbox_.mutex_.try_lock();
  }

  Mailbox& mailbox_;
  bool owns_;
};

}  // namespace phalanx
