#pragma once

#include <mutex>

#include "phalanx/mailbox.h"

namespace phalanx {

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

}  // namespace phalanx
