#include "phalanx/segment.h"

#include <cerrno>

#include "phalanx/wait.h"

namespace phalanx {
namespace {

struct Offsets {
  std::size_t control, small_rings, large_rings, exchange, channels, agreement, end;
};

constexpr Offsets offsets_for(std::size_t ranks) {
  Offsets o{};
  o.control = kPage;
  o.small_rings = o.control + whole_pages(ranks * sizeof(RankControl));
  o.large_rings = o.small_rings + ranks * kSmallRing;
  o.exchange = o.large_rings + ranks * kLargeRing;
  o.channels = o.exchange + (ranks == 2 ? 2 * kExchangeBytes : 0);
  o.agreement = o.channels + ranks * ranks * sizeof(Channel);
  o.end = o.agreement + whole_pages((2 * ranks + 2) * Segment::round_bytes(ranks));
  return o;
}
static_assert(offsets_for(2).end == 4096 + 4096 + 2 * (32768 + 2097152) + 2 * 524288 +
                                        4 * (4096 + 65536 + 262144) + 4096 &&
                  offsets_for(3).end ==
                      4096 + 4096 + 3 * (32768 + 2097152) + 9 * (4096 + 65536 + 262144) + 4096,
              "a changed layout needs a new kLayoutVersion");

bool valid(int ranks) { return ranks >= 1 && ranks <= kMaxRanks; }

Status system_error(int error) { return Status{.code = Code::system, .error = error}; }

// Allocates the pages that small collectives need, but the small rings.
Status prefault_entries(std::byte* base, int ranks) {
  const Offsets offsets = offsets_for(static_cast<std::size_t>(ranks));
  Status status = prefault(base, offsets.small_rings);
  for (std::size_t i = 0; status.ok() && ranks == 2 && i < 2; ++i) {
    status = prefault(base + offsets.exchange + i * kExchangeBytes, kExchangeReady);
  }
  return status;
}

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
  status = prefault_entries(memory.base(), ranks);
  if (!status.ok()) {
    return nullptr;
  }
  std::byte* base = memory.base();
  std::unique_ptr<Segment> segment(new Segment(std::move(memory), base, ranks));
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
  std::byte* base = memory.base();
  std::unique_ptr<Segment> segment(new Segment(std::move(memory), base, ranks));
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
  return std::unique_ptr<Segment>(new Segment({}, owner.base_, owner.ranks()));
}

Segment::Segment(SealedMemory memory, std::byte* base, int ranks)
    : memory_(std::move(memory)), base_(base) {
  const Offsets offsets = offsets_for(static_cast<std::size_t>(ranks));
  controls_ = reinterpret_cast<RankControl*>(base_ + offsets.control);
  small_rings_ = base_ + offsets.small_rings;
  large_rings_ = base_ + offsets.large_rings;
  exchange_ = base_ + offsets.exchange;
  channels_ = reinterpret_cast<Channel*>(base_ + offsets.channels);
  agreement_ = base_ + offsets.agreement;
}

Channel& Segment::channel(int source, int destination) const {
  const auto index =
      static_cast<std::size_t>(source) * header().ranks + static_cast<std::size_t>(destination);
  return channels_[index];
}

}  // namespace phalanx
