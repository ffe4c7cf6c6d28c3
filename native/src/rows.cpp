#include "phalanx/rows.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
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

Rows::Rows(std::byte* base, const RowsShape& shape, std::size_t bytes, int fd)
    : base_(base), shape_(shape), bytes_(bytes), fd_(fd) {
  const Offsets o = offsets_for(shape);
  stride_ = o.stride;
  part_bytes_ = o.part_bytes;
  locks_ = base + o.locks;
  lock_mask_ = locks_for(shape) - 1;
  values_ = base + o.values;
  backups_ = base + o.backups;
}

Rows::~Rows() {
  munmap(base_, bytes_);
  close_descriptor();
}

void Rows::close_descriptor() {
  if (fd_ >= 0) {
    ::close(std::exchange(fd_, -1));
  }
}

std::unique_ptr<Rows> Rows::map(int fd, const RowsShape& shape, std::size_t bytes, Status& status) {
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) {
    status = system_error(errno);
    ::close(fd);
    return nullptr;
  }
  // Rows are accessed in random order. With large pages there are few TLB misses. If the machine
  // allows none, this has no effect.
  madvise(base, bytes, MADV_HUGEPAGE);
  return std::unique_ptr<Rows>(new Rows(static_cast<std::byte*>(base), shape, bytes, fd));
}

std::unique_ptr<Rows> Rows::create(const RowsShape& shape, std::uint64_t nonce, Status& status) {
  if (!valid(shape)) {
    status = system_error(EINVAL);
    return nullptr;
  }
  const std::size_t bytes = offsets_for(shape).end;
  const int fd = memfd_create("phalanx-rows", MFD_CLOEXEC | MFD_ALLOW_SEALING);
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
  auto created = map(fd, shape, bytes, status);
  if (!created) {
    return nullptr;
  }
  status = Segment::prefault(created->base_, bytes);
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
  char path[64];
  std::snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, descriptor);
  // O_NONBLOCK: if the pid belongs to another process on this host, the path may be a pipe.
  const int fd = ::open(path, O_RDWR | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
  if (fd < 0) {
    status = system_error(errno);
    return nullptr;
  }
  RowsHeader header{};
  struct stat info{};
  const int seals = fcntl(fd, F_GET_SEALS);
  const auto header_bytes = static_cast<ssize_t>(offsetof(RowsHeader, step));
  RowsShape shape;
  bool good = shares_pid_namespace(pid) && seals >= 0 && (seals & F_SEAL_SHRINK) != 0 &&
              fstat(fd, &info) == 0 &&
              pread(fd, &header, static_cast<std::size_t>(header_bytes), 0) == header_bytes &&
              header.magic == kRowsMagic && header.version == kRowsVersion && header.nonce == nonce;
  if (good) {
    shape = {.rows = header.rows,
             .width = header.width,
             .parts = header.parts,
             .dtype = static_cast<DType>(header.dtype)};
    good = header.dtype <= 0xff && valid(shape) && offsets_for(shape).end == header.bytes &&
           info.st_size == static_cast<off_t>(header.bytes);
  }
  if (!good) {
    status = system_error(EPROTO);
    ::close(fd);
    return nullptr;
  }
  auto opened = map(fd, shape, header.bytes, status);
  if (opened) {
    opened->close_descriptor();
  }
  return opened;
}

RowWriter& Rows::writer(std::size_t slot) const {
  return reinterpret_cast<RowWriter*>(base_ + kPage)[slot];
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
