#include "phalanx/rows.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdio>
#include <string_view>
#include <utility>

#include "rows_access.h"

namespace phalanx {
namespace {

Status system_error(int error) { return Status{.code = Code::system, .error = error}; }

constexpr std::size_t whole(std::size_t bytes, std::size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

struct Offsets {
  std::size_t writers, locks, values, backups, end;
  std::size_t stride, part_bytes;
};

constexpr std::uint64_t locks_for(const RowsShape& shape) {
  return std::min(std::bit_ceil(shape.rows), kRowLocks);  // one, even if there are no rows
}

constexpr Offsets offsets_for(const RowsShape& shape) {
  Offsets o{};
  const std::size_t element = shape.dtype == DType::float64 ? 8 : 4;
  o.stride = whole(shape.width * element, sizeof(std::uint64_t));
  o.part_bytes = whole(o.stride * shape.rows, kPage);
  o.writers = kPage;
  o.locks = o.writers + whole(kRowWriters * sizeof(RowWriter), kPage);
  o.values = o.locks + whole(locks_for(shape) * sizeof(std::uint64_t), kPage);
  o.backups = o.values + shape.parts * o.part_bytes;
  o.end = o.backups + whole(kRowWriters * shape.parts * whole(o.stride, kCacheLine), kPage);
  return o;
}

static_assert(offsets_for({.rows = 5, .width = 3, .parts = 2}).end ==
                  4096 + 4096 + 4096 + 2 * 4096 + 64 * 2 * 64,
              "a changed layout needs a new kRowsVersion");
// No offset of a valid shape overflows: the largest table is 4 parts of 2^59 bytes, and little
// more.
static_assert(offsets_for({.rows = kMaxRows,
                           .width = kMaxRowElements,
                           .parts = kMaxRowParts,
                           .dtype = DType::float64})
                  .end < std::uint64_t{1} << 62);

bool valid(const RowsShape& shape) {
  return shape.rows <= kMaxRows && shape.width >= 1 && shape.width <= kMaxRowElements &&
         shape.parts >= 1 && shape.parts <= kMaxRowParts &&
         (shape.dtype == DType::float32 || shape.dtype == DType::float64);
}

// Whether a process and this one are in the same pid namespace, as all writers must be: the memory
// holds the pids of writers.
bool shares_pid_namespace(int pid) {
  char path[64];
  std::snprintf(path, sizeof path, "/proc/%d/ns/pid", pid);
  char own[64] = {};
  char other[64] = {};
  const ssize_t size = readlink("/proc/self/ns/pid", own, sizeof own - 1);
  return size > 0 && readlink(path, other, sizeof other - 1) == size &&
         std::string_view(own) == std::string_view(other);
}

}  // namespace

Rows::Rows(SealedMemory memory, const RowsShape& shape)
    : memory_(std::move(memory)), shape_(shape) {
  std::byte* base = memory_.base();
  // Rows are accessed in random order. With large pages there are few TLB misses. If the machine
  // allows none, this has no effect.
  madvise(base, memory_.bytes(), MADV_HUGEPAGE);
  const Offsets o = offsets_for(shape);
  stride_ = o.stride;
  part_bytes_ = o.part_bytes;
  locks_ = base + o.locks;
  lock_mask_ = locks_for(shape) - 1;
  values_ = base + o.values;
  backups_ = base + o.backups;
}

std::unique_ptr<Rows> Rows::create(const RowsShape& shape, std::uint64_t nonce, Status& status) {
  if (!valid(shape)) {
    status = system_error(EINVAL);
    return nullptr;
  }
  const std::size_t bytes = offsets_for(shape).end;
  auto memory = SealedMemory::create("phalanx-rows", bytes, status);
  if (memory.base() == nullptr) {
    return nullptr;
  }
  std::unique_ptr<Rows> created(new Rows(std::move(memory), shape));
  status = prefault(created->memory_.base(), bytes);
  if (!status.ok()) {
    return nullptr;
  }
  RowsHeader& header = created->header();
  header.version = kRowsVersion;
  header.dtype = static_cast<std::uint32_t>(shape.dtype);
  header.nonce = nonce;
  header.bytes = bytes;
  header.rows = shape.rows;
  header.width = shape.width;
  header.parts = shape.parts;
  header.magic = kRowsMagic;
  return created;
}

std::unique_ptr<Rows> Rows::open(int pid, int descriptor, std::uint64_t nonce, Status& status) {
  auto memory = SealedMemory::open(pid, descriptor, status);
  if (memory.base() == nullptr) {
    return nullptr;
  }
  memory.close_descriptor();
  const std::size_t bytes = memory.bytes();
  const RowsHeader& header = *reinterpret_cast<const RowsHeader*>(memory.base());
  RowsShape shape;
  bool good = shares_pid_namespace(pid) && bytes >= sizeof header && header.magic == kRowsMagic &&
              header.version == kRowsVersion && header.nonce == nonce;
  if (good) {
    shape = {.rows = header.rows,
             .width = header.width,
             .parts = header.parts,
             .dtype = static_cast<DType>(header.dtype)};
    good = header.dtype <= 0xff && valid(shape) && offsets_for(shape).end == header.bytes &&
           bytes == header.bytes;
  }
  if (!good) {
    status = system_error(EPROTO);
    return nullptr;
  }
  return std::unique_ptr<Rows>(new Rows(std::move(memory), shape));
}

RowWriter& Rows::writer(std::size_t slot) const {
  return reinterpret_cast<RowWriter*>(memory_.base() + kPage)[slot];
}

Rows::Word* Rows::words(std::uint32_t part, std::uint64_t row) const {
  return reinterpret_cast<Word*>(values_ + part * part_bytes_ + row * stride_);
}

std::byte* Rows::backup(std::size_t slot, std::uint32_t part) const {
  return backups_ + (slot * shape_.parts + part) * whole(stride_, kCacheLine);
}

RowsResult Rows::check(const RowList& list) const {
  // Without a branch per number, so that the compiler vectorises the loop.
  std::uint64_t largest = 0;
  for (std::size_t i = 0; i < list.count; ++i) {
    largest = std::max(largest, static_cast<std::uint64_t>(list.rows[i]));
  }
  if (list.count == 0 || largest < shape_.rows) {
    return {};
  }
  std::size_t at = 0;
  while (static_cast<std::uint64_t>(list.rows[at]) < shape_.rows) {
    ++at;
  }
  return {.kind = RowsResult::Kind::index, .at = at, .value = list.rows[at]};
}

}  // namespace phalanx
