#include "phalanx/arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <utility>

#include "phalanx/segment.h"

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

std::size_t whole_pages(std::size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

std::byte* map_file(int fd, std::size_t bytes) {
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  return base == MAP_FAILED ? nullptr : static_cast<std::byte*>(base);
}

}  // namespace

Arena::Arena(std::byte* base, std::size_t bytes, int fd)
    : base_(base), bytes_(bytes), fd_(fd), owner_(getpid()), free_{{0, bytes}} {}

Arena* Arena::own(Status& status) {
  const std::lock_guard lock(making);
  // Pairs with the store in make; acquire, for the constructor's writes.
  Arena* arena = current.load(std::memory_order_acquire);
  return arena != nullptr && arena->owner_ == getpid() ? arena : make(status);
}

Arena* Arena::make(Status& status) {
  const std::size_t bytes = memory_of_machine();
  const int fd = memfd_create("phalanx-shared", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) {
    status = system_error(errno);
    return nullptr;
  }
  const int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
  const bool ready = fchmod(fd, 0600) == 0 && ftruncate(fd, static_cast<off_t>(bytes)) == 0 &&
                     fcntl(fd, F_ADD_SEALS, seals) == 0;
  std::byte* base = ready ? map_file(fd, bytes) : nullptr;
  if (base == nullptr) {
    status = system_error(errno);
    ::close(fd);
    return nullptr;
  }
  auto* arena = new Arena(base, bytes, fd);
  // Pairs with the loads in own and locate.
  current.store(arena, std::memory_order_release);
  return arena;
}

std::optional<ArenaLocation> Arena::locate(const void* data, std::size_t bytes) {
  // Pairs with the store in make.
  const Arena* arena = current.load(std::memory_order_acquire);
  if (arena == nullptr || data == nullptr) {
    return std::nullopt;
  }
  const auto offset =
      reinterpret_cast<std::uintptr_t>(data) - reinterpret_cast<std::uintptr_t>(arena->base_);
  if (offset >= arena->bytes_ || bytes > arena->bytes_ - offset || arena->owner_ != getpid()) {
    return std::nullopt;
  }
  return ArenaLocation{.descriptor = arena->fd_, .offset = offset};
}

std::byte* Arena::allocate(std::size_t bytes, Status& status) {
  const std::size_t size = whole_pages(std::max<std::size_t>(bytes, 1));
  std::size_t offset = bytes_;
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
  if (offset == bytes_) {
    status = Status{.code = Code::out_of_memory, .error = ENOMEM};
    return nullptr;
  }
  status = Segment::prefault(base_ + offset, size);
  if (!status.ok()) {
    release(base_ + offset);
    return nullptr;
  }
  return base_ + offset;
}

void Arena::release(std::byte* data) {
  auto offset = static_cast<std::size_t>(data - base_);
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
  char path[64];
  std::snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, descriptor);
  const int opened = ::open(path, O_RDWR | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
  if (opened < 0) {
    status = system_error(errno);
    return nullptr;
  }
  struct stat info{};
  const int seals = fcntl(opened, F_GET_SEALS);
  if (fstat(opened, &info) != 0 || seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
    status = system_error(EPROTO);
    ::close(opened);
    return nullptr;
  }
  const std::lock_guard lock(mutex);
  auto& cached = views[File(info.st_dev, info.st_ino)];
  std::shared_ptr<const ArenaView> view = cached.lock();
  if (!view) {
    const auto bytes = static_cast<std::size_t>(info.st_size);
    std::byte* base = map_file(opened, bytes);
    if (base == nullptr) {
      status = system_error(errno);
    } else {
      cached = view = std::shared_ptr<const ArenaView>(new ArenaView(base, bytes));
    }
  }
  ::close(opened);
  return view;
}

ArenaView::~ArenaView() { munmap(base_, bytes_); }

}  // namespace phalanx
