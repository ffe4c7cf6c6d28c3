// Messages that cannot arrive: a rank that waits for one gets an error, and only then.
#include <algorithm>
#include <memory>

#include "messages.h"

using namespace phalanx;
using namespace std::chrono_literals;
using namespace messages;

TEST(messages_of_a_different_size_or_type_are_refused) {
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
          const auto sent = rank.mailbox.isend(data.data(), each.sent, each.sent_as, 1, 3, false);
          if (!recv_first) rank.together.arrive_and_wait();
          (void)wait_for(rank, sent);  // it may have been sent before the receiver saw it
          status = barrier(rank.group, within());
        } else if (rank.self == 1) {
          if (!recv_first) rank.together.arrive_and_wait();
          const auto asked =
              rank.mailbox.irecv(data.data(), each.asked, each.asked_as, 0, 3, false);
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
        const Failure failure = rank.group.failure_report();
        CHECK_EQ(failure.mine.kind, Kind::recv);
        CHECK_EQ(failure.mine.count, each.asked);
        CHECK_EQ(failure.mine.dtype, each.asked_as);
        CHECK_EQ(failure.theirs.kind, Kind::send);
        CHECK_EQ(failure.theirs.count, each.sent);
        CHECK_EQ(failure.theirs.dtype, each.sent_as);
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
          TestMessage message({2, 0, i, 0}, true);
          post_send(rank, message);
          if (!arrived(rank, message)) return;
          ranks::random_delay(rank.random);
        }
        return;  // and leaves
      }
      if (rank.self == 0) {
        std::vector<TestMessage> messages;
        for (const int tag : {2, 0, 1}) messages.push_back(TestMessage({2, 0, tag, 0}, false));
        const bool late = rank.random.one_in(2);
        if (late) ranks::random_delay(rank.random);
        for (TestMessage& each : messages) post_recv(rank, each);
        for (TestMessage& each : messages) arrived(rank, each);
      }
    });
  }
}

// The server waits for messages of two ranks. That one of them has sent its part and left is no
// reason to give up the other's.
TEST(a_server_accepts_a_rank_that_left_after_its_part) {
  for (int round = 0; round < std::max(10, ranks::scaled(40)); ++round) {
    ranks::run(3, [](Rank& rank) {
      if (rank.self == 0) {
        TestMessage first({2, 0, 0, 0}, false), second({1, 0, 0, 0}, false);
        // So many other recvs that checking the peers takes long: during that time rank 2 can send
        // its part.
        std::byte byte{};
        for (int i = 0; i < ranks::scaled(50'000); ++i) {
          const int source = i == 0 ? kAnySource : 1;
          (void)rank.mailbox.irecv(&byte, 1, DType::uint8, source, 1, true);
        }
        post_recv(rank, second, true);
        post_recv(rank, first, true);
        Server server(rank.mailbox);
        CHECK(ranks::eventually([&] { return first.message->done(); }));
        CHECK(ranks::eventually([&] { return !present(rank, 2); }));
        // Two slices, in which a server with this mistake breaks the group.
        const auto end = Clock::now() + 12ms;
        while (Clock::now() < end) sched_yield();
        CHECK(rank.group.failure().ok());
        rank.together.arrive_and_wait();
        arrived(rank, first) && arrived(rank, second);
      } else if (rank.self == 2) {
        TestMessage message({2, 0, 0, 0}, true);
        Event& message_event = rank.group.segment().control(0).message_event;
        CHECK(ranks::eventually([&] { return message_event.sleepers != 0; }));
        const auto end = Clock::now() + std::chrono::microseconds(rank.random.below(12'000));
        while (Clock::now() < end) sched_yield();
        post_send(rank, message);
        arrived(rank, message);
        rank.group.leave();
        rank.together.arrive_and_wait();
      } else {
        rank.together.arrive_and_wait();
        TestMessage message({1, 0, 0, 0}, true);
        post_send(rank, message);
        arrived(rank, message);
      }
    });
  }
}

TEST(waiting_for_a_message_of_a_rank_that_left_fails) {
  for (const bool any : {false, true}) {
    for (const bool served : {false, true}) {
      ranks::run(2, [&](Rank& rank) {
        if (rank.self == 1) return;
        std::byte byte{};
        std::unique_ptr<Server> server;
        if (served) server = std::make_unique<Server>(rank.mailbox);
        const auto message =
            rank.mailbox.irecv(&byte, 1, DType::uint8, any ? kAnySource : 1, 0, served);
        if (served) {
          CHECK(ranks::eventually([&] { return message->done(); }));
        }
        const Status status = wait_for(rank, message);
        CHECK_EQ(status.code, Code::left);
        CHECK_EQ(status.peer, 1);
        CHECK_EQ(rank.group.failure_report().mine.kind, Kind::recv);
      });
    }
  }
}

TEST(any_source_includes_other_threads_of_the_same_rank) {
  for (const bool second_thread : {false, true}) {
    ranks::run(2, [&](Rank& rank) {
      if (rank.self == 1) return;
      CHECK(ranks::eventually([&] { return !present(rank, 1); }));
      std::int32_t value = 0;
      const std::int32_t sent = 12;
      if (!second_thread) {
        CHECK(wait_for(rank, rank.mailbox.isend(&sent, 1, DType::int32, 0, 7, false)).ok());
      }
      const auto message = rank.mailbox.irecv(&value, 1, DType::int32, kAnySource, 0, false);
      if (second_thread) {
        // It has another tag: that it was posted is enough.
        std::thread([&] {
          CHECK(rank.mailbox.isend(&sent, 1, DType::int32, 0, 7, false) != nullptr);
        }).join();
      }
      // Long enough for checks of ranks that have left.
      CHECK_EQ(rank.mailbox.wait(*message, within(350ms)).code, Code::timeout);
    });
  }
}

TEST(any_source_keeps_waiting_while_a_rank_remains) {
  ranks::run(3, [](Rank& rank) {
    std::int32_t value = 0;
    if (rank.self == 1) return;
    if (rank.self == 0) {
      const auto message = rank.mailbox.irecv(&value, 1, DType::int32, kAnySource, 0, false);
      CHECK(wait_for(rank, message).ok());
      CHECK_EQ(value, 12);
      CHECK_EQ(message->peer(), 2);
    } else {
      CHECK(ranks::eventually([&] { return !present(rank, 1); }));
      CHECK(ranks::eventually(
          [&] { return rank.group.segment().control(0).message_event.sleepers != 0; }));
      value = 12;
      CHECK(wait_for(rank, rank.mailbox.isend(&value, 1, DType::int32, 0, 0, false)).ok());
    }
  });
}

TEST(a_send_larger_than_the_channel_fails_when_the_receiver_leaves) {
  ranks::run(2, [](Rank& rank) {
    if (rank.self == 1) {
      CHECK(ranks::eventually(
          [&] { return rank.group.segment().control(0).message_event.sleepers != 0; }));
      return;
    }
    std::vector<std::byte> data(2 * kRingBytes);
    const auto small = rank.mailbox.isend(data.data(), 10, DType::uint8, 1, 0, false);
    CHECK(wait_for(rank, small).ok());
    const auto large = rank.mailbox.isend(data.data(), data.size(), DType::uint8, 1, 0, false);
    CHECK_EQ(wait_for(rank, large).code, Code::left);
  });
}

TEST(abort_ends_all_outstanding_messages) {
  for (const bool served : {false, true}) {
    ranks::run(3, [&](Rank& rank) {
      std::vector<std::byte> data(3 * kRingBytes);
      std::unique_ptr<Server> server;
      if (served) server = std::make_unique<Server>(rank.mailbox);
      const int peer = (rank.self + 1) % 3;
      const std::vector<MessagePtr> messages = {
          rank.mailbox.isend(data.data(), data.size(), DType::uint8, peer, 0, served),
          rank.mailbox.irecv(data.data(), 1, DType::uint8, peer, 1, served),
          rank.mailbox.irecv(data.data(), 1, DType::uint8, peer, 2, served)};
      if (rank.self == 0) {
        for (const int other : {1, 2}) {
          Event& message_event = rank.group.segment().control(other).message_event;
          CHECK(ranks::eventually([&] { return message_event.sleepers != 0; }));
        }
        (void)rank.group.abort(Status{.code = Code::aborted, .reporter = 0});
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

TEST(the_deadline_of_a_message_names_its_peer) {
  ranks::run(2, [](Rank& rank) {
    std::byte byte{};
    if (rank.self == 0) {
      const auto message = rank.mailbox.irecv(&byte, 1, DType::uint8, 1, 8, false);
      const Status status = wait_for(rank, message, within(20ms));
      CHECK_EQ(status.code, Code::timeout);
      CHECK_EQ(status.peer, 1);
      CHECK_EQ(status.reporter, 0);
      CHECK_EQ(rank.group.failure_report().mine.kind, Kind::recv);
      CHECK_EQ(rank.group.failure_report().mine.root, 1);
    }
    rank.together.arrive_and_wait();
    const auto message = rank.mailbox.isend(&byte, 1, DType::uint8, 1 - rank.self, 8, false);
    CHECK_EQ(wait_for(rank, message).code, Code::timeout);
  });
}

TEST(an_interrupted_wait_breaks_the_group) {
  ranks::run(2, [](Rank& rank) {
    std::byte byte{};
    const auto message = rank.mailbox.irecv(&byte, 1, DType::uint8, 1 - rank.self, 0, false);
    Bounds bounds = within();
    if (rank.self == 0) bounds.interrupted = [] { return true; };
    const Status status = wait_for(rank, message, bounds);
    CHECK_EQ(status.code, Code::interrupted);
    CHECK_EQ(status.reporter, 0);
  });
}

// A server has posted a recv for each client, and goes on when one of them leaves.
TEST(a_recv_that_nobody_waits_for_ends_alone) {
  for (const bool served : {false, true}) {
    ranks::run(3, [&](Rank& rank) {
      if (rank.self == 2) return;
      std::byte byte{};
      std::unique_ptr<Server> server;
      if (served) server = std::make_unique<Server>(rank.mailbox);
      if (rank.self == 0) {
        const auto unanswered = rank.mailbox.irecv(&byte, 1, DType::uint8, 2, 0, served);
        const auto waited = rank.mailbox.irecv(&byte, 1, DType::uint8, 1, 0, false);
        CHECK(wait_for(rank, waited).ok());
        CHECK(rank.group.failure().ok());
        const Status status = wait_for(rank, unanswered);  // by which the others see it, too
        CHECK_EQ(status.code, Code::left);
        CHECK_EQ(status.peer, 2);
        CHECK_EQ(rank.group.failure_report().mine.kind, Kind::recv);
      } else {
        CHECK(ranks::eventually([&] { return !present(rank, 2); }));
        CHECK(ranks::eventually(
            [&] { return rank.group.segment().control(0).message_event.sleepers != 0; }));
        CHECK(wait_for(rank, rank.mailbox.isend(&byte, 1, DType::uint8, 0, 0, false)).ok());
      }
    });
  }
}

// Blocking calls of one thread do not hide the loss of a peer that only other threads wait for.
TEST(a_waiter_detects_failures_of_other_messages) {
  ranks::run(3, [](Rank& rank) {
    if (rank.self == 2) {
      CHECK(ranks::eventually(
          [&] { return rank.group.segment().control(0).message_event.sleepers != 0; }));
      return;
    }
    std::vector<std::byte> data(2 * kRingBytes);
    if (rank.self == 0) {
      Server server(rank.mailbox);
      const auto unread = rank.mailbox.isend(data.data(), data.size(), DType::uint8, 2, 0, true);
      const auto waited = rank.mailbox.irecv(data.data(), 1, DType::uint8, 1, 0, false);
      const Status status = wait_for(rank, waited);
      CHECK_EQ(status.code, Code::left);
      CHECK_EQ(status.peer, 2);
      CHECK(unread->done());
    } else {
      CHECK(ranks::eventually([&] { return !rank.group.failure().ok(); }));
    }
  });
}

TEST(closing_ends_the_waits_of_other_threads) {
  ranks::run(2, [](Rank& rank) {
    if (rank.self == 1) {
      rank.together.arrive_and_wait();
      return;
    }
    std::vector<std::byte> data(2 * kRingBytes);
    const auto unanswered = rank.mailbox.isend(data.data(), data.size(), DType::uint8, 1, 0, true);
    std::thread other([&rank] {
      std::byte byte{};
      const auto message = rank.mailbox.irecv(&byte, 1, DType::uint8, 1, 0, false);
      const Status status = wait_for(rank, message);
      CHECK_EQ(status.code, Code::left);
      CHECK_EQ(status.peer, 0);
    });
    Event& message_event = rank.group.segment().control(0).message_event;
    CHECK(ranks::eventually([&] { return message_event.sleepers != 0; }));
    rank.mailbox.close();
    other.join();
    CHECK_EQ(wait_for(rank, unanswered).code, Code::left);
    const auto late = rank.mailbox.isend(data.data(), 1, DType::uint8, 1, 0, true);
    CHECK_EQ(wait_for(rank, late).code, Code::left);
    CHECK(rank.group.failure().ok());  // the others are not affected yet
    rank.together.arrive_and_wait();
  });
}

TEST(a_watched_message_has_a_deadline) {
  ranks::run(2, [](Rank& rank) {
    Server server(rank.mailbox);
    std::byte byte{};
    if (rank.self == 0) {
      const auto message = rank.mailbox.irecv(&byte, 1, DType::uint8, 1, 8, true);
      rank.mailbox.watch(message, Clock::now() + 20ms);
      CHECK(ranks::eventually([&] { return server.reported() == 1; }));
      CHECK_EQ(message->status().code, Code::timeout);
      CHECK_EQ(message->status().peer, 1);
      CHECK_EQ(rank.group.failure_report().mine.sequence, 8u);
    }
    rank.together.arrive_and_wait();
    CHECK_EQ(rank.group.failure().code, Code::timeout);
  });
}

TEST(all_of_a_thousand_messages_fail_when_a_rank_leaves) {
  for (const bool served : {false, true}) {
    ranks::run(3, [&](Rank& rank) {
      if (rank.self == 2) return;
      std::vector<std::byte> data(2 * kRingBytes);
      std::unique_ptr<Server> server;
      if (served) server = std::make_unique<Server>(rank.mailbox);
      std::vector<MessagePtr> messages;
      for (int i = 0; i < 1000; ++i) {
        messages.push_back(
            i % 2 == 0 ? rank.mailbox.irecv(data.data(), 1, DType::uint8, 2, i, served)
                       : rank.mailbox.isend(data.data(), data.size(), DType::uint8, 2, i, served));
      }
      for (const MessagePtr& message : messages) {
        CHECK_EQ(wait_for(rank, message).code, Code::left);
      }
      CHECK_EQ(rank.mailbox.outstanding(), 0u);
    });
  }
}
