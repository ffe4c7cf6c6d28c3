// Copy-on-write memory: only its owner sees writes to a private view, until they are published.
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <sstream>

#include "phalanx/cow_memory.h"
#include "ranks.h"

using namespace phalanx;
using ranks::Random;

namespace {

constexpr std::size_t kPages = 40;
constexpr std::size_t kBytes = kPages * kPage;

std::unique_ptr<CowMemory> create(std::size_t bytes = kBytes) {
  Status status;
  auto made = CowMemory::create(bytes, status);
  CHECK(status.ok());
  CHECK(made != nullptr);
  return made;
}

std::unique_ptr<CowMemory> open(const CowMemory& other, std::size_t bytes = kBytes) {
  Status status;
  auto opened = CowMemory::open(getpid(), other.descriptor(), bytes, status);
  CHECK(status.ok());
  CHECK(opened != nullptr);
  return opened;
}

// The bytes of such memory that only this process has.
std::size_t copied() {
  std::ifstream file("/proc/self/smaps");
  std::size_t kilobytes = 0;
  bool ours = false;
  for (std::string line; std::getline(file, line);) {
    if (line.find('-') < line.find(' ')) {  // the first line of a mapping: its addresses
      ours = line.find("phalanx-cow") != std::string::npos;
    } else if (ours && line.starts_with("Anonymous:")) {
      std::size_t size = 0;
      std::istringstream(line.substr(10)) >> size;
      kilobytes += size;
    }
  }
  return kilobytes * 1024;
}

}  // namespace

TEST(writes_to_the_shared_view_are_visible_to_all) {
  const auto one = create();
  const auto other = open(*one);
  CHECK_EQ(one->bytes(), kBytes);
  one->shared_view()[5] = std::byte{7};
  other->shared_view()[kBytes - 1] = std::byte{8};
  for (const CowMemory* rank : {one.get(), other.get()}) {
    CHECK(rank->private_view()[5] == std::byte{7});
    CHECK(rank->private_view()[kBytes - 1] == std::byte{8});
    CHECK(rank->shared_view()[5] == std::byte{7});
  }
}

TEST(writes_to_a_private_view_are_visible_to_its_owner_only) {
  const auto one = create();
  const auto other = open(*one);
  one->private_view()[10] = std::byte{1};
  CHECK(other->private_view()[10] == std::byte{0});
  CHECK(one->shared_view()[10] == std::byte{0});
  CHECK_EQ(one->drop(0, kBytes), 1UL);
  CHECK(one->private_view()[10] == std::byte{0});
  CHECK_EQ(one->drop(0, kBytes), 0UL);
}

TEST(a_dropped_page_follows_the_shared_view_again) {
  const auto one = create();
  const auto other = open(*one);
  one->private_view()[kPage] = std::byte{1};
  other->shared_view()[kPage + 1] = std::byte{2};
  CHECK(one->private_view()[kPage + 1] == std::byte{0});
  CHECK_EQ(one->drop(kPage, kPage), 1UL);
  CHECK(one->private_view()[kPage + 1] == std::byte{2});
}

// Random writes by two ranks, published and dropped at random, against plain arrays.
void publish_and_drop(PageFinder finder) {
  const auto one = create();
  const auto other = open(*one);
  CowMemory* all[] = {one.get(), other.get()};
  std::vector<std::byte> common(kBytes);
  std::vector<std::byte> own[2] = {common, common};
  std::vector<bool> copied[2] = {std::vector<bool>(kPages), std::vector<bool>(kPages)};
  Random random(3);
  for (int round = 0; round < ranks::scaled(4000); ++round) {
    const std::size_t who = random.below(2);
    const std::size_t page = random.below(kPages);
    const std::size_t pages = 1 + random.below(kPages - page);
    if (!random.one_in(3)) {
      const std::size_t at = page * kPage + random.below(kPage);
      const auto value = static_cast<std::byte>(random.below(256));
      all[who]->private_view()[at] = own[who][at] = value;
      copied[who][page] = true;
      continue;
    }
    const bool publish = random.one_in(2);
    std::size_t expected = 0;
    for (std::size_t i = page; i < page + pages; ++i) {
      std::byte* mine = own[who].data() + i * kPage;
      std::byte* shared = common.data() + i * kPage;
      if (copied[who][i]) {
        ++expected;
        copied[who][i] = false;
        std::memcpy(publish ? shared : mine, publish ? mine : shared, kPage);
      }
      for (int rank = 0; rank < 2; ++rank) {
        if (!copied[rank][i]) {
          std::memcpy(own[rank].data() + i * kPage, shared, kPage);
        }
      }
    }
    const auto call = publish ? &CowMemory::publish : &CowMemory::drop;
    const std::size_t done = (all[who]->*call)(page * kPage, pages * kPage, finder);
    CHECK_EQ(done, finder == PageFinder::none ? pages : expected);
    for (int rank = 0; rank < 2; ++rank) {
      CHECK(std::memcmp(all[rank]->private_view(), own[rank].data(), kBytes) == 0);
      CHECK(std::memcmp(all[rank]->shared_view(), common.data(), kBytes) == 0);
    }
  }
}

TEST(publish_and_drop_match_plain_memory_with_page_scan) { publish_and_drop(PageFinder::scan); }

TEST(publish_and_drop_match_plain_memory_with_pagemap) { publish_and_drop(PageFinder::map); }

TEST(publish_and_drop_match_plain_memory_without_kernel_support) {
  publish_and_drop(PageFinder::none);
}

TEST(equal_replicas_cost_no_memory) {
  constexpr std::size_t kLarge = 64UL << 20;
  const auto one = create(kLarge);
  const auto other = open(*one, kLarge);
  std::size_t sum = 0;
  for (std::size_t at = 0; at < kLarge; at += kPage) {
    sum += static_cast<std::size_t>(one->private_view()[at]) +
           static_cast<std::size_t>(other->private_view()[at]);
  }
  CHECK_EQ(sum, 0UL);
  CHECK_EQ(copied(), 0UL);
  one->private_view()[kLarge / 2] = std::byte{1};
  CHECK_EQ(copied(), kPage);
}

TEST(the_memory_lives_while_it_is_mapped) {
  auto one = create();
  const auto other = open(*one);
  one->shared_view()[1] = std::byte{9};
  one->close_descriptor();
  one->close_descriptor();
  CHECK_EQ(one->descriptor(), -1);
  one.reset();
  CHECK(other->private_view()[1] == std::byte{9});
}

TEST(another_process_sees_published_pages) {
  const auto one = create();
  const pid_t child = fork();
  if (child == 0) {
    Status status;
    const auto opened = CowMemory::open(getppid(), one->descriptor(), kBytes, status);
    if (!opened) _exit(1);
    opened->private_view()[3] = std::byte{4};
    opened->private_view()[kPage] = std::byte{5};
    _exit(opened->publish(0, kPage) == 1 ? 0 : 2);
  }
  int ending = -1;
  CHECK_EQ(waitpid(child, &ending, 0), child);
  CHECK_EQ(ending, 0);
  CHECK(one->private_view()[3] == std::byte{4});
  CHECK(one->private_view()[kPage] == std::byte{0});
}

TEST(other_memory_is_refused) {
  const auto one = create();
  Status status;
  CHECK(CowMemory::open(getpid(), one->descriptor(), kBytes + 1, status) == nullptr);
  CHECK_EQ(status.error, EPROTO);
  int ends[2];
  CHECK_EQ(pipe(ends), 0);
  CHECK(CowMemory::open(getpid(), ends[0], kBytes, status) == nullptr);
  CHECK_EQ(status.error, EPROTO);
  close(ends[0]);
  close(ends[1]);
  CHECK(CowMemory::open(getpid(), ends[0], kBytes, status) == nullptr);
  CHECK_EQ(status.error, ENOENT);
}

TEST(allocating_more_than_the_machine_has_is_an_error) {
  Status status;
  CHECK(CowMemory::create(~std::size_t{0} / 4, status) == nullptr);
  CHECK(!status.ok());
}
