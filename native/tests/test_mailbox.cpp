// Messages: every order of posts on both sides completes, and nothing is lost, swapped or torn.
#include <algorithm>
#include <map>
#include <tuple>

#include "messages.h"

using namespace phalanx;
using namespace std::chrono_literals;
using namespace messages;
using ranks::Mapping;
using ranks::Random;

namespace {

// All messages of one rank in an all-to-all exchange that includes itself.
struct Exchange {
  Exchange(const Rank& rank, int tags, int per_tag) {
    for (int peer = 0; peer < rank.size; ++peer) {
      for (int tag = 0; tag < tags; ++tag) {
        for (int i = 0; i < per_tag; ++i) {
          sends.push_back(TestMessage({rank.self, peer, tag, i}, true));
          recvs.push_back(TestMessage({peer, rank.self, tag, i}, false));
        }
      }
    }
  }

  // Sends and recvs in one random order; those of one tag and peer keep theirs.
  std::vector<std::pair<bool, TestMessage*>> shuffled(Random& random) {
    std::map<std::tuple<bool, int, int>, std::vector<TestMessage*>> queues;
    for (TestMessage& each : sends)
      queues[{true, each.id.destination, each.id.tag}].push_back(&each);
    for (TestMessage& each : recvs) queues[{false, each.id.source, each.id.tag}].push_back(&each);
    std::vector<std::pair<std::tuple<bool, int, int>, std::size_t>> order;
    for (const auto& [key, queue] : queues) order.insert(order.end(), queue.size(), {key, 0});
    for (std::size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random.below(i)]);
    std::map<std::tuple<bool, int, int>, std::size_t> next;
    std::vector<std::pair<bool, TestMessage*>> all;
    for (const auto& [key, unused] : order) {
      all.emplace_back(std::get<0>(key), queues[key][next[key]++]);
    }
    return all;
  }

  std::vector<TestMessage> sends, recvs;
};

void post_all(Rank& rank, Exchange& exchange, bool detached) {
  for (const auto& [is_send, message] : exchange.shuffled(rank.random)) {
    is_send ? post_send(rank, *message, detached) : post_recv(rank, *message, detached);
    ranks::random_delay(rank.random);
  }
}

void wait_all(Rank& rank, Exchange& exchange) {
  std::vector<TestMessage*> all;
  for (TestMessage& each : exchange.sends) all.push_back(&each);
  for (TestMessage& each : exchange.recvs) all.push_back(&each);
  for (std::size_t i = all.size(); i > 1; --i) std::swap(all[i - 1], all[rank.random.below(i)]);
  for (TestMessage* each : all) {
    if (!arrived(rank, *each)) return;
  }
  CHECK_EQ(rank.mailbox.outstanding(), 0u);
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
                               ? rank.mailbox.isend(data.data(), size, DType::uint8, 1, 9, false)
                               : rank.mailbox.irecv(data.data(), size, DType::uint8, 0, 9, false);
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

TEST(reversed_order_needs_no_space_in_the_channel) {
  ranks::run(2, [](Rank& rank) {
    constexpr int n = 12;
    constexpr std::size_t size = kRingBytes;
    std::vector<std::vector<std::byte>> data(n, std::vector<std::byte>(size));
    std::vector<MessagePtr> messages;
    for (int i = 0; i < n; ++i) {
      const int tag = rank.self == 0 ? i : n - 1 - i;
      auto& buffer = data[static_cast<std::size_t>(i)];
      if (rank.self == 0) buffer.assign(size, static_cast<std::byte>(tag));
      messages.push_back(
          rank.self == 0 ? rank.mailbox.isend(buffer.data(), size, DType::uint8, 1, tag, false)
                         : rank.mailbox.irecv(buffer.data(), size, DType::uint8, 0, tag, false));
      if (rank.self == 1) {
        CHECK(wait_for(rank, messages.back()).ok());
        CHECK(buffer.front() == static_cast<std::byte>(tag));
        CHECK(buffer.back() == static_cast<std::byte>(tag));
      }
    }
    for (const MessagePtr& message : messages) CHECK(wait_for(rank, message).ok());
  });
}

TEST(any_source_keeps_the_order_of_each_source) {
  for (const int size : {2, 3, 5}) {
    ranks::run(size, [size](Rank& rank) {
      const int each = 60;
      struct Content {
        std::int64_t source, number;
      };
      if (rank.self != 0) {
        for (std::int64_t i = 0; i < each; ++i) {
          const Content content{rank.self, i};
          ranks::random_delay(rank.random);
          CHECK(wait_for(rank, rank.mailbox.isend(&content, 2, DType::int64, 0, 5, false)).ok());
        }
        return;
      }
      const std::size_t n = std::size_t{each} * static_cast<std::size_t>(size - 1);
      std::vector<Content> contents(n, {-1, -1});
      std::vector<MessagePtr> messages;
      for (std::size_t i = 0; i < n; ++i) {
        messages.push_back(rank.mailbox.irecv(&contents[i], 2, DType::int64, kAnySource, 5, false));
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
          TestMessage out({rank.self, 1 - rank.self, number, i}, true);
          TestMessage in({1 - rank.self, rank.self, number, i}, false);
          const bool send_first = random.one_in(2);
          if (send_first) post_send(rank, out);
          post_recv(rank, in);
          if (!send_first) post_send(rank, out);
          ranks::random_delay(random);
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

TEST(a_server_progresses_messages_without_waiters) {
  for (const int size : {1, 2, 3}) {
    ranks::run(size, [](Rank& rank) {
      Server server(rank.mailbox);
      for (int round = 0; round < std::max(2, ranks::scaled(6)); ++round) {
        Exchange exchange(rank, 4, 10);
        post_all(rank, exchange, true);
        const auto all_done = [&] {
          const auto done = [](const TestMessage& each) { return each.message->done(); };
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
      for (const auto& [is_send, message] : exchange.shuffled(rank.random)) {
        is_send ? post_send(rank, *message, true) : post_recv(rank, *message, true);
        ranks::random_delay(rank.random);
        if (rank.random.one_in(2)) {
          rank.mailbox.watch(message->message, Clock::time_point::max());
          if (rank.random.one_in(2)) rank.mailbox.watch(message->message, Clock::time_point::max());
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
    // whether it has nothing to do, or waits for a message that never comes
    Server idle(rank.mailbox);
    if (rank.self == 0) (void)rank.mailbox.irecv(&byte, 1, DType::uint8, 1, 0, true);
    ranks::random_delay(rank.random);
  });
}

TEST(messages_during_collectives) {
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
