#include "phalanx/segment.h"

#include <cerrno>

#include "phalanx/wait.h"

namespace phalanx {
namespace {

struct Offsets {
  std::size_t control, inline_buffers, staging, channels, end;
};

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
  auto memory = SealedMemory::create("phalanx", bytes, status);
  if (memory.base() == nullptr) {
    return nullptr;
  }
  status = prefault(memory.base(), offsets_for(static_cast<std::size_t>(ranks)).staging);
  if (!status.ok()) {
    return nullptr;
  }
  std::unique_ptr<Segment> segment(new Segment(std::move(memory)));
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
  const std::size_t bytes = bytes_for(ranks);
  auto memory = SealedMemory::open(pid, fd, status);
  if (memory.base() == nullptr) {
    return nullptr;
  }
  if (memory.bytes() != bytes) {
    status = system_error(EPROTO);
    return nullptr;
  }
  std::unique_ptr<Segment> segment(new Segment(std::move(memory)));
  segment->close_descriptor();
  const Header& header = segment->header();
  if (header.magic != kMagic || header.layout_version != kLayoutVersion || header.bytes != bytes ||
      header.ranks != static_cast<std::uint32_t>(ranks) || header.nonce != nonce) {
    status = system_error(EPROTO);
    return nullptr;
  }
  return segment;
}

std::unique_ptr<Segment> Segment::share(const Segment& owner) {
  return std::unique_ptr<Segment>(new Segment(owner.base_));
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

}  // namespace phalanx
