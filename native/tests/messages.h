// Common parts of the tests of the mailbox: messages with known content, and the thread that serves
// a mailbox.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "ranks.h"

namespace messages {

using namespace phalanx;
using ranks::Rank;
using ranks::within;

// A message is identified by source, destination, tag, and its number among those. They determine
// its size and bytes.
struct MessageId {
  int source, destination, tag;
  int number = 0;

  std::uint64_t hash() const {
    std::uint64_t x = ranks::seed;
    for (const int part : {source, destination, tag, number}) {
      x = (x ^ static_cast<std::uint64_t>(part + 1)) * 0x9e3779b97f4a7c15;
      x ^= x >> 29;
    }
    return x;
  }
  std::size_t size() const {
    const std::uint64_t x = hash();
    switch (x % 16) {
      case 0: return 0;
      case 1: return 64 * (x >> 8 & 7);
      case 2: return kRingBytes - 128 + (x >> 8) % 256;
      case 3: return (x >> 8) % (2 * kRingBytes);
      case 4: return (x >> 8) % 40'000;
      default: return (x >> 8) % 300;
    }
  }
  std::byte byte(std::size_t i) const {
    return static_cast<std::byte>((hash() + i * 0x9e3779b9) >> 16);
  }
};

// The bytes of a message, or poison in their place, between guards.
struct TestMessage {
  TestMessage(const MessageId& its_id, bool filled)
      : id(its_id), bytes(its_id.size() + 2 * kGuard, std::byte{0xa5}) {
    for (std::size_t i = 0; filled && i < id.size(); ++i) data()[i] = id.byte(i);
  }
  std::byte* data() { return bytes.data() + kGuard; }
  bool intact() const {
    for (std::size_t i = 0; i < bytes.size(); ++i) {
      const bool inside = i >= kGuard && i < bytes.size() - kGuard;
      if (bytes[i] != (inside ? id.byte(i - kGuard) : std::byte{0xa5})) return false;
    }
    return true;
  }

  static constexpr std::size_t kGuard = 32;
  MessageId id;
  std::vector<std::byte> bytes;
  MessagePtr message;
};

inline void post_send(Rank& rank, TestMessage& message, bool detached = false) {
  message.message = rank.mailbox.isend(message.data(), message.id.size(), DType::uint8,
                                       message.id.destination, message.id.tag, detached);
}

inline void post_recv(Rank& rank, TestMessage& message, bool detached = false) {
  message.message = rank.mailbox.irecv(message.data(), message.id.size(), DType::uint8,
                                       message.id.source, message.id.tag, detached);
}

inline bool arrived(Rank& rank, TestMessage& message) {
  const Status status = rank.mailbox.wait(*message.message, within());
  const MessageId& id = message.id;
  const int peer = id.source == rank.self ? id.destination : id.source;
  if (CHECK(status.ok()) && CHECK_EQ(message.message->peer(), peer) && CHECK(message.intact())) {
    return true;
  }
  std::fprintf(stderr, "  at rank %d: %d -> %d tag %d number %d size %zu: code %d about %d by %d\n",
               rank.self, id.source, id.destination, id.tag, id.number, id.size(),
               static_cast<int>(status.code), status.peer, status.reporter);
  return false;
}

// The service thread, which makes progress on messages without waiters.
class Server {
 public:
  explicit Server(Mailbox& mailbox) : mailbox_(mailbox), thread_([this] { run(); }) {}
  ~Server() {
    mailbox_.stop();
    thread_.join();
  }
  std::size_t reported() const { return reported_; }
  bool reported_twice() const { return twice_; }

 private:
  void run() {
    std::vector<std::uint64_t> seen;
    for (auto done = mailbox_.serve(); !done.empty(); done = mailbox_.serve()) {
      for (const MessagePtr& message : done) {
        CHECK(message->done());
        if (std::find(seen.begin(), seen.end(), message->id()) != seen.end()) twice_ = true;
        seen.push_back(message->id());
        ++reported_;
      }
    }
  }

  Mailbox& mailbox_;
  std::atomic<std::size_t> reported_ = 0;
  std::atomic<bool> twice_ = false;
  std::thread thread_;
};

inline Status wait_for(Rank& rank, const MessagePtr& message, const Bounds& bounds = within()) {
  return rank.mailbox.wait(*message, bounds);
}

inline bool present(Rank& rank, int peer) {
  return rank.group.segment().control(peer).presence.load() != Presence::left;
}

}  // namespace messages
