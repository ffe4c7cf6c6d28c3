// What the black box says of messages.
#include "phalanx/mailbox.h"

namespace phalanx {

void Mailbox::begin_record(Message& message) {
  // Of what a broken group refuses the first is enough; see Group::refuse.
  if (group_.box_ != nullptr && failed_.ok()) {
    message.record_ = group_.record_of(message.fingerprint(), {});
    message.record_.peer = group_.name_of(message.peer_);
    message.place_ = group_.box_->begin(message.record_);
  }
}

void Mailbox::show_wait(Message& message) {
  if (message.record_.number == 0 || message.done()) {
    return;
  }
  message.wait_began_ = nanoseconds(Clock::now());
  message.record_.waiting_for = group_.name_of(message.peer_);
  if (message.place_ >= 0) {
    group_.box_->waiting_for(message.place_, message.record_);
  }
}

void Mailbox::end_record(Message& message) {
  Record& record = message.record_;
  if (record.number == 0) {
    return;
  }
  record.end = nanoseconds(Clock::now());
  record.outcome = message.status_.code;
  record.peer = message.name_ >= 0 ? message.name_ : group_.name_of(message.peer_);
  if (message.wait_began_ != 0) {
    record.waited = record.end - message.wait_began_;
    record.waiting_for = record.peer;
  }
  group_.box_->end(message.place_, record);
}

}  // namespace phalanx
