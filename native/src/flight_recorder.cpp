#include "phalanx/flight_recorder.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <ctime>
#include <type_traits>

#include "phalanx/call_site.h"
#include "phalanx/copy.h"
#include "phalanx/hooks.h"

namespace phalanx {
namespace {

using Words = std::array<std::uint64_t, sizeof(Record) / 8>;

std::atomic<FlightRecorder*> own_recorder = nullptr;

// Truncates at the end, but not within a UTF-8 character.
template <std::size_t N>
void put(Text<N>& to, std::string_view text) {
  std::size_t size = std::min(text.size(), N - 1);
  while (size > 0 && size < text.size() && (text[size] & 0xc0) == 0x80) {
    --size;
  }
  text.copy(to, size);
  std::memset(to + size, 0, N - size);
}

// Truncates at the beginning: the end of a path is the most informative part.
void put_site(CallSite& to, std::string_view text) {
  constexpr std::size_t kMaxBytes = sizeof(to.text) - 1;
  put(to.text, text.size() <= kMaxBytes ? text : text.substr(text.size() - kMaxBytes));
}

std::int64_t wall_clock_offset() {
  timespec wall{};
  clock_gettime(CLOCK_REALTIME, &wall);
  const std::int64_t now = wall.tv_sec * 1'000'000'000 + wall.tv_nsec;
  return now - static_cast<std::int64_t>(nanoseconds(Clock::now()));
}

}  // namespace

namespace {

// The words of a record, put together from its fields. To read them from its memory would wait
// until the fields, which are shorter, have reached the cache.
Words words_of(const Record& record) {
  static_assert(offsetof(Record, peer) == 48 && offsetof(Record, site) == 56);
  const auto field = [](auto value, int position) {
    using Unsigned = std::make_unsigned_t<decltype(value)>;
    return static_cast<std::uint64_t>(static_cast<Unsigned>(value)) << position;
  };
  const auto byte = [&](auto value, int position) {
    return field(static_cast<std::uint8_t>(value), position);
  };
  return {record.number,
          record.begin,
          record.end,
          record.waited,
          record.sequence,
          record.count,
          field(record.peer, 0) | field(record.waiting_for, 16) | byte(record.dtype, 32) |
              byte(record.op, 40) | byte(record.outcome, 48) | byte(record.thread, 56),
          field(record.site, 0) | field(record.group, 32) | byte(record.kind, 48) |
              byte(record.progress, 56)};
}
static_assert(std::endian::native == std::endian::little);

}  // namespace

// Every store of a word is a release: a reader that sees it also sees that `frame_` changed before.
// Readers copy the file with a system call, in an order that the language does not define. They
// rely on the processor's order, and check the frame.
void SharedRecord::store(const Record& value) {
  const Words words = words_of(value);
  PHALANX_STEP("record: frame");
  frame_.store(value.number, std::memory_order_relaxed);
  for (std::size_t i = kWords; i-- > 0;) {
    PHALANX_STEP("record: write");
    words_[i].store(words[i], std::memory_order_release);
  }
}

void SharedRecord::clear() {
  PHALANX_STEP("record: clear");
  frame_.store(0, std::memory_order_relaxed);
  words_[0].store(0, std::memory_order_release);
}

void SharedRecord::waiting_for(const Record& value) {
  PHALANX_STEP("record: publish the awaited rank");
  words_[kPeers].store(words_of(value)[kPeers], std::memory_order_release);
}

void SharedRecord::progress(const Record& value) {
  PHALANX_STEP("record: publish the progress");
  words_[kProgress].store(words_of(value)[kProgress], std::memory_order_release);
}

bool SharedRecord::load(Record& value) const {
  Words words{};
  for (std::size_t i = 0; i < kWords; ++i) {
    // Pairs with the stores above.
    words[i] = words_[i].load(std::memory_order_acquire);
  }
  value = std::bit_cast<Record>(words);
  return value.number != 0 && value.number == frame_.load(std::memory_order_relaxed);
}

bool SharedRecord::empty() const {
  return words_[0].load(std::memory_order_relaxed) == 0 &&
         frame_.load(std::memory_order_relaxed) == 0;
}

std::unique_ptr<FlightRecorder> FlightRecorder::open(int fd, const RecorderIdentity& identity,
                                                     Status& status) {
  void* base = mmap(nullptr, sizeof(RecorderLayout), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) {
    status = Status{.code = Code::system, .error = errno};
    return nullptr;
  }
  auto* layout = static_cast<RecorderLayout*>(base);
  RecorderHeader& header = layout->header;
  header.version = kRecorderVersion;
  header.rank = identity.rank;
  header.world_size = identity.world_size;
  header.attempt = identity.attempt;
  header.pid = getpid();
  header.clock = wall_clock_offset();
  header.opened = nanoseconds(Clock::now());
  put(header.host, identity.host);
  put(header.job, identity.job);
  // A reader that finds it in a copy of the file may read the fields stored above.
  std::atomic_ref(header.magic).store(kRecorderMagic, std::memory_order_release);
  auto recorder = std::unique_ptr<FlightRecorder>(new FlightRecorder(layout, fd));
  recorder->publish_sites();
  return recorder;
}

FlightRecorder::~FlightRecorder() {
  munmap(layout_, sizeof(RecorderLayout));
  ::close(fd_);
}

FlightRecorder* FlightRecorder::own() { return own_recorder.load(std::memory_order_acquire); }

void FlightRecorder::install(std::unique_ptr<FlightRecorder> recorder) {
  // Pairs with the load in own().
  own_recorder.store(recorder.release(), std::memory_order_release);
}

void FlightRecorder::detach() {
  own_recorder.store(nullptr, std::memory_order_relaxed);
  current_caller() = {.site = 0, .thread = Caller::kMain};  // the forking thread is the only one
}

std::uint16_t FlightRecorder::add_group(int rank, int size) {
  const std::lock_guard lock(mutex_);
  GroupEntry* entry = nullptr;
  for (GroupEntry& candidate : layout_->groups) {
    if (candidate.id.load(std::memory_order_relaxed) == 0) {
      entry = &candidate;
      break;
    }
    const bool left = candidate.left_time.load(std::memory_order_relaxed) != 0;
    if (left && (entry == nullptr || candidate.id.load(std::memory_order_relaxed) <
                                         entry->id.load(std::memory_order_relaxed))) {
      entry = &candidate;
    }
  }
  if (entry == nullptr) {
    return 0;
  }
  entry->id.store(0, std::memory_order_relaxed);
  // Each a release, so that none comes before the id is cleared: a reader that sees a field of the
  // new group in a copy of the file finds no old id there.
  entry->identity.store(0, std::memory_order_release);
  entry->sequence.store(0, std::memory_order_release);
  entry->left_time.store(0, std::memory_order_release);
  entry->left_at.store(0, std::memory_order_release);
  entry->rank = rank;
  entry->size = size;
  name_group(*entry, "", "");
  set_abort_reason(*entry, "");
  do {
    last_group_ = static_cast<std::uint16_t>(last_group_ + 1 == 0x10000 ? 1 : last_group_ + 1);
  } while (group(last_group_) != nullptr);
  // A reader that sees the id may read the entry. Pairs with the load in read_groups.
  entry->id.store(last_group_, std::memory_order_release);
  layout_->header.groups.fetch_add(1, std::memory_order_relaxed);
  return last_group_;
}

GroupEntry* FlightRecorder::group(std::uint16_t id) {
  for (GroupEntry& entry : layout_->groups) {
    if (id != 0 && entry.id.load(std::memory_order_relaxed) == id) {
      return &entry;
    }
  }
  return nullptr;
}

void FlightRecorder::name_group(GroupEntry& entry, std::string_view name,
                                std::string_view members) {
  put(entry.name, name);
  put(entry.members, members.size() < sizeof entry.members ? members : "");
}

void FlightRecorder::set_abort_reason(GroupEntry& entry, std::string_view reason) {
  put(entry.abort_reason, reason);
}

int FlightRecorder::begin(Record& record) {
  record.number = layout_->header.operations_begun.fetch_add(1, std::memory_order_relaxed) + 1;
  // Claims a slot: no other thread writes there until end().
  const bool message = record.kind == Kind::send || record.kind == Kind::recv;
  const std::uint64_t reserved = message ? ~std::uint64_t{0} << kRecorderMessages : 0;
  std::uint64_t used_slots = used_slots_.load(std::memory_order_relaxed);
  while (~(used_slots | reserved) != 0) {
    const int slot = std::countr_one(used_slots | reserved);
    if (used_slots_.compare_exchange_weak(used_slots, used_slots | std::uint64_t{1} << slot,
                                          std::memory_order_acquire, std::memory_order_relaxed)) {
      layout_->open[slot].store(record);
      return slot;
    }
  }
  return -1;
}

void FlightRecorder::end(int slot, const Record& record) {
  const std::uint64_t index =
      layout_->header.operations_ended.fetch_add(1, std::memory_order_relaxed);
  layout_->history[index % kRecorderHistory].store(record);
  // The next record, which spans two lines, is written while they are on their way to this core.
  const SharedRecord* next = &layout_->history[(index + 1) % kRecorderHistory];
  prefetch_to_write(next);
  prefetch_to_write(next + 1);
  if (slot >= 0) {
    layout_->open[slot].clear();
    // Pairs with the exchange in begin().
    used_slots_.fetch_and(~(std::uint64_t{1} << slot), std::memory_order_release);
  }
}

void FlightRecorder::record(Record& record) {
  record.number = layout_->header.operations_begun.fetch_add(1, std::memory_order_relaxed) + 1;
  end(-1, record);
}

int FlightRecorder::add_link(std::string_view host) {
  const std::lock_guard lock(mutex_);
  for (std::size_t number = 0; number < kRecorderLinks; ++number) {
    LinkEntry& entry = layout_->links[number];
    if (entry.used.load(std::memory_order_relaxed) == 0) {
      put(entry.host, host);
      // A reader that sees it may read the host. Pairs with the load in read_links.
      entry.used.store(1, std::memory_order_release);
      return static_cast<int>(number);
    }
    if (entry.host == host.substr(0, sizeof entry.host - 1)) {
      return static_cast<int>(number);
    }
  }
  return -1;
}

void FlightRecorder::record_link(int link, const LinkBytes& now, const LinkBytes& earlier) {
  LinkEntry& entry = layout_->links[link];
  entry.sent.store(now.sent, std::memory_order_relaxed);
  entry.received.store(now.received, std::memory_order_relaxed);
  entry.time.store(now.time, std::memory_order_relaxed);
  entry.earlier_sent.store(earlier.sent, std::memory_order_relaxed);
  entry.earlier_received.store(earlier.received, std::memory_order_relaxed);
  entry.earlier_time.store(earlier.time, std::memory_order_relaxed);
}

void FlightRecorder::report(std::int64_t step, std::optional<double> loss, std::string_view note) {
  const std::lock_guard lock(mutex_);
  const std::uint64_t number = layout_->header.reports.load(std::memory_order_relaxed) + 1;
  SharedReport& report = layout_->reports[(number - 1) % kRecorderReports];
  // Each a release, so that none comes before `frame`. They pair with the loads in read_reports,
  // which go in the opposite order.
  report.frame.store(number, std::memory_order_relaxed);
  report.loss.store(loss ? std::bit_cast<std::uint64_t>(*loss) : kNoLoss,
                    std::memory_order_release);
  report.step.store(step, std::memory_order_release);
  report.time.store(nanoseconds(Clock::now()), std::memory_order_release);
  report.number.store(number, std::memory_order_release);
  layout_->header.reports.store(number, std::memory_order_release);
  put(layout_->header.note, note);
}

void FlightRecorder::record_ending(Ending ending, std::string_view exception) {
  const std::lock_guard lock(mutex_);
  RecorderHeader& header = layout_->header;
  const auto known = static_cast<Ending>(header.ending.load(std::memory_order_relaxed));
  if (known != Ending::none && known != Ending::left) {
    return;
  }
  put(header.exception, exception);
  header.ending_time.store(nanoseconds(Clock::now()), std::memory_order_relaxed);
  // A reader that sees the ending may read the exception.
  header.ending.store(static_cast<std::uint32_t>(ending), std::memory_order_release);
}

void FlightRecorder::publish_sites() {
  const std::lock_guard lock(mutex_);
  const std::uint32_t there = layout_->header.sites.load(std::memory_order_relaxed);
  const auto all = std::min(call_site_count(), static_cast<std::uint32_t>(kRecorderSites));
  for (std::uint32_t number = there; number < all; ++number) {
    put_site(layout_->sites[number], call_site_text(number));
  }
  // A reader that sees a number may read its text.
  layout_->header.sites.store(std::max(there, all), std::memory_order_release);
}

}  // namespace phalanx
