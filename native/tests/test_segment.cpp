// The segment: its layout and seals, and that other memory is refused.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "ranks.h"

using namespace phalanx;

namespace {

constexpr std::uint64_t kNonce = 0xfeedface12345678;

// The numbers of layout version 5: a change of any of them requires a new kLayoutVersion.
static_assert(kLayoutVersion == 5);
static_assert(kMagic == 0x584e414c41485001);
static_assert(kSmallBytes == 16384 && kChunkBytes == 262144 && kRingBytes == 262144);
static_assert(kOversubscribedChunkBytes == 1048576 && kExchangeBytes == 524288);
static_assert(kEntries == 4 && kEntryPayload == 24 && kSmallPiece == 4096);
static_assert(kSmallRing == 32768 && kLargeRing == 2097152);
static_assert(sizeof(Header) == 128 && offsetof(Header, layout_version) == 8);
static_assert(offsetof(Header, ranks) == 12 && offsetof(Header, nonce) == 16);
static_assert(offsetof(Header, bytes) == 24 && offsetof(Header, abort_word) == 64);
static_assert(sizeof(Entry) == 64 && alignof(Entry) == 64 && offsetof(Entry, number) == 0);
static_assert(offsetof(Entry, fingerprint) == 8 && offsetof(Entry, history) == 24);
static_assert(offsetof(Entry, data) == 32 && offsetof(Entry, payload) == 40);
static_assert(sizeof(RankControl) == 512 && alignof(RankControl) == 64);
static_assert(offsetof(RankControl, entries) == 0 && offsetof(RankControl, step) == 256);
static_assert(offsetof(RankControl, entered) == 264 && offsetof(RankControl, step_event) == 320);
static_assert(offsetof(RankControl, message_event) == 384 && offsetof(RankControl, pid) == 448);
static_assert(offsetof(RankControl, presence) == 452 &&
              offsetof(RankControl, failure_fingerprints) == 456 &&
              offsetof(RankControl, recorder_descriptor) == 488);
static_assert(sizeof(Slot) == 64 && offsetof(Slot, count) == 8 && offsetof(Slot, tag) == 16);
static_assert(offsetof(Slot, ready) == 20 && offsetof(Slot, dtype) == 24);
static_assert(offsetof(Slot, payload) == 25 && kSlots == 1024 && kSlotPayload == 32);
static_assert(sizeof(Channel) == 4096 + 65536 + 262144 && alignof(Channel) == 4096);
static_assert(offsetof(Channel, tail) == 64 && offsetof(Channel, taken) == 72);
static_assert(offsetof(Channel, slots) == 4096 && offsetof(Channel, ring) == 4096 + 65536);
static_assert(sizeof(SharedFingerprint) == 16);
static_assert(sizeof(AgreementRound) == 64 && offsetof(AgreementRound, pid) == 4);
static_assert(offsetof(AgreementRound, descriptor) == 8 && offsetof(AgreementRound, nonce) == 16);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);
static_assert(std::atomic<std::uint32_t>::is_always_lock_free);
static_assert(std::atomic<Presence>::is_always_lock_free);
static_assert(std::atomic<Decision>::is_always_lock_free);

std::size_t open_files() {
  const std::filesystem::directory_iterator files("/proc/self/fd");
  return static_cast<std::size_t>(std::distance(begin(files), end(files)));
}

std::size_t mappings() {
  std::ifstream maps("/proc/self/maps");
  std::size_t found = 0;
  for (std::string line; std::getline(maps, line);) {
    found += line.find("memfd:phalanx") != std::string::npos;
  }
  return found;
}

std::unique_ptr<Segment> make(int ranks) {
  Status status;
  auto segment = Segment::create(ranks, kNonce, status);
  CHECK(status.ok());
  return segment;
}

int error_of_open(int fd, int ranks, std::uint64_t nonce, int pid = getpid()) {
  Status status;
  CHECK(Segment::open(pid, fd, ranks, nonce, status) == nullptr);
  CHECK_EQ(status.code, Code::system);
  return status.error;
}

}  // namespace

TEST(parts_are_contiguous) {
  for (const int ranks : {1, 2, 3, 8, 9, 64}) {
    const auto segment = make(ranks);
    const auto n = static_cast<std::size_t>(ranks);
    std::byte* base = reinterpret_cast<std::byte*>(&segment->header());
    const auto offset = [base](const void* part) {
      return static_cast<std::size_t>(static_cast<const std::byte*>(part) - base);
    };
    const std::size_t controls = (n * 512 + 4095) / 4096 * 4096;
    std::size_t next = 4096;
    CHECK_EQ(offset(&segment->control(0)), next);
    CHECK_EQ(offset(&segment->control(ranks - 1)), next + (n - 1) * 512);
    next += controls;
    for (int rank = 0; rank < ranks; ++rank) {
      CHECK_EQ(offset(segment->small_ring(rank)), next);
      next += 32768;
    }
    for (int rank = 0; rank < ranks; ++rank) {
      CHECK_EQ(offset(segment->large_ring(rank)), next);
      next += 2097152;
    }
    for (const std::uint64_t index : {6u, 7u}) {
      if (ranks != 2) break;
      CHECK_EQ(offset(segment->exchange_buffer(index)), next);
      next += 524288;
    }
    for (int source = 0; source < ranks; ++source) {
      for (int destination = 0; destination < ranks; ++destination) {
        CHECK_EQ(offset(&segment->channel(source, destination)), next);
        next += 4096 + 65536 + 262144;
      }
    }
    const std::size_t round = 64 + (n + 63) / 64 * 64;
    CHECK_EQ(segment->agreement_rounds(), 2 * ranks + 2);
    for (int number = 0; number < 2 * ranks + 2; ++number) {
      const std::size_t begin = next + static_cast<std::size_t>(number) * round;
      CHECK_EQ(offset(&segment->agreement_round(number)), begin);
      CHECK_EQ(offset(&segment->decision(number, ranks - 1)), begin + 64 + n - 1);
    }
    next += ((2 * n + 2) * round + 4095) / 4096 * 4096;
    CHECK_EQ(Segment::bytes_for(ranks), next);
  }
}

TEST(the_header_is_filled_and_the_rest_is_zero) {
  const auto segment = make(3);
  const Header& header = segment->header();
  CHECK_EQ(header.magic, kMagic);
  CHECK_EQ(header.layout_version, 5u);
  CHECK_EQ(header.ranks, 3u);
  CHECK_EQ(header.nonce, kNonce);
  CHECK_EQ(header.bytes, Segment::bytes_for(3));
  CHECK_EQ(header.abort_word.load(), 0u);
  for (int rank = 0; rank < 3; ++rank) {
    CHECK_EQ(segment->control(rank).step.load(), 0u);
    CHECK_EQ(segment->control(rank).presence.load(), Presence::absent);
  }
}

TEST(the_descriptor_is_private_and_closed_on_exec) {
  const auto segment = make(2);
  struct stat info{};
  CHECK_EQ(fstat(segment->descriptor(), &info), 0);
  CHECK_EQ(info.st_mode & 07777, 0600u);
  CHECK_EQ(static_cast<std::size_t>(info.st_size), Segment::bytes_for(2));
  CHECK((fcntl(segment->descriptor(), F_GETFD) & FD_CLOEXEC) != 0);
  const int fd = segment->descriptor();
  segment->close_descriptor();
  CHECK_EQ(segment->descriptor(), -1);
  CHECK_EQ(fcntl(fd, F_GETFD), -1);
  segment->close_descriptor();  // a second call does nothing
}

TEST(the_size_is_sealed) {
  const auto segment = make(2);
  const auto bytes = static_cast<off_t>(Segment::bytes_for(2));
  for (const off_t size : {off_t{0}, bytes - 1, bytes + 4096}) {
    CHECK_EQ(ftruncate(segment->descriptor(), size), -1);
    CHECK_EQ(errno, EPERM);
  }
  CHECK_EQ(fcntl(segment->descriptor(), F_ADD_SEALS, F_SEAL_WRITE), -1);
}

TEST(every_mapping_shows_the_same_memory) {
  const auto first = make(2);
  Status status;
  const auto second = Segment::open(getpid(), first->descriptor(), 2, kNonce, status);
  if (!CHECK(second != nullptr)) return;
  CHECK(&first->header() != &second->header());
  CHECK_EQ(second->ranks(), 2);
  CHECK_EQ(second->descriptor(), -1);
  first->control(1).step.store(42);
  CHECK_EQ(second->control(1).step.load(), 42u);
  const auto view = Segment::share(*first);
  CHECK(&first->header() == &view->header());
  CHECK_EQ(view->descriptor(), -1);
}

TEST(other_memory_is_refused) {
  const auto segment = make(3);
  const int fd = segment->descriptor();
  CHECK_EQ(error_of_open(fd, 3, kNonce + 1), EPROTO);
  CHECK_EQ(error_of_open(fd, 2, kNonce), EPROTO);
  CHECK_EQ(error_of_open(fd, 4, kNonce), EPROTO);
  CHECK_EQ(error_of_open(fd, 0, kNonce), EINVAL);
  CHECK_EQ(error_of_open(fd, kMaxRanks + 1, kNonce), EINVAL);
  CHECK_EQ(error_of_open(4000, 3, kNonce), ENOENT);
  CHECK_EQ(error_of_open(fd, 3, kNonce, 0x3fffffff), ENOENT);
  int ends[2];
  CHECK_EQ(pipe(ends), 0);
  CHECK_EQ(error_of_open(ends[0], 3, kNonce), EPROTO);
  CHECK_EQ(error_of_open(ends[1], 3, kNonce), EPROTO);
  ::close(ends[0]);
  ::close(ends[1]);
  std::FILE* file = std::tmpfile();
  CHECK_EQ(error_of_open(fileno(file), 3, kNonce), EPROTO);
  CHECK_EQ(ftruncate(fileno(file), static_cast<off_t>(Segment::bytes_for(3))), 0);
  CHECK_EQ(error_of_open(fileno(file), 3, kNonce), EPROTO);  // the right size, but not sealed
  std::fclose(file);
  for (std::uint32_t* field : {&segment->header().layout_version, &segment->header().ranks}) {
    ++*field;
    CHECK_EQ(error_of_open(fd, 3, kNonce), EPROTO);
    --*field;
  }
  segment->header().magic ^= 1;
  CHECK_EQ(error_of_open(fd, 3, kNonce), EPROTO);
}

TEST(an_invalid_number_of_ranks_is_refused) {
  for (const int ranks : {-1, 0, kMaxRanks + 1}) {
    Status status;
    CHECK(Segment::create(ranks, kNonce, status) == nullptr);
    CHECK_EQ(status.code, Code::system);
    CHECK_EQ(status.error, EINVAL);
  }
}

TEST(no_descriptor_and_no_mapping_leaks) {
  const std::size_t files = open_files();
  CHECK_EQ(mappings(), 0u);
  for (int round = 0; round < 20; ++round) {
    const auto segment = make(4);
    const int fd = segment->descriptor();
    Status status;
    const auto other = Segment::open(getpid(), fd, 4, kNonce, status);
    const auto view = Segment::share(*segment);
    CHECK_EQ(mappings(), 2u);
    CHECK_EQ(open_files(), files + 1);
    (void)error_of_open(fd, 4, kNonce + 1);
    (void)error_of_open(fd, 5, kNonce);
    (void)error_of_open(0, 4, kNonce);
    CHECK_EQ(mappings(), 2u);
    CHECK_EQ(open_files(), files + 1);
  }
  CHECK_EQ(mappings(), 0u);
  CHECK_EQ(open_files(), files);
}

TEST(prefaulting_changes_nothing_and_fails_without_memory) {
  const auto segment = make(2);
  std::memset(segment->large_ring(1), 0x5a, 2 * kChunkBytes);
  CHECK(prefault(segment->large_ring(1), 2 * kChunkBytes).ok());
  bool same = true;
  for (std::size_t i = 0; i < 2 * kChunkBytes; ++i) {
    same = same && segment->large_ring(1)[i] == std::byte{0x5a};
  }
  CHECK(same);
  // Unmapped pages cannot be allocated: this simulates a host without memory.
  CHECK_EQ(munmap(segment->large_ring(0), kChunkBytes), 0);
  const Status status = prefault(segment->large_ring(0), kChunkBytes);
  CHECK_EQ(status.code, Code::out_of_memory);
  CHECK_EQ(status.error, ENOMEM);
}

TEST(pages_are_allocated_when_used) {
  const auto segment = make(16);
  struct stat info{};
  CHECK_EQ(fstat(segment->descriptor(), &info), 0);
  CHECK(static_cast<std::size_t>(info.st_blocks) * 512 <= 4096 * 3 + 16 * kSmallRing);
}
