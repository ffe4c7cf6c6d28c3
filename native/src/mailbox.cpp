// The half of the mailbox that keeps its books: posting, waiting, serving, failing. The other half,
// which moves bytes, is mailbox_traffic.cpp.
#include "phalanx/mailbox.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <utility>

namespace phalanx {
namespace {

// How soon serve() sees an operation that nobody waits for, and for how long it expects more.
constexpr auto kGlance = std::chrono::milliseconds(1);
constexpr auto kWatchful = std::chrono::milliseconds(100);

}  // namespace

Mailbox::Mailbox(Group& group)
    : group_(group),
      patience_(group.ranks()),
      sends_(static_cast<std::size_t>(group.ranks())),
      incoming_(static_cast<std::size_t>(group.ranks())),
      early_(static_cast<std::size_t>(group.ranks())),
      prefaulted_(static_cast<std::size_t>(group.ranks())) {}

MessagePtr Mailbox::send(const void* data, std::size_t count, DType dtype, int destination,
                         std::int32_t tag, bool detached) {
  const std::lock_guard lock(mutex_);
  auto message = std::make_shared<Message>();
  message->kind_ = Kind::send;
  message->peer_ = destination;
  message->tag_ = tag;
  // Never written through: the buffer of a send is only read.
  message->data_ = static_cast<std::byte*>(const_cast<void*>(data));
  message->count_ = count;
  message->dtype_ = dtype;
  const auto index = static_cast<std::size_t>(destination);
  if (!prefaulted_[index]) {
    Status status = group_.segment().prefault(&to(destination), sizeof(Channel));
    if (!status.ok()) {
      status.reporter = group_.rank();
      fail_all(group_.abort(status));
    }
    prefaulted_[index] = true;
  }
  ++outstanding_;
  sends_[index].push_back(message);
  return post(std::move(message), detached);
}

MessagePtr Mailbox::recv(void* data, std::size_t count, DType dtype, int source, std::int32_t tag,
                         bool detached) {
  const std::lock_guard lock(mutex_);
  auto message = std::make_shared<Message>();
  message->kind_ = Kind::recv;
  message->peer_ = source;
  message->tag_ = tag;
  message->data_ = static_cast<std::byte*>(data);
  message->count_ = count;
  message->dtype_ = dtype;
  ++outstanding_;
  if (failed_ || !take_early(message)) {
    recvs_.push_back(message);
  }
  return post(std::move(message), detached);
}

MessagePtr Mailbox::post(MessagePtr message, bool detached) {
  message->id_ = ++posted_;
  if (const Status status = group_.broken(); !status.ok()) {
    fail_all(status);
  }
  drive();
  if (detached && !message->done()) {
    last_detached_ = Clock::now();
    rouse();
  }
  return message;
}

Status Mailbox::wait(Message& message, const Bounds& bounds) {
  if (message.done()) {
    return message.status();
  }
  std::unique_lock lock(mutex_);
  ++waiters_;
  Patience patience = patience_;
  lock.unlock();
  const auto ready = [&] {
    const std::lock_guard guard(mutex_);
    drive();
    return message.done();
  };
  const auto trouble = [&] {
    const std::lock_guard guard(mutex_);
    return settled_trouble();
  };
  Status status = wait_until(bell(group_.rank()), patience, bounds, ready, trouble);
  lock.lock();
  patience_ = patience;
  if (!status.ok() && !message.done()) {
    if (status.reporter < 0) {  // not the trouble of some operation, but the end of this one's wait
      status.mine = message.fingerprint();
      status.reporter = group_.rank();
      status.peer = message.peer_;
    }
    status = group_.abort(status);
    fail_all(status);
  }
  --waiters_;
  if (waiters_ == 0 && outstanding_ > 0) {
    rouse();
  }
  return status.code == Code::interrupted ? status : message.status();
}

std::vector<MessagePtr> Mailbox::serve() {
  std::unique_lock lock(mutex_);
  const auto relieved = [this] {
    return stopped_ || !to_report_.empty() || outstanding_ == 0 || waiters_ > 0;
  };
  while (!stopped_ && to_report_.empty()) {
    if (relieved()) {
      rest(lock);
      continue;
    }
    Patience patience(kMaxRanks);  // never in a hurry: somebody else may need the core
    lock.unlock();
    const auto ready = [&] {
      const std::lock_guard guard(mutex_);
      drive();
      return relieved();
    };
    const auto problem = [&] {
      const std::lock_guard guard(mutex_);
      return settled_trouble();
    };
    const Status status = wait_until(bell(group_.rank()), patience, Bounds{}, ready, problem);
    lock.lock();
    if (!status.ok()) {
      fail_all(group_.abort(status));
    }
  }
  return stopped_ ? std::vector<MessagePtr>{} : std::exchange(to_report_, {});
}

// Most isends are waited for at once: waking a thread for each would cost more than the message. So
// while such come, the thread looks by itself every millisecond, and only later needs to be woken.
void Mailbox::rest(std::unique_lock<std::mutex>& lock) {
  if (Clock::now() - last_detached_ < kWatchful) {
    idle_.wait_for(lock, kGlance);
    return;
  }
  dozing_ = true;
  idle_.wait(lock);
  dozing_ = false;
}

void Mailbox::rouse() {
  if (dozing_) {
    idle_.notify_one();
  }
}

void Mailbox::stop() {
  const std::lock_guard lock(mutex_);
  stopped_ = true;
  idle_.notify_all();
  notify_always(bell(group_.rank()));
}

void Mailbox::watch(const MessagePtr& message) {
  const std::lock_guard lock(mutex_);
  if (!std::exchange(message->watched_, true) && message->done()) {
    to_report_.push_back(message);
  }
  // Wherever serve() sleeps.
  idle_.notify_one();
  notify(bell(group_.rank()));
}

std::size_t Mailbox::outstanding() {
  const std::lock_guard lock(mutex_);
  return outstanding_;
}

void Mailbox::drive() {
  if (outstanding_ == 0) {
    return;
  }
  if (failed_) {
    fail_all(group_.broken());
    return;
  }
  for (int peer = 0; peer < group_.ranks(); ++peer) {
    drive_sends(peer);
    drive_recvs(peer);
  }
  if (outstanding_ != 0) {
    if (const Status status = group_.broken(); !status.ok()) {
      fail_all(status);
    }
  }
}

void Mailbox::finish(const MessagePtr& message, const Status& status) {
  message->status_ = status;
  --outstanding_;
  // Publishes status, peer and data to other threads of this process; pairs with Message::done.
  message->done_.store(true, std::memory_order_seq_cst);
  if (message->watched_) {
    to_report_.push_back(message);
    idle_.notify_one();
  }
  notify(bell(group_.rank()));
}

void Mailbox::fail_all(const Status& status) {
  failed_ = true;
  std::vector<MessagePtr> failed(recvs_.begin(), recvs_.end());
  recvs_.clear();
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

Status Mailbox::trouble_with(const Message& message) const {
  if (message.peer_ != kAnySource) {
    return group_.trouble_with(message.peer_);
  }
  int left = 0;
  Status last;
  for (int peer = 0; peer < group_.ranks(); ++peer) {
    const Status status = peer == group_.rank() ? group_.broken() : group_.trouble_with(peer);
    if (status.code == Code::left) {
      ++left;
      last = status;
    } else if (!status.ok()) {
      return status;
    }
  }
  return left + 1 == group_.ranks() ? last : Status{};
}

Status Mailbox::trouble() const {
  const auto of = [this](const MessagePtr& message) {
    Status status = trouble_with(*message);
    status.mine = message->fingerprint();
    return status;
  };
  for (const auto& queue : sends_) {
    if (!queue.empty()) {
      if (const Status status = of(queue.front()); !status.ok()) {
        return status;
      }
    }
  }
  for (const MessagePtr& message : recvs_) {
    if (const Status status = of(message); !status.ok()) {
      return status;
    }
  }
  for (const Incoming& incoming : incoming_) {
    if (incoming.receiver) {
      if (const Status status = of(incoming.receiver); !status.ok()) {
        return status;
      }
    }
  }
  return {};
}

// The trouble that remains after a second look. What a peer published before it left or died still
// counts, and may have come after the last look at its channel.
Status Mailbox::settled_trouble() {
  if (const Status status = trouble(); status.ok()) {
    return status;
  }
  drive();
  return trouble();
}

}  // namespace phalanx
