// The operations of the tests that kill ranks: every collective and messages, on each of their
// paths, with data that identify their sender.
#pragma once

#include <sched.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#include "phalanx/collectives.h"
#include "phalanx/mailbox.h"

namespace kills {

using namespace phalanx;

// `served`: messages that a service thread moves while no thread waits for them. `leaving`: the
// victim leaves the group instead of taking part.
enum class Operation : std::uint8_t {
  barrier,
  broadcast,
  reduce,
  all_reduce,
  gather,
  scatter,
  all_gather,
  reduce_scatter,
  all_to_all,
  messages,
  served,
  leaving,
};
inline constexpr std::array kOperationNames = {
    "barrier",    "broadcast",      "reduce",     "all_reduce", "gather", "scatter",
    "all_gather", "reduce_scatter", "all_to_all", "messages",   "served", "leaving"};
inline constexpr auto kOperations = static_cast<int>(kOperationNames.size());

// For messages: `staged` in several pieces, `full` in more than a channel holds.
enum class Path : std::uint8_t { small, staged, zero_copy, full };
inline constexpr std::array kPathNames = {"small", "staged", "zero_copy", "full"};

inline bool has_path(Operation operation, Path path) {
  switch (operation) {
    case Operation::barrier:
    case Operation::leaving: return path == Path::small;
    case Operation::messages:
    case Operation::served: return path != Path::zero_copy;
    default: return path != Path::full;
  }
}

inline bool collective(Operation operation) { return operation < Operation::messages; }

inline bool reduces_over_caches(Operation operation) {
  return operation == Operation::reduce || operation == Operation::all_reduce;
}

// Small, so that large operations need few copies and several chunks.
inline constexpr std::size_t kTestChunk = 8 * 1024;

struct Task {
  Operation operation = Operation::barrier;
  Path path = Path::small;
  int size = 2;
  int root = 0;
  int fan = 0;  // the most children of a rank in the tree, and ranks of a cache; 0: no tree
  std::uint64_t salt = 0;

  Tree tree_of(int rank) const {
    if (fan == 0) return {};
    std::vector<int> parents = {-1};
    std::vector<int> caches = {0};
    for (int each = 1; each < size; ++each) {
      parents.push_back((each - 1) / fan);
      if (each % fan == 0) caches.push_back(each);
    }
    return {parents, rank, caches};
  }
  std::size_t count() const {
    constexpr std::size_t ring = kRingBytes / sizeof(std::uint64_t);
    const bool message = operation == Operation::messages || operation == Operation::served;
    return path == Path::small ? 5 : path == Path::full ? ring + 5'001 : message ? 9'001 : 2'501;
  }
};

inline std::uint64_t element(const Task& task, int from, int to, std::size_t i) {
  const auto bits = task.salt * 1'000'003 + static_cast<std::uint64_t>(from * 64 + to);
  return (bits + i) * 0x9e3779b97f4a7c15;
}

// Memory for a part: ordinary, or in the arena, which disappears with the process.
class Memory {
 public:
  Memory(std::size_t count, bool shared) : count_(count), ordinary_(shared ? 0 : count, kPoison) {
    Status status;
    data_ = ordinary_.data();
    if (shared) {
      auto* arena = Arena::own(status);
      auto* bytes = arena == nullptr ? nullptr : arena->allocate(count * sizeof *data_, status);
      data_ = reinterpret_cast<std::uint64_t*>(bytes);
      if (data_ != nullptr) std::fill(data_, data_ + count, kPoison);
    }
  }
  std::uint64_t* data() const { return data_; }
  std::size_t count() const { return count_; }

 private:
  static constexpr std::uint64_t kPoison = 0x5a5a5a5a5a5a5a5a;
  std::size_t count_;
  std::vector<std::uint64_t> ordinary_;
  std::uint64_t* data_;
};

// One rank's part in a task.
class RankTask {
 public:
  // `first`: the peer whose messages are awaited first. A recv that nobody waits for may end
  // unseen.
  RankTask(const Task& task, int self, int first) : task_(task), self_(self), first_(first) {
    const bool shared = task.path == Path::zero_copy;
    for (int rank = 0; rank < task.size; ++rank) {
      given_.emplace_back(task.count(), shared);
      taken_.emplace_back(task.count(), shared);
      for (std::size_t i = 0; i < task.count(); ++i) {
        given_.back().data()[i] = element(task, self, per_rank() ? rank : 0, i);
      }
    }
  }

  // `reported`: the number of messages that the service thread has reported.
  Status run(Group& group, Mailbox& mailbox, const Bounds& bounds,
             std::atomic<std::size_t>& reported);
  // After ok: whether this rank has received the right data.
  bool right() const;

 private:
  static constexpr DType kDType = DType::int64;
  static constexpr ReduceOp kOp = ReduceOp::sum;

  bool per_rank() const {
    return task_.operation >= Operation::reduce_scatter || task_.operation == Operation::scatter;
  }
  bool in_place() const {
    return task_.operation == Operation::reduce || task_.operation == Operation::all_reduce;
  }
  bool combines() const { return in_place() || task_.operation == Operation::reduce_scatter; }
  std::uint64_t* own() { return given_[static_cast<std::size_t>(self_)].data(); }
  Status run_messages(Mailbox& mailbox, const Bounds& bounds, std::atomic<std::size_t>& reported);
  bool expects(int from) const;
  std::uint64_t expected(int from, std::size_t i) const;

  Task task_;
  int self_;
  int first_;
  std::vector<Memory> given_, taken_;  // by peer
};

inline Status RankTask::run(Group& group, Mailbox& mailbox, const Bounds& bounds,
                            std::atomic<std::size_t>& reported) {
  const std::size_t count = task_.count();
  const int root = task_.root;
  std::vector<void*> given, taken;
  for (const Memory& part : given_) given.push_back(part.data());
  for (const Memory& part : taken_) taken.push_back(part.data());
  const std::vector<std::uint64_t> counts(given.size(), count);
  const Splits splits{given.data(), counts.data(), taken.data(), counts.data()};
  void* first = self_ == root ? own() : taken_[static_cast<std::size_t>(root)].data();
  void* mine = taken_[static_cast<std::size_t>(self_)].data();
  switch (task_.operation) {
    case Operation::barrier: return barrier(group, bounds);
    case Operation::broadcast: return broadcast(group, first, count, kDType, root, bounds);
    case Operation::reduce: return reduce(group, own(), count, kDType, kOp, root, bounds);
    case Operation::all_reduce: return all_reduce(group, own(), count, kDType, kOp, bounds);
    case Operation::gather: return gather(group, own(), taken.data(), count, kDType, root, bounds);
    case Operation::scatter: return scatter(group, given.data(), mine, count, kDType, root, bounds);
    case Operation::all_gather:
      return all_gather(group, own(), taken.data(), count, kDType, bounds);
    case Operation::reduce_scatter:
      return reduce_scatter(group, given.data(), mine, count, kDType, kOp, bounds);
    case Operation::all_to_all: return all_to_all(group, splits, kDType, bounds);
    default: return run_messages(mailbox, bounds, reported);
  }
}

// Sends two messages to every peer and receives two, in the opposite order.
inline Status RankTask::run_messages(Mailbox& mailbox, const Bounds& bounds,
                                     std::atomic<std::size_t>& reported) {
  const std::size_t before = reported.load();
  const bool served = task_.operation == Operation::served;
  std::vector<MessagePtr> all;
  for (int tag = 0; tag < 2; ++tag) {
    for (int peer = 0; peer < task_.size; ++peer) {
      const auto i = static_cast<std::size_t>(peer);
      const std::size_t half = task_.count() / 2;
      const std::size_t begin = tag == 0 ? 0 : half;
      const std::size_t count = tag == 0 ? half : task_.count() - half;
      const std::size_t other = tag == 0 ? task_.count() - half : half;
      if (peer == self_) continue;
      all.push_back(mailbox.isend(given_[i].data() + begin, count, kDType, peer, tag, served));
      all.push_back(mailbox.irecv(taken_[i].data() + (begin == 0 ? half : 0), other, kDType, peer,
                                  1 - tag, served));
    }
  }
  if (served) {
    for (const MessagePtr& message : all) mailbox.watch(message, Clock::now() + bounds.timeout);
    for (auto now = before; now != before + all.size(); now = reported.load()) reported.wait(now);
  }
  std::stable_partition(all.begin(), all.end(),
                        [&](const MessagePtr& message) { return message->peer() == first_; });
  Status status;
  for (const MessagePtr& message : all) {
    const Status each = served ? message->status() : mailbox.wait(*message, bounds);
    if (status.ok()) status = each;
  }
  return status;
}

inline bool RankTask::expects(int from) const {
  switch (task_.operation) {
    case Operation::barrier:
    case Operation::leaving: return false;
    case Operation::broadcast: return from == task_.root && self_ != task_.root;
    case Operation::reduce:
    case Operation::gather: return self_ == task_.root;
    case Operation::scatter: return from == task_.root;
    case Operation::messages:
    case Operation::served: return from != self_;
    default: return true;
  }
}

inline std::uint64_t RankTask::expected(int from, std::size_t i) const {
  const int to = per_rank() ? self_ : 0;
  if (!combines()) return element(task_, from, to, i);
  std::uint64_t sum = 0;
  for (int rank = 0; rank < task_.size; ++rank) sum += element(task_, rank, to, i);
  return sum;
}

inline bool RankTask::right() const {
  for (int from = 0; from < task_.size; ++from) {
    if (!expects(from)) continue;
    // Scattered parts and combined results are in one place.
    const bool one = combines() || task_.operation == Operation::scatter;
    const auto index = static_cast<std::size_t>(one ? self_ : from);
    const std::uint64_t* data = (in_place() ? given_ : taken_)[index].data();
    for (std::size_t i = 0; i < task_.count(); ++i) {
      if (data[i] != expected(from, i)) return false;
    }
  }
  return true;
}

}  // namespace kills
