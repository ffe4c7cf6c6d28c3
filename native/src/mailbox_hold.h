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
class Mailbox::Hold {
 public:
  explicit Hold(Mailbox& mailbox) : mailbox_(mailbox), held_(true) {
    if (!mailbox_.mutex_.try_lock()) {
      mailbox_.wanted_.fetch_add(1, std::memory_order_seq_cst);
      mailbox_.mutex_.lock();
      mailbox_.wanted_.fetch_sub(1, std::memory_order_seq_cst);
    }
  }
  Hold(Mailbox& mailbox, std::try_to_lock_t) : mailbox_(mailbox), held_(try_lock()) {
    if (!held_) {
      // Pairs with the exchange below.
      mailbox_.missed_.store(true, std::memory_order_seq_cst);
      held_ = try_lock();
    }
  }
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;
  ~Hold() {
    if (!held_) {
      return;
    }
    mailbox_.mutex_.unlock();
    if (mailbox_.missed_.load(std::memory_order_seq_cst) &&
        mailbox_.missed_.exchange(false, std::memory_order_seq_cst)) {
      notify(mailbox_.bell(mailbox_.group_.rank()));
    }
  }

  bool held() const { return held_; }

 private:
  // Who wants it has not got it yet, so a later unlock is sure.
  bool try_lock() {
    return mailbox_.wanted_.load(std::memory_order_seq_cst) == 0 && mailbox_.mutex_.try_lock();
  }

  Mailbox& mailbox_;
  bool held_;
};

}  // namespace phalanx
