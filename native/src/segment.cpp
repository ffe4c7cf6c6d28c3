#include "phalanx/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>

#include "phalanx/wait.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace phalanx {
namespace {

struct Offsets {
  std::size_t control, inline_buffers, staging, channels, end;
};

constexpr std::size_t whole_pages(std::size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

constexpr Offsets offsets_for(std::size_t ranks) {
  Offsets o{};
  o.control = kPage;
  o.inline_buffers = o.control + whole_pages(ranks * sizeof(RankControl));
  o.staging = o.inline_buffers + ranks * 2 * kInlineBytes;
  o.channels = o.staging + ranks * kStagingBytes;
  o.end = o.channels + ranks * ranks * sizeof(Channel);
  return o;
}
static_assert(offsets_for(2).end == 4096 + 4096 + 2 * 2 * 16384 + 2 * 2097152 + 4 * (4096 + 262144),
              "a changed layout needs a new kLayoutVersion");

bool valid(int ranks) { return ranks >= 1 && ranks <= kMaxRanks; }

Status system_error(int error) { return Status{.code = Code::system, .error = error}; }

}  // namespace

std::size_t Segment::bytes_for(int ranks) {
  return offsets_for(static_cast<std::size_t>(ranks)).end;
}

std::size_t Segment::fitting_chunk(int ranks) {
  return ranks > usable_cores() ? kOversubscribedChunkBytes : kChunkBytes;
}

std::unique_ptr<Segment> Segment::create(int ranks, std::uint64_t nonce, std::size_t chunk_bytes,
                                         Status& status) {
  if (!valid(ranks) || chunk_bytes > kOversubscribedChunkBytes || chunk_bytes % kCacheLine != 0) {
    status = system_error(EINVAL);
    return nullptr;
  }
  const std::size_t bytes = bytes_for(ranks);
  const int fd = memfd_create("phalanx", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) {
    status = system_error(errno);
    return nullptr;
  }
  const int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
  if (fchmod(fd, 0600) != 0 || ftruncate(fd, static_cast<off_t>(bytes)) != 0 ||
      fcntl(fd, F_ADD_SEALS, seals) != 0) {
    status = system_error(errno);
    ::close(fd);
    return nullptr;
  }
  auto segment = map(fd, bytes, status);
  if (!segment) {
    return nullptr;
  }
  status = prefault(segment->base_, offsets_for(static_cast<std::size_t>(ranks)).staging);
  if (!status.ok()) {
    return nullptr;
  }
  Header& header = segment->header();
  header.ranks = static_cast<std::uint32_t>(ranks);
  header.layout_version = kLayoutVersion;
  header.nonce = nonce;
  header.bytes = bytes;
  header.chunk_bytes = chunk_bytes;
  header.magic = kMagic;
  return segment;
}

std::unique_ptr<Segment> Segment::open(int pid, int fd, int ranks, std::uint64_t nonce,
                                       Status& status) {
  if (!valid(ranks)) {
    status = system_error(EINVAL);
    return nullptr;
  }
  char path[64];
  std::snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, fd);
  // O_NONBLOCK: if the pid belongs to another process on this host, the path may be a pipe.
  const int opened = ::open(path, O_RDWR | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
  if (opened < 0) {
    status = system_error(errno);
    return nullptr;
  }
  struct stat info{};
  const std::size_t bytes = bytes_for(ranks);
  const int seals = fcntl(opened, F_GET_SEALS);
  if (fstat(opened, &info) != 0 || static_cast<std::size_t>(info.st_size) != bytes || seals < 0 ||
      (seals & F_SEAL_SHRINK) == 0) {
    status = system_error(EPROTO);
    ::close(opened);
    return nullptr;
  }
  auto segment = map(opened, bytes, status);
  if (!segment) {
    return nullptr;
  }
  segment->close_descriptor();
  const Header& header = segment->header();
  if (header.magic != kMagic || header.layout_version != kLayoutVersion || header.bytes != bytes ||
      header.ranks != static_cast<std::uint32_t>(ranks) || header.nonce != nonce) {
    status = system_error(EPROTO);
    return nullptr;
  }
  return segment;
}

std::unique_ptr<Segment> Segment::map(int fd, std::size_t bytes, Status& status) {
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) {
    status = system_error(errno);
    ::close(fd);
    return nullptr;
  }
  return std::unique_ptr<Segment>(new Segment(static_cast<std::byte*>(base), bytes, fd, true));
}

std::unique_ptr<Segment> Segment::share(const Segment& owner) {
  return std::unique_ptr<Segment>(new Segment(owner.base_, owner.bytes_, -1, false));
}

Segment::~Segment() {
  close_descriptor();
  if (mapped_) {
    munmap(base_, bytes_);
  }
}

void Segment::close_descriptor() {
  if (fd_ >= 0) {
    ::close(fd_);
    fd_ = -1;
  }
}

RankControl& Segment::control(int rank) const {
  return reinterpret_cast<RankControl*>(base_ + kPage)[rank];
}

std::byte* Segment::inline_buffer(int rank, std::uint64_t sequence) const {
  const auto index = 2 * static_cast<std::size_t>(rank) + (sequence & 1);
  return base_ + offsets_for(header().ranks).inline_buffers + index * kInlineBytes;
}

std::byte* Segment::staging(int rank, std::uint64_t chunk) const {
  const std::size_t start = static_cast<std::size_t>(rank) * kStagingBytes;
  return base_ + offsets_for(header().ranks).staging + start + (chunk & 1) * chunk_bytes();
}

Channel& Segment::channel(int source, int destination) const {
  const auto index =
      static_cast<std::size_t>(source) * header().ranks + static_cast<std::size_t>(destination);
  return reinterpret_cast<Channel*>(base_ + offsets_for(header().ranks).channels)[index];
}

Status Segment::prefault(void* start, std::size_t bytes) {
  if (madvise(start, bytes, MADV_POPULATE_WRITE) == 0) {
    return {};
  }
  if (errno != EINVAL) {
    return Status{.code = Code::out_of_memory, .error = errno};
  }
  // Before Linux 5.14. An atomic or with 0 touches a page without changing what a peer may be
  // writing there.
  for (std::size_t at = 0; at < bytes; at += kPage) {
    auto* byte = reinterpret_cast<std::atomic<std::uint8_t>*>(static_cast<std::byte*>(start) + at);
    byte->fetch_or(0, std::memory_order_relaxed);
  }
  return {};
}

}  // namespace phalanx
