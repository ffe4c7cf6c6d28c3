#include "phalanx/flight_recorder_reader.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <climits>
#include <cstdio>
#include <cstring>
#include <memory>
#include <new>

namespace phalanx {
namespace {

struct FreeLayout {
  void operator()(std::byte* bytes) const {
    ::operator delete[](bytes, std::align_val_t{alignof(BoxLayout)});
  }
};
using LayoutCopy = std::unique_ptr<std::byte[], FreeLayout>;

LayoutCopy aligned_copy(std::span<const std::byte> bytes) {
  auto* memory = static_cast<std::byte*>(
      ::operator new[](sizeof(BoxLayout), std::align_val_t{alignof(BoxLayout)}));
  std::memcpy(memory, bytes.data(), sizeof(BoxLayout));
  return LayoutCopy(memory);
}

template <std::size_t N>
std::string text_of(const Text<N>& text) {
  return {text, strnlen(text, N)};
}

std::string refusal(std::span<const std::byte> bytes) {
  std::uint64_t magic = 0;
  std::uint32_t version = 0;
  if (bytes.size() >= sizeof magic + sizeof version) {
    std::memcpy(&magic, bytes.data(), sizeof magic);
    std::memcpy(&version, bytes.data() + sizeof magic, sizeof version);
  }
  if (magic != kBoxMagic) {
    return "no flight recorder, or one whose beginning was never written";
  }
  if (version != kBoxVersion) {
    return "written in layout version " + std::to_string(version) + ", this one reads version " +
           std::to_string(kBoxVersion);
  }
  if (bytes.size() != sizeof(BoxLayout)) {
    return "damaged: " + std::to_string(bytes.size()) + " bytes, expected " +
           std::to_string(sizeof(BoxLayout));
  }
  return {};
}

void read_header(const BoxHeader& header, BoxContents& to) {
  to.pid = header.pid;
  to.rank = header.rank;
  to.world_size = header.world_size;
  to.attempt = header.attempt;
  to.host = text_of(header.host);
  to.job = text_of(header.job);
  to.clock = header.clock;
  to.opened = header.opened;
  to.operations = header.begun.load(std::memory_order_relaxed);
  to.main_waits = header.main_waits.load(std::memory_order_relaxed);
  // Pairs with the store in FlightRecorder::set_ending.
  const auto ending = header.ending.load(std::memory_order_acquire);
  to.ending = ending <= static_cast<std::uint32_t>(Ending::failed) ? static_cast<Ending>(ending)
                                                                   : Ending::none;
  to.ending_time = header.ending_time.load(std::memory_order_relaxed);
  to.last_words = text_of(header.last_words);
  to.note = text_of(header.note);
}

void read_sites(const BoxLayout& box, BoxContents& to) {
  // Pairs with the store in FlightRecorder::publish_sites.
  const std::size_t count = box.header.sites.load(std::memory_order_acquire);
  for (std::size_t number = 0; number < std::min(count, kBoxSites); ++number) {
    to.sites.push_back(text_of(box.sites[number].text));
  }
}

void read_groups(const BoxLayout& box, BoxContents& to) {
  for (const GroupNote& note : box.groups) {
    const std::uint32_t id = note.id.load(std::memory_order_acquire);
    if (id == 0 || id > UINT16_MAX) {
      continue;
    }
    const std::size_t left_at = note.left_at.load(std::memory_order_relaxed);
    to.groups.push_back({.identity = note.identity.load(std::memory_order_relaxed),
                         .sequence = note.sequence.load(std::memory_order_relaxed),
                         .id = static_cast<std::uint16_t>(id),
                         .rank = note.rank,
                         .size = note.size,
                         .left = note.left.load(std::memory_order_relaxed) != 0,
                         .left_at = left_at < to.sites.size() ? to.sites[left_at] : "",
                         .name = text_of(note.name),
                         .members = text_of(note.members),
                         .why = text_of(note.why)});
  }
  std::ranges::sort(to.groups, {}, &BoxGroup::id);
}

void read_records(const BoxLayout& box, std::size_t history, BoxContents& to) {
  const auto add = [&to](const SharedRecord& shared, std::vector<Record>& list) {
    Record record;
    if (shared.load(record)) {
      list.push_back(record);
    } else if (!shared.empty()) {
      ++to.torn;
    }
  };
  const std::uint64_t ended = box.header.ended.load(std::memory_order_relaxed);
  const std::size_t count = std::min<std::uint64_t>({ended, history, kBoxHistory});
  for (std::uint64_t index = ended - count; index != ended; ++index) {
    add(box.history[index % kBoxHistory], to.done);
  }
  // The newest place of a history that is full may still hold what stood there before.
  std::ranges::stable_sort(to.done, {}, &Record::end);
  for (const SharedRecord& shared : box.open) {
    add(shared, to.open);
  }
  // One that ended in the middle of the copy may stand in both, or in neither.
  std::erase_if(to.open, [&to](const Record& open) {
    return std::ranges::any_of(to.done,
                               [&open](const Record& done) { return done.number == open.number; });
  });
  std::ranges::sort(to.open, {}, &Record::number);
}

void read_reports(const BoxLayout& box, BoxContents& to) {
  const std::uint64_t number = box.header.reports.load(std::memory_order_relaxed);
  const std::uint64_t count = std::min<std::uint64_t>(number, kBoxReports);
  for (std::uint64_t index = number - count; index != number; ++index) {
    const SharedReport& report = box.reports[index % kBoxReports];
    const std::uint64_t loss = report.loss.load(std::memory_order_acquire);
    const std::uint64_t its = report.number.load(std::memory_order_acquire);
    const BoxReport read{
        .time = report.time.load(std::memory_order_acquire),
        .step = report.step.load(std::memory_order_acquire),
        .loss = loss == kNoLoss ? std::nullopt : std::optional(std::bit_cast<double>(loss))};
    if (its != index + 1 || its != report.framed.load(std::memory_order_relaxed)) {
      ++to.torn;
    } else {
      to.reports.push_back(read);
    }
  }
}

std::vector<std::byte> copy_file(const char* path) {
  // O_NONBLOCK: where the pid means another process, the path may be a pipe.
  const int fd = ::open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
  if (fd < 0) {
    return {};
  }
  struct stat info{};
  std::vector<std::byte> bytes;
  if (fstat(fd, &info) == 0 && S_ISREG(info.st_mode) && info.st_size == sizeof(BoxLayout)) {
    bytes.resize(sizeof(BoxLayout));
    if (pread(fd, bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
      bytes.clear();
    }
  }
  ::close(fd);
  return bytes;
}

}  // namespace

std::string read_box(std::span<const std::byte> bytes, std::size_t history, BoxContents& contents) {
  if (std::string why = refusal(bytes); !why.empty()) {
    return why;
  }
  const LayoutCopy copy = aligned_copy(bytes);
  const auto& box = *reinterpret_cast<const BoxLayout*>(copy.get());
  read_header(box.header, contents);
  read_sites(box, contents);
  read_groups(box, contents);
  read_records(box, history, contents);
  read_reports(box, contents);
  return {};
}

std::vector<std::byte> copy_box(int pid, int descriptor) {
  std::array<char, PATH_MAX> path{};
  std::snprintf(path.data(), path.size(), "/proc/%d/fd/%d", pid, descriptor);
  std::vector<std::byte> bytes = copy_file(path.data());
  const FlightRecorder* own = FlightRecorder::own();
  if (!bytes.empty() || own == nullptr) {
    return bytes;
  }
  std::snprintf(path.data(), path.size(), "/proc/self/fd/%d", own->descriptor());
  std::array<char, PATH_MAX> where{};
  const ssize_t size = readlink(path.data(), where.data(), where.size() - 1);
  const std::string file(where.data(), size > 0 ? static_cast<std::size_t>(size) : 0);
  const std::size_t slash = file.rfind('/');
  if (slash == std::string::npos) {
    return {};
  }
  return copy_file((file.substr(0, slash + 1) + std::to_string(pid) + ".recorder").c_str());
}

}  // namespace phalanx
