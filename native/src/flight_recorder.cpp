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

#include "phalanx/call_site.h"
#include "phalanx/hooks.h"

namespace phalanx {
namespace {

using Words = std::array<std::uint64_t, sizeof(Record) / 8>;

std::atomic<FlightRecorder*> own_box = nullptr;

// Cut at the end, but not in the middle of a character of UTF-8.
template <std::size_t N>
void put(Text<N>& to, std::string_view text) {
  std::size_t size = std::min(text.size(), N - 1);
  while (size > 0 && size < text.size() && (text[size] & 0xc0) == 0x80) {
    --size;
  }
  text.copy(to, size);
  std::memset(to + size, 0, N - size);
}

// Cut at the beginning: of a path, the end tells most.
void put_site(CallSite& to, std::string_view text) {
  constexpr std::size_t kMost = sizeof(to.text) - 1;
  put(to.text, text.size() <= kMost ? text : text.substr(text.size() - kMost));
}

std::int64_t wall_clock_offset() {
  timespec wall{};
  clock_gettime(CLOCK_REALTIME, &wall);
  const std::int64_t now = wall.tv_sec * 1'000'000'000 + wall.tv_nsec;
  return now - static_cast<std::int64_t>(nanoseconds(Clock::now()));
}

}  // namespace

// Every store of a word is a release: who sees it also sees that `framed_` changed before. Readers
// copy the file with a system call, in no order that the language knows; the processor's order is
// what they count on, and the frame is what they check.
void SharedRecord::store(const Record& value) {
  const auto words = std::bit_cast<Words>(value);
  PHALANX_STEP("record: frame");
  framed_.store(value.number, std::memory_order_relaxed);
  for (std::size_t i = kWords; i-- > 0;) {
    PHALANX_STEP("record: write");
    words_[i].store(words[i], std::memory_order_release);
  }
}

void SharedRecord::clear() {
  PHALANX_STEP("record: clear");
  framed_.store(0, std::memory_order_relaxed);
  words_[0].store(0, std::memory_order_release);
}

void SharedRecord::waiting_for(const Record& value) {
  PHALANX_STEP("record: whom it waits for");
  words_[kPeers].store(std::bit_cast<Words>(value)[kPeers], std::memory_order_release);
}

bool SharedRecord::load(Record& value) const {
  Words words{};
  for (std::size_t i = 0; i < kWords; ++i) {
    // Pairs with the stores above.
    words[i] = words_[i].load(std::memory_order_acquire);
  }
  value = std::bit_cast<Record>(words);
  return value.number != 0 && value.number == framed_.load(std::memory_order_relaxed);
}

bool SharedRecord::empty() const {
  return words_[0].load(std::memory_order_relaxed) == 0 &&
         framed_.load(std::memory_order_relaxed) == 0;
}

std::unique_ptr<FlightRecorder> FlightRecorder::open(int fd, const BoxIdentity& identity, Status& status) {
  void* base = mmap(nullptr, sizeof(BoxLayout), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) {
    status = Status{.code = Code::system, .error = errno};
    return nullptr;
  }
  auto* box = static_cast<BoxLayout*>(base);
  BoxHeader& header = box->header;
  header.version = kBoxVersion;
  header.rank = identity.rank;
  header.world_size = identity.world_size;
  header.attempt = identity.attempt;
  header.pid = getpid();
  header.clock = wall_clock_offset();
  header.opened = nanoseconds(Clock::now());
  put(header.host, identity.host);
  put(header.job, identity.job);
  // Who finds it in a copy of the box may read what stands above.
  std::atomic_ref(header.magic).store(kBoxMagic, std::memory_order_release);
  auto made = std::unique_ptr<FlightRecorder>(new FlightRecorder(box, fd));
  made->publish_sites();
  return made;
}

FlightRecorder::~FlightRecorder() {
  munmap(box_, sizeof(BoxLayout));
  ::close(fd_);
}

FlightRecorder* FlightRecorder::own() { return own_box.load(std::memory_order_acquire); }

void FlightRecorder::adopt(std::unique_ptr<FlightRecorder> box) {
  // Pairs with the load in own().
  own_box.store(box.release(), std::memory_order_release);
}

void FlightRecorder::forget() {
  own_box.store(nullptr, std::memory_order_relaxed);
  current_caller() = {.site = 0, .thread = Caller::kMain};  // the thread that forks is the only one
}

std::uint16_t FlightRecorder::add_group(int rank, int size) {
  const std::lock_guard lock(mutex_);
  GroupNote* note = nullptr;
  for (GroupNote& candidate : box_->groups) {
    if (candidate.id.load(std::memory_order_relaxed) == 0) {
      note = &candidate;
      break;
    }
    const bool left = candidate.left.load(std::memory_order_relaxed) != 0;
    if (left && (note == nullptr || candidate.id.load(std::memory_order_relaxed) <
                                        note->id.load(std::memory_order_relaxed))) {
      note = &candidate;
    }
  }
  if (note == nullptr) {
    return 0;
  }
  note->id.store(0, std::memory_order_relaxed);
  // Each a release, so that none comes before the id was taken away: who reads something of the new
  // group in a copy of the box finds no old id there.
  note->identity.store(0, std::memory_order_release);
  note->sequence.store(0, std::memory_order_release);
  note->left.store(0, std::memory_order_release);
  note->left_at.store(0, std::memory_order_release);
  note->rank = rank;
  note->size = size;
  name_group(*note, "", "");
  set_why(*note, "");
  do {
    last_group_ = static_cast<std::uint16_t>(last_group_ + 1 == 0x10000 ? 1 : last_group_ + 1);
  } while (group(last_group_) != nullptr);
  // Who sees the id may read the note. Pairs with the load in read_groups.
  note->id.store(last_group_, std::memory_order_release);
  box_->header.groups.fetch_add(1, std::memory_order_relaxed);
  return last_group_;
}

GroupNote* FlightRecorder::group(std::uint16_t id) {
  for (GroupNote& note : box_->groups) {
    if (id != 0 && note.id.load(std::memory_order_relaxed) == id) {
      return &note;
    }
  }
  return nullptr;
}

void FlightRecorder::name_group(GroupNote& note, std::string_view name, std::string_view members) {
  put(note.name, name);
  put(note.members, members.size() < sizeof note.members ? members : "");
}

void FlightRecorder::set_why(GroupNote& note, std::string_view why) { put(note.why, why); }

int FlightRecorder::begin(Record& record) {
  record.number = box_->header.begun.fetch_add(1, std::memory_order_relaxed) + 1;
  // Claims a place: no other thread writes there until end().
  const bool message = record.kind == Kind::send || record.kind == Kind::recv;
  const std::uint64_t reserved = message ? ~std::uint64_t{0} << kBoxMessages : 0;
  std::uint64_t taken = taken_.load(std::memory_order_relaxed);
  while (~(taken | reserved) != 0) {
    const int place = std::countr_one(taken | reserved);
    if (taken_.compare_exchange_weak(taken, taken | std::uint64_t{1} << place,
                                     std::memory_order_acquire, std::memory_order_relaxed)) {
      box_->open[place].store(record);
      return place;
    }
  }
  return -1;
}

void FlightRecorder::end(int place, const Record& record) {
  const std::uint64_t index = box_->header.ended.fetch_add(1, std::memory_order_relaxed);
  box_->history[index % kBoxHistory].store(record);
  if (place >= 0) {
    box_->open[place].clear();
    // Pairs with the exchange in begin().
    taken_.fetch_and(~(std::uint64_t{1} << place), std::memory_order_release);
  }
}

void FlightRecorder::report(std::int64_t step, std::optional<double> loss, std::string_view note) {
  const std::lock_guard lock(mutex_);
  const std::uint64_t number = box_->header.reports.load(std::memory_order_relaxed) + 1;
  SharedReport& report = box_->reports[(number - 1) % kBoxReports];
  // Each a release, so that none comes before `framed`. They pair with the loads in read_reports,
  // which go the other way round.
  report.framed.store(number, std::memory_order_relaxed);
  report.loss.store(loss ? std::bit_cast<std::uint64_t>(*loss) : kNoLoss,
                    std::memory_order_release);
  report.step.store(step, std::memory_order_release);
  report.time.store(nanoseconds(Clock::now()), std::memory_order_release);
  report.number.store(number, std::memory_order_release);
  box_->header.reports.store(number, std::memory_order_release);
  put(box_->header.note, note);
}

void FlightRecorder::set_ending(Ending ending, std::string_view words) {
  const std::lock_guard lock(mutex_);
  BoxHeader& header = box_->header;
  const auto known = static_cast<Ending>(header.ending.load(std::memory_order_relaxed));
  if (known != Ending::none && known != Ending::left) {
    return;
  }
  put(header.last_words, words);
  header.ending_time.store(nanoseconds(Clock::now()), std::memory_order_relaxed);
  // Who sees the ending may read the words.
  header.ending.store(static_cast<std::uint32_t>(ending), std::memory_order_release);
}

void FlightRecorder::publish_sites() {
  const std::lock_guard lock(mutex_);
  const std::uint32_t there = box_->header.sites.load(std::memory_order_relaxed);
  const auto all = std::min(call_site_count(), static_cast<std::uint32_t>(kBoxSites));
  for (std::uint32_t number = there; number < all; ++number) {
    put_site(box_->sites[number], call_site_text(number));
  }
  // Who sees a number may read its text.
  box_->header.sites.store(std::max(there, all), std::memory_order_release);
}

}  // namespace phalanx
