#include "phalanx/cow_memory.h"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

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

CowMemory::~CowMemory() { munmap(private_, bytes()); }

std::unique_ptr<CowMemory> CowMemory::map(SealedMemory shared, Status& status) {
  void* priv = mmap(nullptr, shared.bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE,
                    shared.descriptor(), 0);
  if (priv == MAP_FAILED) {
    status = system_error(errno);
    return nullptr;
  }
  return std::unique_ptr<CowMemory>(
      new CowMemory(std::move(shared), static_cast<std::byte*>(priv)));
}

std::unique_ptr<CowMemory> CowMemory::create(std::size_t bytes, Status& status) {
  if (sysconf(_SC_PAGESIZE) != static_cast<long>(kPage)) {
    status = system_error(ENOTSUP);  // pages are copied in units of the kernel's page size
    return nullptr;
  }
  const std::size_t size = whole_pages(std::max<std::size_t>(bytes, 1));
  auto shared = SealedMemory::create("phalanx-cow", size, status);
  auto memory = shared.base() == nullptr ? nullptr : map(std::move(shared), status);
  if (memory) {
    status = prefault(memory->shared_view(), size);
    if (!status.ok()) {
      return nullptr;
    }
  }
  return memory;
}

std::unique_ptr<CowMemory> CowMemory::open(int pid, int descriptor, std::size_t bytes,
                                           Status& status) {
  auto shared = SealedMemory::open(pid, descriptor, status);
  if (shared.base() == nullptr) {
    return nullptr;
  }
  if (shared.bytes() != whole_pages(std::max<std::size_t>(bytes, 1))) {
    status = system_error(EPROTO);
    return nullptr;
  }
  return map(std::move(shared), status);
}

std::size_t CowMemory::publish(std::size_t offset, std::size_t bytes, PageFinder finder) {
  std::size_t pages = 0;
  for_each_copy(private_ + offset, bytes, finder, [&](std::byte* start, std::size_t size) {
    std::memcpy(shared_view() + (start - private_), start, size);
    madvise(start, size, MADV_DONTNEED);  // a locked page stays a copy, with the right bytes
    pages += size / kPage;
  });
  return pages;
}

std::size_t CowMemory::drop(std::size_t offset, std::size_t bytes, PageFinder finder) {
  std::size_t pages = 0;
  for_each_copy(private_ + offset, bytes, finder, [&](std::byte* start, std::size_t size) {
    if (madvise(start, size, MADV_DONTNEED) != 0) {  // locked pages stay copies
      std::memcpy(start, shared_view() + (start - private_), size);
    }
    pages += size / kPage;
  });
  return pages;
}

}  // namespace phalanx
