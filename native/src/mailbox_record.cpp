// What the flight recorder says of messages.
#include "mailbox_hold.h"
#include "phalanx/mailbox.h"

namespace phalanx {

MessagePtr Mailbox::begin_foreign(Kind kind, std::size_t count, DType dtype, std::int16_t name,
                                  std::int32_t tag) {
  auto message = std::make_shared<Message>(kind, nullptr, count, dtype, kAnySource, tag);
  message->name_ = name;
  const Hold hold(*this);
  begin_record(*message);
  return message;
}

void Mailbox::foreign_waits(Message& message) {
  const Hold hold(*this);
  show_wait(message);
}

void Mailbox::end_foreign(Message& message, Code outcome, std::int16_t name) {
  const Hold hold(*this);
  if (!message.done()) {
    message.name_ = name;
    message.status_.code = outcome;
    end_record(message);
    message.done_.store(true, std::memory_order_release);  // pairs with Message::done
  }
}

std::int16_t Mailbox::name_of(const Message& message) const {
  return message.name_ >= 0 ? message.name_ : group_.name_of(message.peer_);
}

void Mailbox::begin_record(Message& message) {
  // Of what a broken group refuses the first is enough; see Group::refuse.
  if (group_.box_ != nullptr && failed_.ok()) {
    message.record_ = group_.record_of(message.fingerprint(), {});
    message.record_.peer = name_of(message);
    message.place_ = group_.box_->begin(message.record_);
  }
}

void Mailbox::show_wait(Message& message) {
  if (message.record_.number == 0 || message.done()) {
    return;
  }
  message.wait_began_ = nanoseconds(Clock::now());
  message.record_.waiting_for = name_of(message);
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
  record.peer = name_of(message);
  if (message.wait_began_ != 0) {
    record.waited = record.end - message.wait_began_;
    record.waiting_for = record.peer;
  }
  group_.box_->end(message.place_, record);
}

}  // namespace phalanx
