#include "phalanx/cow_memory.h"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include "phalanx/segment.h"

namespace phalanx {
namespace {

// Declared in <linux/fs.h> from Linux 6.7 on: the ioctl that finds pages by category.
struct ScanArguments {
  std::uint64_t size, flags, start, end, walk_end, vec, vec_len, max_pages;
  std::uint64_t category_inverted, category_mask, category_anyof_mask, return_mask;
};
struct ScanRegion {
  std::uint64_t start, end, categories;
};
constexpr unsigned long kScan = _IOWR('f', 16, ScanArguments);
constexpr std::uint64_t kScanFile = 1U << 2;
constexpr std::uint64_t kScanPresent = 1U << 3;
constexpr std::uint64_t kScanSwapped = 1U << 4;

// /proc/self/pagemap has a word per page, with these bits.
constexpr std::uint64_t kPresent = 1ULL << 63;
constexpr std::uint64_t kSwapped = 1ULL << 62;
constexpr std::uint64_t kFileBacked = 1ULL << 61;

Status system_error(int error) { return Status{.code = Code::system, .error = error}; }

std::size_t whole_pages(std::size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

// Calls `each(start, bytes)` for every run of copied pages. Returns false, before the first call,
// if the kernel lacks the ioctl.
template <class Each>
bool scan(int map, std::byte* base, std::size_t bytes, Each each) {
  std::array<ScanRegion, 256> found;
  const auto first = reinterpret_cast<std::uintptr_t>(base);
  ScanArguments arguments{};
  arguments.size = sizeof arguments;
  arguments.start = first;
  arguments.end = first + bytes;
  arguments.vec = reinterpret_cast<std::uintptr_t>(found.data());
  arguments.vec_len = found.size();
  arguments.category_inverted = kScanFile;
  arguments.category_mask = kScanFile;
  arguments.category_anyof_mask = kScanPresent | kScanSwapped;
  arguments.return_mask = kScanFile;
  while (arguments.start < first + bytes) {
    const int count = ioctl(map, kScan, &arguments);
    if (count < 0) {
      return false;
    }
    for (int i = 0; i < count; ++i) {
      const ScanRegion& region = found[static_cast<std::size_t>(i)];
      each(base + (region.start - first), region.end - region.start);
    }
    arguments.start = arguments.walk_end;
  }
  return true;
}

// The same by reading the kernel's word of every page. Without it, all pages count as copied.
template <class Each>
void read(int map, std::byte* base, std::size_t bytes, Each each) {
  std::array<std::uint64_t, 512> words;
  std::size_t run = 0;
  std::size_t done = 0;
  const auto first = reinterpret_cast<std::uintptr_t>(base) / kPage;
  while (done < bytes) {
    const std::size_t pages = std::min(words.size(), (bytes - done) / kPage);
    const std::size_t size = pages * sizeof(std::uint64_t);
    const auto position = static_cast<off_t>((first + done / kPage) * sizeof(std::uint64_t));
    if (map < 0 || pread(map, words.data(), size, position) != static_cast<ssize_t>(size)) {
      words.fill(kPresent);
    }
    for (std::size_t i = 0; i < pages; ++i, done += kPage) {
      const bool copied =
          (words[i] & kSwapped) != 0 || (words[i] & (kPresent | kFileBacked)) == kPresent;
      if (copied) {
        run += kPage;
      } else if (run != 0) {
        each(base + done - run, run);
        run = 0;
      }
    }
  }
  if (run != 0) {
    each(base + done - run, run);
  }
}

// Calls `each(start, bytes)` for every run of pages in [base, base + bytes) that a private mapping
// of a file has copies of.
template <class Each>
void for_each_copy(std::byte* base, std::size_t bytes, PageFinder finder, Each each) {
  const int map =
      finder == PageFinder::none ? -1 : ::open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
  if (finder != PageFinder::scan || map < 0 || !scan(map, base, bytes, each)) {
    read(map, base, bytes, each);
  }
  if (map >= 0) {
    ::close(map);
  }
}

}  // namespace

CowMemory::CowMemory(std::byte* shared, std::byte* priv, std::size_t bytes, int fd)
    : shared_(shared), private_(priv), bytes_(bytes), fd_(fd) {}

CowMemory::~CowMemory() {
  munmap(shared_, bytes_);
  munmap(private_, bytes_);
  close_descriptor();
}

void CowMemory::close_descriptor() {
  if (fd_ >= 0) {
    ::close(std::exchange(fd_, -1));
  }
}

std::unique_ptr<CowMemory> CowMemory::map(int fd, std::size_t bytes, Status& status) {
  void* shared = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  void* priv = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, fd, 0);
  if (shared == MAP_FAILED || priv == MAP_FAILED) {
    status = system_error(errno);
    for (void* base : {shared, priv}) {
      if (base != MAP_FAILED) {
        munmap(base, bytes);
      }
    }
    ::close(fd);
    return nullptr;
  }
  return std::unique_ptr<CowMemory>(
      new CowMemory(static_cast<std::byte*>(shared), static_cast<std::byte*>(priv), bytes, fd));
}

std::unique_ptr<CowMemory> CowMemory::create(std::size_t bytes, Status& status) {
  if (sysconf(_SC_PAGESIZE) != static_cast<long>(kPage)) {
    status = system_error(ENOTSUP);  // pages are copied in units of the kernel's page size
    return nullptr;
  }
  const std::size_t size = whole_pages(std::max<std::size_t>(bytes, 1));
  const int fd = memfd_create("phalanx-cow", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) {
    status = system_error(errno);
    return nullptr;
  }
  const int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
  if (fchmod(fd, 0600) != 0 || ftruncate(fd, static_cast<off_t>(size)) != 0 ||
      fcntl(fd, F_ADD_SEALS, seals) != 0) {
    status = system_error(errno);
    ::close(fd);
    return nullptr;
  }
  auto memory = map(fd, size, status);
  if (memory) {
    status = Segment::prefault(memory->shared_, size);
    if (!status.ok()) {
      return nullptr;
    }
  }
  return memory;
}

std::unique_ptr<CowMemory> CowMemory::open(int pid, int descriptor, std::size_t bytes,
                                           Status& status) {
  const std::size_t size = whole_pages(std::max<std::size_t>(bytes, 1));
  char path[64];
  std::snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, descriptor);
  const int fd = ::open(path, O_RDWR | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
  if (fd < 0) {
    status = system_error(errno);
    return nullptr;
  }
  struct stat info{};
  const int seals = fcntl(fd, F_GET_SEALS);
  if (fstat(fd, &info) != 0 || seals < 0 || (seals & F_SEAL_SHRINK) == 0 ||
      info.st_size != static_cast<off_t>(size)) {
    status = system_error(EPROTO);
    ::close(fd);
    return nullptr;
  }
  return map(fd, size, status);
}

std::size_t CowMemory::publish(std::size_t offset, std::size_t bytes, PageFinder finder) {
  std::size_t pages = 0;
  for_each_copy(private_ + offset, bytes, finder, [&](std::byte* start, std::size_t size) {
    std::memcpy(shared_ + (start - private_), start, size);
    madvise(start, size, MADV_DONTNEED);  // a locked page stays a copy, with the right bytes
    pages += size / kPage;
  });
  return pages;
}

std::size_t CowMemory::drop(std::size_t offset, std::size_t bytes, PageFinder finder) {
  std::size_t pages = 0;
  for_each_copy(private_ + offset, bytes, finder, [&](std::byte* start, std::size_t size) {
    if (madvise(start, size, MADV_DONTNEED) != 0) {  // locked pages stay copies
      std::memcpy(start, shared_ + (start - private_), size);
    }
    pages += size / kPage;
  });
  return pages;
}

}  // namespace phalanx
