// The arena: blocks are disjoint, zeroed, located by address, and freed.
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>

#include "phalanx/arena.h"
#include "ranks.h"

using namespace phalanx;
using ranks::Random;

namespace {

Arena& arena() {
  Status status;
  Arena* own = Arena::own(status);
  CHECK(own != nullptr);
  return *own;
}

std::byte* allocate(std::size_t bytes) {
  Status status;
  std::byte* data = arena().allocate(bytes, status);
  CHECK(status.ok());
  return data;
}

bool zeroed(const std::byte* data, std::size_t bytes) {
  return std::all_of(data, data + bytes, [](std::byte b) { return b == std::byte{0}; });
}

}  // namespace

TEST(blocks_are_disjoint_and_come_back_zeroed) {
  struct Block {
    std::byte* data;
    std::size_t size;
    std::byte mark;
  };
  Random random(7);
  std::vector<Block> blocks;
  for (int i = 0; i < ranks::scaled(2000); ++i) {
    if (blocks.empty() || random.one_in(2)) {
      const Block block{allocate(1 + random.below(50'000)), 1 + random.below(1), {}};
      blocks.push_back(block);
      Block& made = blocks.back();
      made.size = 1 + random.below(4096);
      made.mark = static_cast<std::byte>(1 + random.below(255));
      CHECK(zeroed(made.data, made.size));
      std::memset(made.data, static_cast<int>(made.mark), made.size);
    } else {
      const std::size_t which = random.below(blocks.size());
      const Block block = blocks[which];
      CHECK(std::all_of(block.data, block.data + block.size,
                        [&](std::byte b) { return b == block.mark; }));
      arena().release(block.data);
      blocks.erase(blocks.begin() + static_cast<std::ptrdiff_t>(which));
    }
  }
  for (const Block& block : blocks) arena().release(block.data);
  CHECK_EQ(arena().in_use(), 0UL);
}

TEST(adjacent_free_blocks_merge) {
  std::byte* first = allocate(1);
  std::byte* second = allocate(1);
  std::byte* third = allocate(1);
  CHECK_EQ(second - first, static_cast<std::ptrdiff_t>(kPage));
  arena().release(first);
  arena().release(third);
  arena().release(second);
  std::byte* whole = allocate(3 * kPage);
  CHECK(whole == first);
  arena().release(whole);
}

TEST(a_location_is_found_by_its_address) {
  std::byte* data = allocate(1000);
  const auto location = Arena::locate(data + 10, 100);
  CHECK(location.has_value());
  CHECK_EQ(location->offset, static_cast<std::uint64_t>(data + 10 - arena().base()));
  int outside = 0;
  CHECK(!Arena::locate(&outside, sizeof outside).has_value());
  CHECK(!Arena::locate(nullptr, 0).has_value());
  CHECK(!Arena::locate(arena().base() - 1, 2).has_value());
  CHECK(!Arena::locate(data, ~std::size_t{0}).has_value());
  arena().release(data);
}

TEST(allocating_more_than_the_machine_has_is_an_error) {
  Status status;
  CHECK(arena().allocate(~std::size_t{0} / 2, status) == nullptr);
  CHECK(status.code == Code::out_of_memory);
  std::byte* data = allocate(1);
  arena().release(data);
}

TEST(a_view_shows_the_same_memory) {
  std::byte* data = allocate(5000);
  const auto location = Arena::locate(data, 5000);
  Status status;
  const auto view = ArenaView::open(getpid(), location->descriptor, status);
  const auto again = ArenaView::open(getpid(), location->descriptor, status);
  CHECK(view != nullptr);
  CHECK(view == again);
  data[4999] = std::byte{42};
  CHECK(view->at(location->offset)[4999] == std::byte{42});
  view->at(location->offset)[0] = std::byte{43};
  CHECK(data[0] == std::byte{43});
  arena().release(data);
}

TEST(other_descriptors_are_refused) {
  int ends[2];
  CHECK_EQ(pipe(ends), 0);
  Status status;
  CHECK(ArenaView::open(getpid(), ends[0], status) == nullptr);
  CHECK(status.code == Code::system);
  close(ends[0]);
  close(ends[1]);
  CHECK(ArenaView::open(getpid(), ends[0], status) == nullptr);
  CHECK_EQ(status.error, ENOENT);
}

TEST(a_forked_child_has_its_own_arena) {
  std::byte* data = allocate(100);
  data[0] = std::byte{1};
  const pid_t child = fork();
  if (child == 0) {
    Status status;
    bool good = !Arena::locate(data, 100).has_value();
    std::byte* own = Arena::own(status)->allocate(100, status);
    good = good && own != data && Arena::locate(own, 100).has_value();
    own[0] = std::byte{2};
    good = good && data[0] == std::byte{1};
    data[0] = std::byte{3};
    const pid_t grandchild = fork();
    if (grandchild == 0) {
      const bool is_inherited = data[0] == std::byte{3} && own[0] == std::byte{2};
      data[0] = own[0] = std::byte{4};
      _exit(is_inherited ? 0 : 1);
    }
    int ending = -1;
    good = good && waitpid(grandchild, &ending, 0) == grandchild && ending == 0;
    _exit(good && data[0] == std::byte{3} && own[0] == std::byte{2} ? 0 : 1);
  }
  int ending = -1;
  CHECK_EQ(waitpid(child, &ending, 0), child);
  CHECK_EQ(ending, 0);
  CHECK(data[0] == std::byte{1});
  arena().release(data);
}
