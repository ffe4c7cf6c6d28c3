// Leased blocks: their states, their data, and owners and holders that are killed.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <thread>
#include <vector>

#include "phalanx/leases.h"
#include "process_faults.h"
#include "ranks.h"

using namespace phalanx;
using process_faults::end;
using Lease = LeaseSegment::Lease;

namespace {

constexpr std::uint64_t kNonce = 42;
constexpr std::size_t kBytes = 5000;
constexpr std::uint32_t kBlocks = 3;
constexpr std::int64_t kHolder = 7;
const auto kLong = std::chrono::seconds(60);

std::unique_ptr<LeaseSegment> create(std::uint32_t blocks = kBlocks, std::size_t bytes = kBytes) {
  Status status;
  auto made = LeaseSegment::create(9, bytes, blocks, kNonce, status);
  CHECK(status.ok());
  CHECK(made != nullptr);
  return made;
}

std::shared_ptr<LeaseSegmentView> open(const LeaseSegment& segment) {
  Status status;
  auto opened = LeaseSegmentView::open(getpid(), segment.descriptor(), kNonce, status);
  CHECK(status.ok());
  CHECK(opened != nullptr);
  return opened;
}

// The memory of a segment, by the offsets of the layout.
class Raw {
 public:
  explicit Raw(const LeaseSegment& segment) : bytes_(segment.bytes()) {
    base_ = static_cast<std::byte*>(
        mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, segment.descriptor(), 0));
    CHECK(base_ != MAP_FAILED);
  }
  ~Raw() { munmap(base_, bytes_); }
  Raw(const Raw&) = delete;
  Raw& operator=(const Raw&) = delete;

  template <class T>
  T& at(std::size_t offset) const {
    return *reinterpret_cast<T*>(base_ + offset);
  }
  std::uint64_t& word(std::size_t block) const { return at<std::uint64_t>(128 + 8 * block); }

 private:
  std::size_t bytes_;
  std::byte* base_;
};

// Element by element: the compiler expands memset to instructions that a sanitizer does not see.
void fill(std::byte* data, std::size_t bytes, std::size_t value) {
  for (std::size_t i = 0; i < bytes; ++i) data[i] = static_cast<std::byte>(value);
}

// Leases a block, and writes `value` to all of it.
Lease send(LeaseSegment& segment, int value, std::int64_t holder = kHolder) {
  const auto lease = segment.lease(holder);
  if (!CHECK(lease.has_value())) std::abort();
  fill(segment.data(lease->block), segment.block_bytes(), static_cast<std::size_t>(value));
  segment.finish(*lease, BlockState::leased);
  return *lease;
}

// Whether all bytes of a block are `value`.
bool holds(const LeaseSegmentView::Block& block, int value, std::size_t bytes = kBytes) {
  for (std::size_t i = 0; i < bytes; ++i) {
    if (block.data[i] != static_cast<std::byte>(value)) return false;
  }
  return true;
}

}  // namespace

TEST(the_layout_is_fixed) {
  const auto segment = create();
  const Raw raw(*segment);
  CHECK_EQ(segment->bytes(), 4096 + 3 * kBytes);
  CHECK(std::memcmp(&raw.at<char>(0), "\3PHXLEAS", 8) == 0);
  CHECK_EQ(raw.at<std::uint32_t>(8), 1U);
  CHECK_EQ(raw.at<std::uint32_t>(12), kBlocks);
  CHECK_EQ(raw.at<std::uint64_t>(16), kNonce);
  CHECK_EQ(raw.at<std::uint64_t>(24), 9UL);
  CHECK_EQ(raw.at<std::uint64_t>(32), kBytes);
  CHECK_EQ(raw.word(0), 0UL);
  (void)send(*segment, 1);
  (void)send(*segment, 77);
  CHECK_EQ(raw.word(0), 6UL);  // the first lease; leased
  CHECK_EQ(raw.word(1), 6UL);
  CHECK_EQ(raw.at<std::uint8_t>(4096 + kBytes), 77);
  const auto third = segment->lease(kHolder);
  CHECK_EQ(raw.word(2), 5UL);  // filling
  segment->finish(*third, BlockState::unwritten);
  CHECK_EQ(raw.word(2), 7UL);
  open(*segment)->give_back(2, 7);
  CHECK_EQ(raw.word(2), 4UL);
}

TEST(a_block_is_leased_read_and_given_back) {
  const auto segment = create();
  const auto view = open(*segment);
  CHECK_EQ(view->number(), 9UL);
  CHECK_EQ(segment->leased(), 0UL);
  const Lease first = send(*segment, 1);
  const Lease second = send(*segment, 2);
  CHECK_EQ(first.block, 0U);
  CHECK_EQ(second.block, 1U);
  CHECK_EQ(segment->leased(), 2UL);
  const auto one = view->take(first.block, kBytes);
  const auto two = view->take(second.block, 1);
  CHECK(one.state == BlockState::leased && holds(one, 1));
  CHECK(two.state == BlockState::leased && holds(two, 2));
  view->give_back(first.block, one.word);
  CHECK_EQ(segment->leased(), 1UL);
  CHECK_EQ(send(*segment, 3).block, 0U);  // the lowest
  CHECK_EQ(send(*segment, 4).block, 2U);
  CHECK(!segment->lease(kHolder).has_value());
  CHECK_EQ(segment->used(), 3UL);
  CHECK(holds(two, 2));
  view->give_back(second.block, two.word);
  CHECK_EQ(segment->lease(kHolder)->block, 1U);
}

TEST(what_is_not_leased_is_not_taken) {
  const auto segment = create();
  const auto view = open(*segment);
  const auto is_free = [&](std::uint32_t block, std::size_t bytes) {
    return view->take(block, bytes).state == BlockState::free;
  };
  CHECK(is_free(0, 1));
  (void)send(*segment, 1);
  CHECK(!is_free(0, kBytes));
  CHECK(is_free(0, kBytes + 1));
  CHECK(is_free(0, 0));
  CHECK(is_free(1, 1));
  CHECK(is_free(kBlocks, 1));
  CHECK(is_free(~0U, 1));
}

TEST(a_copy_that_is_given_up_is_reported_and_its_block_returned) {
  const auto segment = create();
  const auto view = open(*segment);
  const auto lease = segment->lease(kHolder);
  CHECK(view->take(lease->block, 1).state == BlockState::filling);
  segment->finish(*lease, BlockState::unwritten);
  CHECK_EQ(segment->leased(), 1UL);
  CHECK(view->take(lease->block, 1).state == BlockState::unwritten);
  CHECK_EQ(segment->leased(), 0UL);
  CHECK(view->take(lease->block, 1).state == BlockState::free);
  const auto unsent = segment->lease(kHolder);
  segment->finish(*unsent, BlockState::free);
  CHECK_EQ(segment->leased(), 0UL);
}

TEST(a_copy_is_finished_once) {
  const auto segment = create(1);
  const auto view = open(*segment);
  const Lease first = send(*segment, 1);
  segment->finish(first, BlockState::unwritten);
  const auto taken = view->take(0, kBytes);
  CHECK(taken.state == BlockState::leased);
  view->give_back(0, taken.word);
  const auto second = segment->lease(kHolder);
  CHECK_EQ(second->block, 0U);
  segment->finish(first, BlockState::leased);
  CHECK(view->take(0, 1).state == BlockState::filling);
  segment->finish(*second, BlockState::leased);
  CHECK(view->take(0, 1).state == BlockState::leased);
}

TEST(blocks_are_taken_back) {
  const auto segment = create();
  (void)send(*segment, 1, 1);
  (void)send(*segment, 2, 2);
  (void)send(*segment, 3, 1);
  segment->take_back(0, 2);
  segment->take_back(kBlocks, 1);
  CHECK_EQ(segment->leased(), 3UL);
  segment->take_back(0, 1);
  CHECK_EQ(segment->leased(), 2UL);
  segment->take_back_all(1);
  CHECK_EQ(segment->leased(), 1UL);
  segment->take_back(1, std::nullopt);
  CHECK_EQ(segment->leased(), 0UL);
  // A block into which a copy is under way is taken back at the end of that.
  const auto lease = segment->lease(3);
  segment->take_back_all(3);
  CHECK_EQ(segment->leased(), 1UL);
  CHECK_EQ(segment->lease(4)->block, 1U);
  segment->finish(*lease, BlockState::leased);
  CHECK_EQ(segment->leased(), 1UL);
  CHECK_EQ(segment->lease(4)->block, 0U);
}

TEST(a_late_return_does_not_end_another_lease) {
  const auto segment = create(1);
  const auto view = open(*segment);
  (void)send(*segment, 1);
  const auto late = view->take(0, kBytes);
  segment->take_back_all(kHolder);
  (void)send(*segment, 2, kHolder + 1);
  view->give_back(0, late.word);
  CHECK_EQ(segment->leased(), 1UL);
  CHECK(!segment->lease(kHolder).has_value());
  const auto taken = view->take(0, kBytes);
  view->give_back(0, taken.word);
  view->give_back(0, taken.word);
  CHECK_EQ(segment->leased(), 0UL);
}

TEST(a_forked_child_returns_nothing) {
  const auto segment = create(1);
  const auto view = open(*segment);
  (void)send(*segment, 1);
  const auto taken = view->take(0, kBytes);
  const pid_t child = fork();
  if (child == 0) {
    view->give_back(0, taken.word);
    _exit(0);
  }
  end(child);
  CHECK_EQ(segment->leased(), 1UL);
}

TEST(a_holder_waits_for_the_copy) {
  const auto segment = create();
  const auto view = LeaseSegmentView::share(*segment);
  const auto lease = segment->lease(kHolder);
  view->wait_for_copy(lease->block, Clock::now());
  CHECK(view->take(lease->block, 1).state == BlockState::filling);
  std::thread holder([&] { view->wait_for_copy(lease->block, Clock::now() + kLong); });
  const Raw raw(*segment);
  auto& sleepers = raw.at<std::atomic<std::uint32_t>>(64);
  CHECK(ranks::eventually([&] { return sleepers == 1; }));
  ++sleepers;  // the holder may be awake for a moment
  fill(segment->data(lease->block), kBytes, 5);
  segment->finish(*lease, BlockState::leased);
  holder.join();
  CHECK(raw.at<std::atomic<std::uint32_t>>(68) == 1);  // it was woken
  const auto taken = view->take(lease->block, kBytes);
  CHECK(taken.state == BlockState::leased && holds(taken, 5));
}

TEST(other_memory_is_refused) {
  const auto segment = create();
  Status status;
  const auto refused = [&](int descriptor, std::uint64_t nonce = kNonce) {
    status = {};
    return LeaseSegmentView::open(getpid(), descriptor, nonce, status) == nullptr &&
           status.code == Code::system;
  };
  CHECK(refused(segment->descriptor(), kNonce + 1));
  CHECK_EQ(status.error, EPROTO);
  CHECK(refused(1 << 20));
  CHECK_EQ(status.error, ENOENT);
  const Raw raw(*segment);
  const auto refused_with = [&]<class T>(std::size_t offset, T value) {
    const T kept = std::exchange(raw.at<T>(offset), value);
    CHECK(refused(segment->descriptor()));
    CHECK_EQ(status.error, EPROTO);
    raw.at<T>(offset) = kept;
  };
  refused_with(0, std::uint64_t{1});
  refused_with(8, kLeasesVersion + 1);
  for (const std::uint32_t blocks : {0U, kBlocks + 1, kMaxBlocks + 1, ~0U}) {
    refused_with(12, blocks);
  }
  for (const std::uint64_t bytes : {std::uint64_t{0}, std::uint64_t{1}, ~std::uint64_t{0}}) {
    refused_with(32, bytes);
  }
  const int other = memfd_create("phalanx-leases", 0);  // the same bytes, but not sealed
  CHECK_EQ(ftruncate(other, static_cast<off_t>(segment->bytes())), 0);
  CHECK_EQ(pwrite(other, &raw.at<char>(0), 64, 0), 64);
  CHECK(refused(other));
  CHECK_EQ(status.error, EPROTO);
  ::close(other);
  CHECK(LeaseSegment::create(0, 1, 0, kNonce, status) == nullptr);
  CHECK(LeaseSegment::create(0, 1, kMaxBlocks + 1, kNonce, status) == nullptr);
  CHECK(LeaseSegment::create(0, kMaxBlockBytes + 1, 1, kNonce, status) == nullptr);
  CHECK_EQ(status.error, EINVAL);
  CHECK(open(*segment) != nullptr);
}

// The owner sends the number of a block before or after the copy; nothing else orders its accesses
// and those of the holders than the words of the blocks.
TEST(holders_read_what_was_sent_to_them) {
  constexpr std::size_t kHolders = 3;
  constexpr std::size_t kSmall = 300;
  constexpr std::uint32_t kTwo = 2;
  const std::size_t messages = static_cast<std::size_t>(ranks::scaled(2'000));
  const auto segment = create(kTwo, kSmall);
  std::vector<std::atomic<std::uint32_t>> sent(messages);  // block + 1
  std::vector<std::thread> holders;
  for (std::size_t holder = 0; holder < kHolders; ++holder) {
    holders.emplace_back([&, holder] {
      const auto view = LeaseSegmentView::share(*segment);
      for (std::size_t i = holder; i < messages && check::failures == 0; i += kHolders) {
        std::uint32_t block = 0;
        CHECK(ranks::eventually([&] { return (block = sent[i].load()) != 0; }));
        auto taken = view->take(--block, kSmall);
        while (taken.state == BlockState::filling) {
          view->wait_for_copy(block, Clock::now() + kLong);
          taken = view->take(block, kSmall);
        }
        if (taken.state == BlockState::leased) {
          CHECK(i % 5 != 0 && holds(taken, static_cast<int>(i % 251), kSmall));
          CHECK(holds(taken, static_cast<int>(i % 251), kSmall));
          view->give_back(block, taken.word);
        } else {
          CHECK(taken.state == BlockState::unwritten);
          CHECK(i % 5 == 0);
        }
      }
    });
  }
  for (std::size_t i = 0; i < messages && check::failures == 0; ++i) {
    std::optional<Lease> lease;
    CHECK(ranks::eventually([&] {
      return (lease = segment->lease(static_cast<std::int64_t>(i % kHolders))).has_value();
    }));
    const auto send_number = [&] { sent[i].store(lease->block + 1); };
    if (i % 2 == 0) send_number();
    if (i % 5 != 0) {
      fill(segment->data(lease->block), kSmall, i % 251);
    }
    segment->finish(*lease, i % 5 == 0 ? BlockState::unwritten : BlockState::leased);
    if (i % 2 != 0) send_number();
  }
  for (auto& holder : holders) holder.join();
  CHECK_EQ(segment->leased(), 0UL);
}

#if defined(PHALANX_HOOKS)
using process_faults::run_with_fault;

TEST(an_owner_killed_at_every_step_leaves_whole_blocks_or_none) {
  int found = 0;
  for (int step = 0; check::failures == 0; ++step) {
    const auto segment = create(1);
    const auto view = open(*segment);
    const pid_t child = run_with_fault(step, SIGKILL, [&] {
      (void)send(*segment, 1);
      segment->take_back_all(kHolder);
      (void)send(*segment, 2);
    });
    const auto taken = view->take(0, kBytes);
    if (taken.state == BlockState::leased) CHECK(holds(taken, 1) || holds(taken, 2));
    found |= 1 << static_cast<int>(taken.state);
    if (child == 0) {
      CHECK(taken.state == BlockState::leased && holds(taken, 2));
      CHECK(step > 6);
      break;
    }
  }
  CHECK_EQ(found, 1 << static_cast<int>(BlockState::free) |
                      1 << static_cast<int>(BlockState::filling) |
                      1 << static_cast<int>(BlockState::leased));
}

TEST(a_holder_killed_at_every_step_leaves_blocks_that_are_taken_back) {
  const auto segment = create(1);
  for (int step = 0; check::failures == 0; ++step) {
    (void)send(*segment, 1);
    const pid_t child = run_with_fault(step, SIGKILL, [&] {
      const auto view = open(*segment);  // whose pid is that of the child
      const auto taken = view->take(0, kBytes);
      CHECK(holds(taken, 1));
      view->give_back(0, taken.word);
      _exit(check::failures);
    });
    segment->take_back_all(kHolder);
    CHECK_EQ(segment->leased(), 0UL);
    if (child == 0) {
      CHECK(step > 1);
      break;
    }
  }
}

// A holder that dies while it waits only causes needless wake-ups.
TEST(a_holder_killed_while_it_waits) {
  const auto segment = create(1);
  for (int step = 0; check::failures == 0 && step < 12; ++step) {
    const auto lease = segment->lease(kHolder);
    const pid_t child = run_with_fault(step, SIGKILL, [&] {
      const auto view = open(*segment);
      view->wait_for_copy(0, Clock::now());
    });
    CHECK(child != 0 || step > 5);
    segment->finish(*lease, BlockState::leased);
    segment->take_back_all(kHolder);
  }
  CHECK_EQ(segment->leased(), 0UL);
}
#endif
