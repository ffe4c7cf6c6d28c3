// The flight recorder's records of messages.
#include "mailbox_lock.h"
#include "phalanx/mailbox.h"

namespace phalanx {

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
    message.status_.code = outcome;
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
    message.record_ = group_.record_of(message.fingerprint(), {});
    message.record_.peer = global_rank_of(message);
    message.slot_ = group_.recorder_->begin(message.record_);
  }
}

void Mailbox::begin_wait(Message& message) {
  if (message.record_.number == 0 || message.done()) {
    return;
  }
  message.wait_began_ = nanoseconds(Clock::now());
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
  record.end = nanoseconds(Clock::now());
  record.outcome = message.status_.code;
  record.peer = global_rank_of(message);
  if (message.wait_began_ != 0) {
    record.waited = record.end - message.wait_began_;
    record.waiting_for = record.peer;
  }
  group_.recorder_->end(message.slot_, record);
}

}  // namespace phalanx
