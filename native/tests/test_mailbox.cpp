// Messages: every order of posts on both sides completes, nothing is lost, swapped or torn, and who
// waits for somebody who will not come is told.
#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <numeric>

#include "ranks.h"

using namespace phalanx;
using namespace std::chrono_literals;
using ranks::Mapping;
using ranks::Random;
using ranks::Rank;
using ranks::within;

namespace {

// A message is known by its source, destination, tag, and number among those; size and bytes
// follow.
struct Name {
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

// The bytes of a message, or poison for them, between fences.
struct Letter {
  Letter(const Name& its_name, bool filled)
      : name(its_name), bytes(its_name.size() + 2 * kFence, std::byte{0xa5}) {
    for (std::size_t i = 0; filled && i < name.size(); ++i) data()[i] = name.byte(i);
  }
  std::byte* data() { return bytes.data() + kFence; }
  bool intact() const {
    for (std::size_t i = 0; i < bytes.size(); ++i) {
      const bool inside = i >= kFence && i < bytes.size() - kFence;
      if (bytes[i] != (inside ? name.byte(i - kFence) : std::byte{0xa5})) return false;
    }
    return true;
  }

  static constexpr std::size_t kFence = 32;
  Name name;
  std::vector<std::byte> bytes;
  MessagePtr message;
};

void post_send(Rank& rank, Letter& letter, bool detached = false) {
  letter.message = rank.mailbox.send(letter.data(), letter.name.size(), DType::uint8,
                                     letter.name.destination, letter.name.tag, detached);
}

void post_recv(Rank& rank, Letter& letter, bool detached = false) {
  letter.message = rank.mailbox.recv(letter.data(), letter.name.size(), DType::uint8,
                                     letter.name.source, letter.name.tag, detached);
}

bool arrived(Rank& rank, Letter& letter) {
  const Status status = rank.mailbox.wait(*letter.message, within());
  const Name& name = letter.name;
  const int peer = name.source == rank.self ? name.destination : name.source;
  if (CHECK(status.ok()) && CHECK_EQ(letter.message->peer(), peer) && CHECK(letter.intact())) {
    return true;
  }
  std::fprintf(stderr, "  at rank %d: %d -> %d tag %d number %d size %zu: code %d about %d by %d\n",
               rank.self, name.source, name.destination, name.tag, name.number, name.size(),
               static_cast<int>(status.code), status.peer, status.reporter);
  return false;
}

// All letters of one rank in an exchange of everybody with everybody, itself included.
struct Exchange {
  Exchange(const Rank& rank, int tags, int per_tag) {
    for (int peer = 0; peer < rank.size; ++peer) {
      for (int tag = 0; tag < tags; ++tag) {
        for (int i = 0; i < per_tag; ++i) {
          sends.push_back(Letter({rank.self, peer, tag, i}, true));
          recvs.push_back(Letter({peer, rank.self, tag, i}, false));
        }
      }
    }
  }

  // Sends and recvs in one random order; those of one tag and peer keep theirs.
  std::vector<std::pair<bool, Letter*>> shuffled(Random& random) {
    std::map<std::tuple<bool, int, int>, std::vector<Letter*>> queues;
    for (Letter& each : sends)
      queues[{true, each.name.destination, each.name.tag}].push_back(&each);
    for (Letter& each : recvs) queues[{false, each.name.source, each.name.tag}].push_back(&each);
    std::vector<std::pair<std::tuple<bool, int, int>, std::size_t>> order;
    for (const auto& [key, queue] : queues) order.insert(order.end(), queue.size(), {key, 0});
    for (std::size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random.below(i)]);
    std::map<std::tuple<bool, int, int>, std::size_t> next;
    std::vector<std::pair<bool, Letter*>> all;
    for (const auto& [key, unused] : order) {
      all.emplace_back(std::get<0>(key), queues[key][next[key]++]);
    }
    return all;
  }

  std::vector<Letter> sends, recvs;
};

void post_all(Rank& rank, Exchange& exchange, bool detached) {
  for (const auto& [is_send, letter] : exchange.shuffled(rank.random)) {
    is_send ? post_send(rank, *letter, detached) : post_recv(rank, *letter, detached);
    ranks::dawdle(rank.random);
  }
}

void wait_all(Rank& rank, Exchange& exchange) {
  std::vector<Letter*> all;
  for (Letter& each : exchange.sends) all.push_back(&each);
  for (Letter& each : exchange.recvs) all.push_back(&each);
  for (std::size_t i = all.size(); i > 1; --i) std::swap(all[i - 1], all[rank.random.below(i)]);
  for (Letter* each : all) {
    if (!arrived(rank, *each)) return;
  }
  CHECK_EQ(rank.mailbox.outstanding(), 0u);
}

// The thread that moves what nobody waits for.
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

Status wait_for(Rank& rank, const MessagePtr& message, const Bounds& bounds = within()) {
  return rank.mailbox.wait(*message, bounds);
}

bool present(Rank& rank, int peer) {
  return rank.group.segment().control(peer).presence.load() != Presence::left;
}

}  // namespace

TEST(messages_of_every_size) {
  const std::vector<std::size_t> sizes = {0,          1,
                                          63,         64,
                                          65,         4096,
                                          32767,      32768,
                                          32769,      kRingBytes - 64,
                                          kRingBytes, kRingBytes + 1,
                                          1'000'003,  5 << 20};
  ranks::run(2, [&](Rank& rank) {
    for (const std::size_t size : sizes) {
      std::vector<std::byte> data(size, rank.self == 0 ? std::byte{0x3c} : std::byte{0});
      if (rank.self == 0 && size != 0) data.front() = data.back() = std::byte{0x77};
      const auto message = rank.self == 0
                               ? rank.mailbox.send(data.data(), size, DType::uint8, 1, 9, false)
                               : rank.mailbox.recv(data.data(), size, DType::uint8, 0, 9, false);
      CHECK(wait_for(rank, message).ok());
      const auto odd = std::count_if(data.begin(), data.end(),
                                     [](std::byte byte) { return byte != std::byte{0x3c}; });
      CHECK_EQ(static_cast<std::size_t>(odd), std::min<std::size_t>(size, 2));
    }
  });
}

TEST(any_order_on_both_sides_completes) {
  for (const int size : {1, 2, 3, 5}) {
    for (int round = 0; round < std::max(1, ranks::scaled(6)); ++round) {
      ranks::run(size, [&](Rank& rank) {
        // With two ranks, 200 each way.
        Exchange exchange(rank, 5, size == 2 ? 40 : 40 / size);
        post_all(rank, exchange, false);
        wait_all(rank, exchange);
      });
    }
  }
}

TEST(any_order_with_ranks_stopped_anywhere) {
  ranks::run(
      3,
      [](Rank& rank) {
        for (int round = 0; round < std::max(1, ranks::scaled(5)); ++round) {
          Exchange exchange(rank, 3, 12);
          post_all(rank, exchange, false);
          wait_all(rank, exchange);
          rank.together.arrive_and_wait();
        }
      },
      Mapping::own, true);
}

TEST(reversed_order_needs_no_room_in_the_channel) {
  ranks::run(2, [](Rank& rank) {
    constexpr int n = 12;
    constexpr std::size_t size = kRingBytes;
    std::vector<std::vector<std::byte>> data(n, std::vector<std::byte>(size));
    std::vector<MessagePtr> messages;
    for (int i = 0; i < n; ++i) {
      const int tag = rank.self == 0 ? i : n - 1 - i;
      auto& buffer = data[static_cast<std::size_t>(i)];
      if (rank.self == 0) buffer.assign(size, static_cast<std::byte>(tag));
      messages.push_back(rank.self == 0
                             ? rank.mailbox.send(buffer.data(), size, DType::uint8, 1, tag, false)
                             : rank.mailbox.recv(buffer.data(), size, DType::uint8, 0, tag, false));
      if (rank.self == 1) {
        CHECK(wait_for(rank, messages.back()).ok());
        CHECK(buffer.front() == static_cast<std::byte>(tag));
        CHECK(buffer.back() == static_cast<std::byte>(tag));
      }
    }
    for (const MessagePtr& message : messages) CHECK(wait_for(rank, message).ok());
  });
}

TEST(any_source_takes_from_all_in_each_ones_order) {
  for (const int size : {2, 3, 5}) {
    ranks::run(size, [size](Rank& rank) {
      const int each = 60;
      struct Content {
        std::int64_t source, number;
      };
      if (rank.self != 0) {
        for (std::int64_t i = 0; i < each; ++i) {
          const Content content{rank.self, i};
          ranks::dawdle(rank.random);
          CHECK(wait_for(rank, rank.mailbox.send(&content, 2, DType::int64, 0, 5, false)).ok());
        }
        return;
      }
      const auto n = static_cast<std::size_t>(each * (size - 1));
      std::vector<Content> contents(n, {-1, -1});
      std::vector<MessagePtr> messages;
      for (std::size_t i = 0; i < n; ++i) {
        messages.push_back(rank.mailbox.recv(&contents[i], 2, DType::int64, kAnySource, 5, false));
        if (rank.random.one_in(3)) CHECK(wait_for(rank, messages.back()).ok());
      }
      std::vector<std::int64_t> next(static_cast<std::size_t>(size));
      for (std::size_t i = 0; i < n; ++i) {
        CHECK(wait_for(rank, messages[i]).ok());
        CHECK_EQ(contents[i].source, std::int64_t{messages[i]->peer()});
        CHECK_EQ(contents[i].number, next[static_cast<std::size_t>(contents[i].source)]++);
      }
    });
  }
}

TEST(several_threads_of_a_rank_wait_at_once) {
  for (int round = 0; round < std::max(2, ranks::scaled(10)); ++round) {
    ranks::run(2, [](Rank& rank) {
      constexpr int threads = 4;
      const auto work = [&rank](int number) {
        Random random(static_cast<std::uint64_t>(rank.self * threads + number + 100));
        for (int i = 0; i < 25; ++i) {
          Letter out({rank.self, 1 - rank.self, number, i}, true);
          Letter in({1 - rank.self, rank.self, number, i}, false);
          const bool send_first = random.one_in(2);
          if (send_first) post_send(rank, out);
          post_recv(rank, in);
          if (!send_first) post_send(rank, out);
          ranks::dawdle(random);
          if (!arrived(rank, in) || !arrived(rank, out)) return;
        }
      };
      std::vector<std::thread> others;
      for (int number = 1; number < threads; ++number) others.emplace_back(work, number);
      work(0);
      for (std::thread& other : others) other.join();
      CHECK_EQ(rank.mailbox.outstanding(), 0u);
    });
  }
}

TEST(a_server_moves_what_nobody_waits_for) {
  for (const int size : {1, 2, 3}) {
    ranks::run(size, [](Rank& rank) {
      Server server(rank.mailbox);
      for (int round = 0; round < std::max(2, ranks::scaled(6)); ++round) {
        Exchange exchange(rank, 4, 10);
        post_all(rank, exchange, true);
        const auto all_done = [&] {
          const auto done = [](const Letter& each) { return each.message->done(); };
          return std::all_of(exchange.sends.begin(), exchange.sends.end(), done) &&
                 std::all_of(exchange.recvs.begin(), exchange.recvs.end(), done);
        };
        if (!CHECK(ranks::eventually(all_done))) return;
        wait_all(rank, exchange);
        rank.together.arrive_and_wait();
      }
      CHECK_EQ(server.reported(), 0u);
    });
  }
}

TEST(watched_messages_are_reported_once) {
  ranks::run(2, [](Rank& rank) {
    Server server(rank.mailbox);
    std::size_t watched = 0;
    for (int round = 0; round < std::max(2, ranks::scaled(10)); ++round) {
      Exchange exchange(rank, 3, 5);
      for (const auto& [is_send, letter] : exchange.shuffled(rank.random)) {
        is_send ? post_send(rank, *letter, true) : post_recv(rank, *letter, true);
        ranks::dawdle(rank.random);
        if (rank.random.one_in(2)) {
          rank.mailbox.watch(letter->message);
          if (rank.random.one_in(2)) rank.mailbox.watch(letter->message);
          ++watched;
        }
      }
      if (!CHECK(ranks::eventually([&] { return server.reported() == watched; }))) return;
      wait_all(rank, exchange);
      rank.together.arrive_and_wait();
    }
    CHECK(!server.reported_twice());
    CHECK_EQ(server.reported(), watched);
  });
}

TEST(a_server_and_waiters_share_the_work) {
  ranks::run(3, [](Rank& rank) {
    Server server(rank.mailbox);
    for (int round = 0; round < std::max(2, ranks::scaled(8)); ++round) {
      Exchange exchange(rank, 4, 8);
      post_all(rank, exchange, rank.random.one_in(2));
      wait_all(rank, exchange);
      rank.together.arrive_and_wait();
    }
  });
}

TEST(a_server_stops_while_it_sleeps) {
  ranks::run(2, [](Rank& rank) {
    std::byte byte{};
    Server idle(rank.mailbox);  // whether it has nothing to do, or waits for what never comes
    if (rank.self == 0) (void)rank.mailbox.recv(&byte, 1, DType::uint8, 1, 0, true);
    ranks::dawdle(rank.random);
  });
}

TEST(messages_beside_collectives) {
  ranks::run(3, [](Rank& rank) {
    std::thread other([&rank] {
      for (int i = 0; i < ranks::scaled(300); ++i) {
        std::vector<std::int32_t> data(i % 10 == 0 ? 50'000 : 3, 1 + rank.self);
        if (!CHECK(all_reduce(rank.group, data.data(), data.size(), DType::int32, ReduceOp::sum,
                              within())
                       .ok())) {
          return;
        }
        CHECK(std::all_of(data.begin(), data.end(), [](auto x) { return x == 6; }));
      }
    });
    Server server(rank.mailbox);
    for (int round = 0; round < std::max(2, ranks::scaled(6)); ++round) {
      Exchange exchange(rank, 2, 8);
      post_all(rank, exchange, rank.random.one_in(2));
      wait_all(rank, exchange);
    }
    other.join();
  });
}

TEST(messages_of_another_size_or_type_are_refused) {
  struct Case {
    std::size_t sent, asked;
    DType sent_as, asked_as;
  };
  const Case cases[] = {
      {10, 9, DType::uint8, DType::uint8},    {9, 10, DType::uint8, DType::uint8},
      {0, 1, DType::uint8, DType::uint8},     {4, 4, DType::int32, DType::float32},
      {4, 2, DType::float32, DType::float64}, {400'000, 399'999, DType::uint8, DType::uint8}};
  for (const Case& each : cases) {
    for (const bool recv_first : {false, true}) {
      ranks::run(3, [&](Rank& rank) {
        std::vector<std::byte> data(800'000, std::byte{0x42});
        Status status;
        if (rank.self == 0) {
          if (recv_first) rank.together.arrive_and_wait();
          const auto sent = rank.mailbox.send(data.data(), each.sent, each.sent_as, 1, 3, false);
          if (!recv_first) rank.together.arrive_and_wait();
          (void)wait_for(rank, sent);  // it may have gone out before the receiver saw it
          status = barrier(rank.group, within());
        } else if (rank.self == 1) {
          if (!recv_first) rank.together.arrive_and_wait();
          const auto asked = rank.mailbox.recv(data.data(), each.asked, each.asked_as, 0, 3, false);
          if (recv_first) rank.together.arrive_and_wait();
          status = wait_for(rank, asked);
          CHECK(std::all_of(data.begin(), data.end(), [](auto b) { return b == std::byte{0x42}; }));
        } else {
          rank.together.arrive_and_wait();
          status = barrier(rank.group, within());
        }
        CHECK_EQ(status.code, Code::mismatch);
        CHECK_EQ(status.reporter, 1);
        CHECK_EQ(status.peer, 0);
        CHECK_EQ(status.mine.kind, Kind::recv);
        CHECK_EQ(status.mine.count, each.asked);
        CHECK_EQ(status.mine.dtype, each.asked_as);
        CHECK_EQ(status.theirs.kind, Kind::send);
        CHECK_EQ(status.theirs.count, each.sent);
        CHECK_EQ(status.theirs.dtype, each.sent_as);
        CHECK_EQ(rank.mailbox.outstanding(), 0u);
      });
    }
  }
}

TEST(messages_sent_before_a_rank_left_arrive) {
  for (int round = 0; round < std::max(5, ranks::scaled(100)); ++round) {
    ranks::run(3, [](Rank& rank) {
      if (rank.self == 2) {
        for (int i = 0; i < 3; ++i) {
          Letter letter({2, 0, i, 0}, true);
          post_send(rank, letter);
          if (!arrived(rank, letter)) return;
          ranks::dawdle(rank.random);
        }
        return;  // and leaves
      }
      if (rank.self == 0) {
        std::vector<Letter> letters;
        for (const int tag : {2, 0, 1}) letters.push_back(Letter({2, 0, tag, 0}, false));
        const bool late = rank.random.one_in(2);
        if (late) ranks::dawdle(rank.random);
        for (Letter& each : letters) post_recv(rank, each);
        for (Letter& each : letters) arrived(rank, each);
      }
    });
  }
}

// What the server waits for comes from two ranks: that one of them has sent its part and left is no
// reason to give up the other's.
TEST(a_server_does_not_miss_a_rank_that_left_after_its_part) {
  for (int round = 0; round < std::max(10, ranks::scaled(40)); ++round) {
    ranks::run(3, [](Rank& rank) {
      if (rank.self == 0) {
        Letter first({2, 0, 0, 0}, false), second({1, 0, 0, 0}, false);
        // So many others that looking for trouble takes long: the time in which rank 2 can do its
        // part.
        std::byte byte{};
        for (int i = 0; i < ranks::scaled(50'000); ++i) {
          const int source = i == 0 ? kAnySource : 1;
          (void)rank.mailbox.recv(&byte, 1, DType::uint8, source, 1, true);
        }
        post_recv(rank, second, true);
        post_recv(rank, first, true);
        Server server(rank.mailbox);
        CHECK(ranks::eventually([&] { return first.message->done(); }));
        CHECK(ranks::eventually([&] { return !present(rank, 2); }));
        // Two slices, in which a server that is wrong about rank 2 breaks the group.
        const auto end = Clock::now() + 12ms;
        while (Clock::now() < end) sched_yield();
        CHECK(rank.group.broken().ok());
        rank.together.arrive_and_wait();
        arrived(rank, first) && arrived(rank, second);
      } else if (rank.self == 2) {
        Letter letter({2, 0, 0, 0}, true);
        Event& bell = rank.group.segment().control(0).bell;
        CHECK(ranks::eventually([&] { return bell.sleepers != 0; }));
        const auto end = Clock::now() + std::chrono::microseconds(rank.random.below(12'000));
        while (Clock::now() < end) sched_yield();
        post_send(rank, letter);
        arrived(rank, letter);
        rank.group.leave();
        rank.together.arrive_and_wait();
      } else {
        rank.together.arrive_and_wait();
        Letter letter({1, 0, 0, 0}, true);
        post_send(rank, letter);
        arrived(rank, letter);
      }
    });
  }
}

TEST(who_waits_for_a_message_of_a_rank_that_left_is_told) {
  for (const bool any : {false, true}) {
    for (const bool served : {false, true}) {
      ranks::run(2, [&](Rank& rank) {
        if (rank.self == 1) return;
        std::byte byte{};
        std::unique_ptr<Server> server;
        if (served) server = std::make_unique<Server>(rank.mailbox);
        const auto message =
            rank.mailbox.recv(&byte, 1, DType::uint8, any ? kAnySource : 1, 0, served);
        if (served) {
          CHECK(ranks::eventually([&] { return message->done(); }));
        }
        const Status status = wait_for(rank, message);
        CHECK_EQ(status.code, Code::left);
        CHECK_EQ(status.peer, 1);
        CHECK_EQ(status.mine.kind, Kind::recv);
      });
    }
  }
}

TEST(any_source_goes_on_while_somebody_is_left) {
  ranks::run(3, [](Rank& rank) {
    std::int32_t value = 0;
    if (rank.self == 1) return;
    if (rank.self == 0) {
      const auto message = rank.mailbox.recv(&value, 1, DType::int32, kAnySource, 0, false);
      CHECK(wait_for(rank, message).ok());
      CHECK_EQ(value, 12);
      CHECK_EQ(message->peer(), 2);
    } else {
      CHECK(ranks::eventually([&] { return !present(rank, 1); }));
      CHECK(ranks::eventually([&] { return rank.group.segment().control(0).bell.sleepers != 0; }));
      value = 12;
      CHECK(wait_for(rank, rank.mailbox.send(&value, 1, DType::int32, 0, 0, false)).ok());
    }
  });
}

TEST(a_send_that_does_not_fit_and_is_not_taken_fails_when_the_receiver_leaves) {
  ranks::run(2, [](Rank& rank) {
    if (rank.self == 1) {
      CHECK(ranks::eventually([&] { return rank.group.segment().control(0).bell.sleepers != 0; }));
      return;
    }
    std::vector<std::byte> data(2 * kRingBytes);
    const auto small = rank.mailbox.send(data.data(), 10, DType::uint8, 1, 0, false);
    CHECK(wait_for(rank, small).ok());
    const auto large = rank.mailbox.send(data.data(), data.size(), DType::uint8, 1, 0, false);
    CHECK_EQ(wait_for(rank, large).code, Code::left);
  });
}

TEST(abort_ends_all_that_is_outstanding) {
  for (const bool served : {false, true}) {
    ranks::run(3, [&](Rank& rank) {
      std::vector<std::byte> data(3 * kRingBytes);
      std::unique_ptr<Server> server;
      if (served) server = std::make_unique<Server>(rank.mailbox);
      const int peer = (rank.self + 1) % 3;
      const std::vector<MessagePtr> messages = {
          rank.mailbox.send(data.data(), data.size(), DType::uint8, peer, 0, served),
          rank.mailbox.recv(data.data(), 1, DType::uint8, peer, 1, served),
          rank.mailbox.recv(data.data(), 1, DType::uint8, peer, 2, served)};
      if (rank.self == 0) {
        for (const int other : {1, 2}) {
          Event& bell = rank.group.segment().control(other).bell;
          CHECK(ranks::eventually([&] { return bell.sleepers != 0; }));
        }
        (void)rank.group.abort({.code = Code::aborted, .reporter = 0});
      }
      for (const MessagePtr& message : messages) {
        if (served) CHECK(ranks::eventually([&] { return message->done(); }));
        const Status status = wait_for(rank, message);
        CHECK_EQ(status.code, Code::aborted);
        CHECK_EQ(status.reporter, 0);
      }
      CHECK_EQ(rank.mailbox.outstanding(), 0u);
    });
  }
}

TEST(deadline_of_a_message_names_its_peer) {
  ranks::run(2, [](Rank& rank) {
    std::byte byte{};
    if (rank.self == 0) {
      const auto message = rank.mailbox.recv(&byte, 1, DType::uint8, 1, 8, false);
      const Status status = wait_for(rank, message, within(20ms));
      CHECK_EQ(status.code, Code::timeout);
      CHECK_EQ(status.peer, 1);
      CHECK_EQ(status.reporter, 0);
      CHECK_EQ(status.mine.kind, Kind::recv);
      CHECK_EQ(status.mine.root, 1);
    }
    rank.together.arrive_and_wait();
    const auto message = rank.mailbox.send(&byte, 1, DType::uint8, 1 - rank.self, 8, false);
    CHECK_EQ(wait_for(rank, message).code, Code::timeout);
  });
}

TEST(an_interrupted_wait_breaks_the_group) {
  ranks::run(2, [](Rank& rank) {
    std::byte byte{};
    const auto message = rank.mailbox.recv(&byte, 1, DType::uint8, 1 - rank.self, 0, false);
    Bounds bounds = within();
    if (rank.self == 0) bounds.interrupted = [] { return true; };
    const Status status = wait_for(rank, message, bounds);
    CHECK_EQ(status.code, Code::interrupted);
    CHECK_EQ(status.reporter, 0);
  });
}

// Blocking calls of one thread do not hide the death of a peer that only the others wait for.
TEST(a_waiter_sees_the_trouble_of_what_others_wait_for) {
  ranks::run(3, [](Rank& rank) {
    if (rank.self == 2) {
      CHECK(ranks::eventually([&] { return rank.group.segment().control(0).bell.sleepers != 0; }));
      return;
    }
    std::byte byte{};
    if (rank.self == 0) {
      Server server(rank.mailbox);
      const auto vain = rank.mailbox.recv(&byte, 1, DType::uint8, 2, 0, true);
      const auto waited = rank.mailbox.recv(&byte, 1, DType::uint8, 1, 0, false);
      const Status status = wait_for(rank, waited);
      CHECK_EQ(status.code, Code::left);
      CHECK_EQ(status.peer, 2);
      CHECK(vain->done());
    } else {
      CHECK(ranks::eventually([&] { return !rank.group.broken().ok(); }));
    }
  });
}
