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
    ::operator delete[](bytes, std::align_val_t{alignof(RecorderLayout)});
  }
};
using LayoutCopy = std::unique_ptr<std::byte[], FreeLayout>;

LayoutCopy aligned_copy(std::span<const std::byte> bytes) {
  auto* memory = static_cast<std::byte*>(
      ::operator new[](sizeof(RecorderLayout), std::align_val_t{alignof(RecorderLayout)}));
  std::memcpy(memory, bytes.data(), sizeof(RecorderLayout));
  return LayoutCopy(memory);
}

template <std::size_t N>
std::string text_of(const Text<N>& text) {
  return {text, strnlen(text, N)};
}

std::string check_layout(std::span<const std::byte> bytes) {
  std::uint64_t magic = 0;
  std::uint32_t version = 0;
  if (bytes.size() >= sizeof magic + sizeof version) {
    std::memcpy(&magic, bytes.data(), sizeof magic);
    std::memcpy(&version, bytes.data() + sizeof magic, sizeof version);
  }
  if (magic != kRecorderMagic) {
    return "not a flight recorder, or its header was never written";
  }
  if (version != kRecorderVersion) {
    return "written in layout version " + std::to_string(version) +
           "; this reader supports version " + std::to_string(kRecorderVersion);
  }
  if (bytes.size() != sizeof(RecorderLayout)) {
    return "damaged: " + std::to_string(bytes.size()) + " bytes, expected " +
           std::to_string(sizeof(RecorderLayout));
  }
  return {};
}

void read_header(const RecorderHeader& header, RecorderContents& to) {
  to.pid = header.pid;
  to.rank = header.rank;
  to.world_size = header.world_size;
  to.attempt = header.attempt;
  to.host = text_of(header.host);
  to.job = text_of(header.job);
  to.clock = header.clock;
  to.opened = header.opened;
  to.operations = header.operations_begun.load(std::memory_order_relaxed);
  to.main_thread_wait = header.main_thread_wait.load(std::memory_order_relaxed);
  to.lone_wait = header.lone_wait.load(std::memory_order_relaxed);
  // Pairs with the store in FlightRecorder::record_ending.
  const auto ending = header.ending.load(std::memory_order_acquire);
  to.ending = ending <= static_cast<std::uint32_t>(Ending::failed) ? static_cast<Ending>(ending)
                                                                   : Ending::none;
  to.ending_time = header.ending_time.load(std::memory_order_relaxed);
  to.exception = text_of(header.exception);
  to.note = text_of(header.note);
}

void read_sites(const RecorderLayout& layout, RecorderContents& to) {
  // Pairs with the store in FlightRecorder::publish_sites.
  const std::size_t count = layout.header.sites.load(std::memory_order_acquire);
  for (std::size_t number = 0; number < std::min(count, kRecorderSites); ++number) {
    to.sites.push_back(text_of(layout.sites[number].text));
  }
}

void read_groups(const RecorderLayout& layout, RecorderContents& to) {
  for (const GroupEntry& entry : layout.groups) {
    const std::uint32_t id = entry.id.load(std::memory_order_acquire);
    if (id == 0 || id > UINT16_MAX) {
      continue;
    }
    const std::size_t left_at = entry.left_at.load(std::memory_order_relaxed);
    to.groups.push_back({.identity = entry.identity.load(std::memory_order_relaxed),
                         .sequence = entry.sequence.load(std::memory_order_relaxed),
                         .id = static_cast<std::uint16_t>(id),
                         .rank = entry.rank,
                         .size = entry.size,
                         .left_time = entry.left_time.load(std::memory_order_relaxed),
                         .left_at = left_at < to.sites.size() ? to.sites[left_at] : "",
                         .name = text_of(entry.name),
                         .members = text_of(entry.members),
                         .abort_reason = text_of(entry.abort_reason)});
  }
  std::ranges::sort(to.groups, {}, &RecordedGroup::id);
}

void read_records(const RecorderLayout& layout, std::size_t history, RecorderContents& to) {
  const auto add = [&to](const SharedRecord& shared, std::vector<Record>& list) {
    Record record;
    if (shared.load(record)) {
      list.push_back(record);
    } else if (!shared.empty()) {
      ++to.torn;
    }
  };
  const std::uint64_t ended = layout.header.operations_ended.load(std::memory_order_relaxed);
  const std::size_t count = std::min<std::uint64_t>({ended, history, kRecorderHistory});
  for (std::uint64_t index = ended - count; index != ended; ++index) {
    add(layout.history[index % kRecorderHistory], to.done);
  }
  // The newest slot of a full history may still hold the previous record.
  std::ranges::stable_sort(to.done, {}, &Record::end);
  for (const SharedRecord& shared : layout.open) {
    add(shared, to.open);
  }
  // A record that ended during the copy may be in both, or in neither.
  std::erase_if(to.open, [&to](const Record& open) {
    return std::ranges::any_of(to.done,
                               [&open](const Record& done) { return done.number == open.number; });
  });
  std::ranges::sort(to.open, {}, &Record::number);
}

void read_reports(const RecorderLayout& layout, RecorderContents& to) {
  const std::uint64_t number = layout.header.reports.load(std::memory_order_relaxed);
  const std::uint64_t count = std::min<std::uint64_t>(number, kRecorderReports);
  for (std::uint64_t index = number - count; index != number; ++index) {
    const SharedReport& report = layout.reports[index % kRecorderReports];
    const std::uint64_t loss = report.loss.load(std::memory_order_acquire);
    const std::uint64_t number_read = report.number.load(std::memory_order_acquire);
    const RecordedReport read{
        .time = report.time.load(std::memory_order_acquire),
        .step = report.step.load(std::memory_order_acquire),
        .loss = loss == kNoLoss ? std::nullopt : std::optional(std::bit_cast<double>(loss))};
    if (number_read != index + 1 || number_read != report.frame.load(std::memory_order_relaxed)) {
      ++to.torn;
    } else {
      to.reports.push_back(read);
    }
  }
}

void read_links(const RecorderLayout& layout, RecorderContents& to) {
  for (const LinkEntry& entry : layout.links) {
    // Pairs with the store in FlightRecorder::add_link.
    if (entry.used.load(std::memory_order_acquire) == 0) {
      continue;
    }
    to.links.push_back(
        {.host = text_of(entry.host),
         .now = {.sent = entry.sent.load(std::memory_order_relaxed),
                 .received = entry.received.load(std::memory_order_relaxed),
                 .time = entry.time.load(std::memory_order_relaxed)},
         .earlier = {.sent = entry.earlier_sent.load(std::memory_order_relaxed),
                     .received = entry.earlier_received.load(std::memory_order_relaxed),
                     .time = entry.earlier_time.load(std::memory_order_relaxed)}});
  }
}

std::vector<std::byte> copy_file(const char* path) {
  // O_NONBLOCK: if the pid belongs to another process here, the path may be a pipe.
  const int fd = ::open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
  if (fd < 0) {
    return {};
  }
  struct stat info{};
  std::vector<std::byte> bytes;
  if (fstat(fd, &info) == 0 && S_ISREG(info.st_mode) && info.st_size == sizeof(RecorderLayout)) {
    bytes.resize(sizeof(RecorderLayout));
    if (pread(fd, bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
      bytes.clear();
    }
  }
  ::close(fd);
  return bytes;
}

}  // namespace

std::string parse_recorder(std::span<const std::byte> bytes, std::size_t history,
                           RecorderContents& contents) {
  if (std::string error = check_layout(bytes); !error.empty()) {
    return error;
  }
  const LayoutCopy copy = aligned_copy(bytes);
  const auto& layout = *reinterpret_cast<const RecorderLayout*>(copy.get());
  read_header(layout.header, contents);
  read_sites(layout, contents);
  read_groups(layout, contents);
  read_records(layout, history, contents);
  read_reports(layout, contents);
  read_links(layout, contents);
  return {};
}

std::vector<std::byte> copy_recorder(int pid, int descriptor) {
  std::array<char, PATH_MAX> path{};
  std::snprintf(path.data(), path.size(), "/proc/%d/fd/%d", pid, descriptor);
  std::vector<std::byte> bytes = copy_file(path.data());
  const FlightRecorder* own = FlightRecorder::own();
  if (!bytes.empty() || own == nullptr) {
    return bytes;
  }
  std::snprintf(path.data(), path.size(), "/proc/self/fd/%d", own->descriptor());
  std::array<char, PATH_MAX> link{};
  const ssize_t size = readlink(path.data(), link.data(), link.size() - 1);
  const std::string file(link.data(), size > 0 ? static_cast<std::size_t>(size) : 0);
  const std::size_t slash = file.rfind('/');
  if (slash == std::string::npos) {
    return {};
  }
  return copy_file((file.substr(0, slash + 1) + std::to_string(pid) + ".recorder").c_str());
}

}  // namespace phalanx
