#include "phalanx/sealed_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace phalanx {
namespace {

// Closes a descriptor after a failure, whose errno stays.
int close_failed(int descriptor, int error) {
  ::close(descriptor);
  errno = error;
  return -1;
}

}  // namespace

int create_sealed_memory(const char* name, std::size_t bytes) {
  const int descriptor = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (descriptor < 0) {
    return -1;
  }
  const int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
  if (fchmod(descriptor, 0600) != 0 || ftruncate(descriptor, static_cast<off_t>(bytes)) != 0 ||
      fcntl(descriptor, F_ADD_SEALS, seals) != 0) {
    return close_failed(descriptor, errno);
  }
  return descriptor;
}

int open_sealed_memory(int pid, int descriptor) {
  char path[64];
  std::snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, descriptor);
  // O_NONBLOCK: if the pid belongs to another process on this host, the path may be a pipe.
  const int opened = ::open(path, O_RDWR | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
  if (opened < 0) {
    return -1;
  }
  const int needed = F_SEAL_SHRINK | F_SEAL_GROW;
  const int seals = fcntl(opened, F_GET_SEALS);
  return seals >= 0 && (seals & needed) == needed ? opened : close_failed(opened, EPROTO);
}

Status prefault(void* start, std::size_t bytes) {
  // madvise refuses an address within a page.
  const std::size_t before = reinterpret_cast<std::uintptr_t>(start) % kPage;
  std::byte* first = static_cast<std::byte*>(start) - before;
  bytes += before;
  if (madvise(first, bytes, MADV_POPULATE_WRITE) == 0) {
    return {};
  }
  if (errno != EINVAL) {
    return Status{.code = Code::out_of_memory, .error = errno};
  }
  // Before Linux 5.14. An atomic or with 0 touches a page without changing what a peer may be
  // writing there.
  for (std::size_t at = 0; at < bytes; at += kPage) {
    auto* byte = reinterpret_cast<std::atomic<std::uint8_t>*>(first + at);
    byte->fetch_or(0, std::memory_order_relaxed);
  }
  return {};
}

SealedMemory SealedMemory::create(const char* name, std::size_t bytes, Status& status) {
  return map(create_sealed_memory(name, bytes), status);
}

SealedMemory SealedMemory::open(int pid, int descriptor, Status& status) {
  return map(open_sealed_memory(pid, descriptor), status);
}

SealedMemory SealedMemory::map(int descriptor, Status& status, int flags) {
  SealedMemory memory;
  memory.descriptor_ = descriptor;
  struct stat info{};
  if (descriptor < 0 || fstat(descriptor, &info) != 0) {
    status = Status{.code = Code::system, .error = errno};
    return memory;
  }
  memory.bytes_ = static_cast<std::size_t>(info.st_size);
  void* base =
      mmap(nullptr, memory.bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | flags, descriptor, 0);
  if (base == MAP_FAILED) {
    status = Status{.code = Code::system, .error = errno};
  } else {
    memory.base_ = static_cast<std::byte*>(base);
  }
  return memory;
}

SealedMemory::~SealedMemory() {
  if (base_ != nullptr) {
    munmap(base_, bytes_);
  }
  close_descriptor();
}

bool SealedMemory::make_private() {
  void* anew =
      mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, descriptor_, 0);
  // In two steps, since an mmap that fails may already have removed what was at a fixed address.
  return anew != MAP_FAILED &&
         mremap(anew, bytes_, bytes_, MREMAP_MAYMOVE | MREMAP_FIXED, base_) == base_;
}

void SealedMemory::close_descriptor() {
  if (descriptor_ >= 0) {
    ::close(std::exchange(descriptor_, -1));
  }
}

}  // namespace phalanx
