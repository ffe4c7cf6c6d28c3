// Many messages and long ones: thousands outstanding, gigabytes long, floods of others.
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <numeric>

#include "messages.h"

using namespace phalanx;
using namespace std::chrono_literals;
using namespace messages;

namespace {

// A large range of addresses with little memory: the same pages, mapped one after another.
class Endless {
 public:
  Endless(std::size_t bytes, std::byte value) : bytes_((bytes + kPart - 1) / kPart * kPart) {
    const int fd = memfd_create("endless", MFD_CLOEXEC);
    CHECK(fd >= 0 && ftruncate(fd, kPart) == 0);
    void* base =
        mmap(nullptr, bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(base != MAP_FAILED);
    data_ = static_cast<std::byte*>(base);
    for (std::size_t at = 0; at < bytes_; at += kPart) {
      CHECK(mmap(data_ + at, kPart, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) !=
            MAP_FAILED);
    }
    close(fd);
    std::fill(data_, data_ + kPart, value);
  }
  ~Endless() { munmap(data_, bytes_); }
  Endless(const Endless&) = delete;
  Endless& operator=(const Endless&) = delete;
  std::byte* data() { return data_; }

  static constexpr std::size_t kPart = 16 << 20;

 private:
  std::size_t bytes_;
  std::byte* data_;
};

std::vector<std::int32_t> random_order(std::size_t n, ranks::Random& random) {
  std::vector<std::int32_t> order(n);
  std::iota(order.begin(), order.end(), 0);
  for (std::size_t i = n; i > 1; --i) std::swap(order[i - 1], order[random.below(i)]);
  return order;
}

}  // namespace

TEST(thousands_outstanding_in_two_random_orders) {
  const auto n = static_cast<std::size_t>(std::max(2'000, ranks::scaled(40'000)));
  for (const int size : {2, 3, 4}) {
    for (const bool served : {false, true}) {
      ranks::run(size, [&](Rank& rank) {
        const int right = (rank.self + 1) % size, left = (rank.self + size - 1) % size;
        std::vector<std::int32_t> out(n), in(n, -1);
        std::vector<MessagePtr> messages;
        std::unique_ptr<Server> server;
        if (served) server = std::make_unique<Server>(rank.mailbox);
        const auto sent = random_order(n, rank.random), asked = random_order(n, rank.random);
        for (std::size_t i = 0; i < n; ++i) {
          const auto send = static_cast<std::size_t>(sent[i]);
          const auto recv = static_cast<std::size_t>(asked[i]);
          out[send] = sent[i] ^ left;
          const int source = asked[i] % 3 == 0 ? kAnySource : left;
          messages.push_back(
              rank.mailbox.irecv(&in[recv], 1, DType::int32, source, asked[i], served));
          messages.push_back(
              rank.mailbox.isend(&out[send], 1, DType::int32, right, sent[i], served));
        }
        for (const MessagePtr& message : messages) {
          if (!CHECK(wait_for(rank, message).ok())) return;
        }
        const int theirs = (left + size - 1) % size;
        for (std::size_t i = 0; i < n; ++i) CHECK_EQ(in[i], static_cast<std::int32_t>(i) ^ theirs);
        CHECK_EQ(rank.mailbox.outstanding(), 0u);
      });
    }
  }
}

TEST(recvs_of_one_tag_are_matched_in_posting_order) {
  ranks::run(3, [](Rank& rank) {
    // Each source sends enough for all recvs, since those of any source may all match one. The rest
    // fits into the channel.
    constexpr std::int32_t n = 1000;
    if (rank.self != 0) {
      for (std::int32_t i = 0; i < n; ++i) {
        const std::int32_t value = rank.self * n + i;
        CHECK(wait_for(rank, rank.mailbox.isend(&value, 1, DType::int32, 0, 4, false)).ok());
      }
      return;
    }
    std::vector<std::int32_t> in(n, -1);
    std::vector<MessagePtr> messages;
    for (std::int32_t& value : in) {
      const int source = std::array{kAnySource, 1, 2}[rank.random.below(3)];
      messages.push_back(rank.mailbox.irecv(&value, 1, DType::int32, source, 4, false));
      ranks::random_delay(rank.random);
    }
    std::int32_t next[3] = {};
    for (std::size_t i = 0; i < in.size(); ++i) {
      if (!CHECK(wait_for(rank, messages[i]).ok())) return;
      const int source = messages[i]->peer();
      CHECK_EQ(in[i], source * n + next[source]++);
    }
  });
}

TEST(a_message_larger_than_4_gib) {
  constexpr std::size_t size = (std::size_t{1} << 32) + 12'345;
  if (ranks::kShare != 1) return;  // sanitizers do not check sizes, and would take minutes
  ranks::run(2, [](Rank& rank) {
    Endless memory(size + 1, rank.self == 0 ? std::byte{0x3c} : std::byte{0});
    if (rank.self == 0) {
      CHECK(
          wait_for(rank, rank.mailbox.isend(memory.data(), size, DType::uint8, 1, 0, false)).ok());
    } else {
      CHECK(
          wait_for(rank, rank.mailbox.irecv(memory.data(), size, DType::uint8, 0, 0, false)).ok());
      const auto odd = std::count_if(memory.data(), memory.data() + Endless::kPart,
                                     [](std::byte byte) { return byte != std::byte{0x3c}; });
      CHECK_EQ(odd, 0);
    }
    rank.together.arrive_and_wait();
  });
}

TEST(a_flood_of_other_messages_does_not_hide_the_deadline) {
  ranks::run(2, [](Rank& rank) {
    std::byte byte{};
    if (rank.self == 1) {
      Status status;
      while (status.ok()) {
        status = wait_for(rank, rank.mailbox.isend(&byte, 1, DType::uint8, 0, 1, false));
      }
      CHECK_EQ(status.code, Code::timeout);
      return;
    }
    const auto message = rank.mailbox.irecv(&byte, 1, DType::uint8, 1, 2, false);
    const Status status = wait_for(rank, message, within(30ms));
    CHECK_EQ(status.code, Code::timeout);
    CHECK_EQ(rank.group.failure_report().mine.sequence, 2u);
    CHECK(rank.mailbox.unexpected_peak() > 0);
  });
}

TEST(unexpected_messages_are_accounted_for) {
  ranks::run(2, [](Rank& rank) {
    std::vector<std::byte> data(1000);
    if (rank.self == 0) {
      for (const int tag : {1, 2, 3, 4}) {
        CHECK(wait_for(rank, rank.mailbox.isend(data.data(), 1000, DType::uint8, 1, tag, false))
                  .ok());
      }
    } else {
      for (const int tag : {3, 1, 4, 2}) {
        CHECK(wait_for(rank, rank.mailbox.irecv(data.data(), 1000, DType::uint8, 0, tag, false))
                  .ok());
      }
      CHECK_EQ(rank.mailbox.unexpected_peak(), 2000u);
    }
  });
}

// One thread of each rank streams all the time; the others still make progress.
TEST(a_long_message_does_not_delay_other_threads) {
  ranks::run(2, [](Rank& rank) {
    const auto rounds = static_cast<std::size_t>(std::max(20, ranks::scaled(200)));
    std::vector<std::byte> large(16 * kRingBytes);
    const auto turn = [&rank](std::byte* data, std::size_t size, int tag) {
      const auto message = rank.self == 0
                               ? rank.mailbox.isend(data, size, DType::uint8, 1, tag, false)
                               : rank.mailbox.irecv(data, size, DType::uint8, 0, tag, false);
      return CHECK(wait_for(rank, message).ok());
    };
    std::thread streaming([&] {
      for (std::size_t i = 0; i < rounds && turn(large.data(), large.size(), 0); ++i) {
      }
    });
    std::byte small{};
    for (std::size_t i = 0; i < rounds && turn(&small, 1, 1); ++i) {
    }
    streaming.join();
  });
}

TEST(test_makes_progress) {
  ranks::run(2, [](Rank& rank) {
    std::vector<std::byte> out(3 * kRingBytes, std::byte{0x11}), in(3 * kRingBytes);
    const int peer = 1 - rank.self;
    const auto send = rank.mailbox.isend(out.data(), out.size(), DType::uint8, peer, 0, true);
    const auto recv = rank.mailbox.irecv(in.data(), in.size(), DType::uint8, peer, 0, true);
    CHECK(ranks::eventually([&] { return rank.mailbox.test(*recv); }));
    CHECK(ranks::eventually([&] { return rank.mailbox.test(*send); }));
    CHECK(in == out);
  });
}
