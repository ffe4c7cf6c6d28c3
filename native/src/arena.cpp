#include "phalanx/arena.h"

#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <utility>

namespace phalanx {
namespace {

// Writer: make, under the mutex. Never freed, since tensors may outlive everything else.
std::atomic<Arena*> current = nullptr;
std::mutex making;

Status system_error(int error) { return Status{.code = Code::system, .error = error}; }

std::size_t memory_of_machine() {
  return static_cast<std::size_t>(sysconf(_SC_PHYS_PAGES)) *
         static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
}

}  // namespace

Arena::Arena(SealedMemory memory)
    : memory_(std::move(memory)), owner_(getpid()), free_{{0, memory_.bytes()}} {}

Arena* Arena::own(Status& status) {
  const std::lock_guard lock(making);
  // Pairs with the store in make; acquire, for the constructor's writes.
  Arena* arena = current.load(std::memory_order_acquire);
  return arena != nullptr && arena->owner_ == getpid() ? arena : make(status);
}

Arena* Arena::make(Status& status) {
  auto memory = SealedMemory::map(create_sealed_memory("phalanx-shared", memory_of_machine()),
                                  status, MAP_NORESERVE);
  if (memory.base() == nullptr) {
    return nullptr;
  }
  auto* arena = new Arena(std::move(memory));
  [[maybe_unused]] static const int registered = pthread_atfork(nullptr, nullptr, leave_to_parent);
  // Pairs with the loads in own and locate.
  current.store(arena, std::memory_order_release);
  return arena;
}

// Runs in a forked child. Its writes to tensors of the parent must not reach the parent.
void Arena::leave_to_parent() {
  Arena* arena = current.load(std::memory_order_acquire);  // pairs with the store in make
  if (arena->is_shared_) {
    arena->is_shared_ = false;
    arena->memory_.make_private();
  }
}

std::optional<ArenaLocation> Arena::locate(const void* data, std::size_t bytes) {
  // Pairs with the store in make.
  const Arena* arena = current.load(std::memory_order_acquire);
  if (arena == nullptr || data == nullptr) {
    return std::nullopt;
  }
  const SealedMemory& memory = arena->memory_;
  const auto offset =
      reinterpret_cast<std::uintptr_t>(data) - reinterpret_cast<std::uintptr_t>(memory.base());
  if (offset >= memory.bytes() || bytes > memory.bytes() - offset || arena->owner_ != getpid()) {
    return std::nullopt;
  }
  return ArenaLocation{.descriptor = memory.descriptor(), .offset = offset};
}

std::byte* Arena::allocate(std::size_t bytes, Status& status) {
  const std::size_t size = whole_pages(std::max<std::size_t>(bytes, 1));
  std::size_t offset = memory_.bytes();
  {
    const std::lock_guard lock(mutex_);
    for (auto [start, room] : free_) {
      if (room >= size) {
        offset = start;
        free_.erase(start);
        if (room > size) {
          free_[start + size] = room - size;
        }
        used_[start] = size;
        break;
      }
    }
  }
  if (offset == memory_.bytes()) {
    status = Status{.code = Code::out_of_memory, .error = ENOMEM};
    return nullptr;
  }
  status = prefault(base() + offset, size);
  if (!status.ok()) {
    release(base() + offset);
    return nullptr;
  }
  return base() + offset;
}

void Arena::release(std::byte* data) {
  auto offset = static_cast<std::size_t>(data - base());
  const std::lock_guard lock(mutex_);
  auto used = used_.extract(offset);
  std::size_t size = used.mapped();
  if (owner_ == getpid()) {  // a forked child shares the pages, and must not remove them
    madvise(data, size, MADV_REMOVE);
  }
  auto after = free_.lower_bound(offset);
  if (after != free_.end() && after->first == offset + size) {
    size += after->second;
    after = free_.erase(after);
  }
  if (after != free_.begin()) {
    auto before = std::prev(after);
    if (before->first + before->second == offset) {
      before->second += size;
      return;
    }
  }
  free_[offset] = size;
}

std::size_t Arena::in_use() const {
  const std::lock_guard lock(mutex_);
  std::size_t all = 0;
  for (const auto& [offset, size] : used_) {
    all += size;
  }
  return all;
}

std::shared_ptr<const ArenaView> ArenaView::open(int pid, int descriptor, Status& status) {
  // Keyed by the file itself, whose number is not reused while a view of it lives.
  using File = std::pair<dev_t, ino_t>;
  static std::mutex mutex;
  static std::map<File, std::weak_ptr<const ArenaView>> views;
  const int opened = open_sealed_memory(pid, descriptor);
  struct stat info{};
  if (opened < 0 || fstat(opened, &info) != 0) {
    status = system_error(errno);
    return nullptr;
  }
  const std::lock_guard lock(mutex);
  auto& cached = views[File(info.st_dev, info.st_ino)];
  std::shared_ptr<const ArenaView> view = cached.lock();
  if (view) {
    ::close(opened);
    return view;
  }
  auto memory = SealedMemory::map(opened, status, MAP_NORESERVE);
  if (memory.base() != nullptr) {
    memory.close_descriptor();
    cached = view = std::shared_ptr<const ArenaView>(new ArenaView(std::move(memory)));
  }
  return view;
}

}  // namespace phalanx
