// The flight recorder: readers get what was written, by several threads, during writes, with full
// tables, and from files with arbitrary contents.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <random>
#include <thread>

#include "check.h"
#include "phalanx/call_site.h"
#include "phalanx/flight_recorder_reader.h"
#include "ranks.h"

using namespace phalanx;

namespace {

// The numbers of layout version 5: a change of any of them requires a new kRecorderVersion.
static_assert(kRecorderVersion == 5 && kRecorderMagic == 0x584f424c4b434201);
static_assert(sizeof(Record) == 64 && sizeof(SharedRecord) == 72);
static_assert(offsetof(Record, sequence) == 32 && offsetof(Record, peer) == 48);
static_assert(offsetof(Record, dtype) == 52 && offsetof(Record, site) == 56);
static_assert(offsetof(Record, group) == 60 && offsetof(Record, kind) == 62);
static_assert(offsetof(Record, progress) == 63);
static_assert(offsetof(RecorderHeader, host) == 48 && offsetof(RecorderHeader, job) == 176);
static_assert(offsetof(RecorderHeader, operations_begun) == 320 &&
              offsetof(RecorderHeader, main_thread_wait) == 360);
static_assert(offsetof(RecorderHeader, lone_wait) == 368);
static_assert(offsetof(RecorderHeader, exception) == 380);
static_assert(sizeof(GroupEntry) == 896 && offsetof(GroupEntry, left_time) == 16 &&
              offsetof(GroupEntry, name) == 40);
static_assert(sizeof(CallSite) == 128 && sizeof(SharedReport) == 40);
static_assert(sizeof(LinkEntry) == 128 && offsetof(LinkEntry, sent) == 8);
static_assert(offsetof(LinkEntry, time) == 24 && offsetof(LinkEntry, host) == 56);
static_assert(sizeof(RecorderLayout) == 569344 && offsetof(RecorderLayout, history) == 266240);
static_assert(offsetof(RecorderLayout, links) == 561152);

std::unique_ptr<FlightRecorder> make() {
  const int fd = memfd_create("recorder", MFD_CLOEXEC);
  CHECK(fd >= 0 && ftruncate(fd, sizeof(RecorderLayout)) == 0);
  Status status;
  auto recorder = FlightRecorder::open(
      fd, {.rank = 3, .world_size = 8, .attempt = 2, .host = "node-a", .job = "a-job"}, status);
  CHECK(recorder && status.ok());
  return recorder;
}

std::vector<std::byte> copy_of(const FlightRecorder& recorder) {
  std::vector<std::byte> bytes(sizeof(RecorderLayout));
  CHECK(pread(recorder.descriptor(), bytes.data(), bytes.size(), 0) ==
        static_cast<ssize_t>(bytes.size()));
  return bytes;
}

RecorderContents contents(const FlightRecorder& recorder, std::size_t history = kRecorderHistory) {
  RecorderContents read;
  CHECK_EQ(parse_recorder(copy_of(recorder), history, read), "");
  return read;
}

Record some_record(std::uint64_t sequence, std::uint32_t site = 0) {
  return {.begin = 10, .sequence = sequence, .count = 7, .site = site, .kind = Kind::all_reduce};
}

TEST(the_header_identifies_the_rank) {
  const auto recorder = make();
  const RecorderContents read = contents(*recorder);
  CHECK_EQ(read.rank, 3);
  CHECK_EQ(read.world_size, 8);
  CHECK_EQ(read.attempt, 2);
  CHECK_EQ(read.pid, getpid());
  CHECK_EQ(read.host, "node-a");
  CHECK_EQ(read.job, "a-job");
  CHECK(read.opened != 0 && read.clock > 1'700'000'000LL * 1'000'000'000);
  CHECK(read.ending == Ending::none && read.done.empty() && read.open.empty());
}

TEST(operations_under_way_and_ended) {
  const auto recorder = make();
  const std::uint32_t site = call_site_number("train.py:40");
  recorder->publish_sites();
  Record first = some_record(1, site);
  Record second = some_record(2);
  const int first_slot = recorder->begin(first);
  const int second_slot = recorder->begin(second);
  second.waiting_for = 5;
  recorder->waiting_for(second_slot, second);
  first.end = 20;
  first.outcome = Code::peer_lost;
  recorder->end(first_slot, first);
  const RecorderContents read = contents(*recorder);
  CHECK_EQ(read.operations, 2U);
  CHECK(read.done.size() == 1 && read.open.size() == 1 && read.torn == 0);
  CHECK_EQ(read.done[0].number, 1U);
  CHECK_EQ(read.done[0].end, 20U);
  CHECK(read.done[0].outcome == Code::peer_lost);
  CHECK_EQ(read.sites[read.done[0].site], "train.py:40");
  CHECK_EQ(read.open[0].number, 2U);
  CHECK_EQ(read.open[0].waiting_for, 5);
}

TEST(the_wait_of_the_main_thread) {
  const auto recorder = make();
  Record record = some_record(1);
  const int slot = recorder->begin(record);
  CHECK_EQ(contents(*recorder).main_thread_wait, 0U);
  recorder->set_main_thread_wait(record.number);
  CHECK_EQ(contents(*recorder).main_thread_wait, contents(*recorder).open[0].number);
  recorder->end(slot, record);
  recorder->set_main_thread_wait(0);
  CHECK_EQ(contents(*recorder).main_thread_wait, 0U);
  CHECK_EQ(contents(*recorder).lone_wait, 0U);
  recorder->set_lone_wait(record.number);
  CHECK_EQ(contents(*recorder).lone_wait, record.number);
}

TEST(more_operations_under_way_than_slots) {
  const auto recorder = make();
  std::vector<Record> records(kRecorderOpen + 10);
  std::vector<int> slots;
  for (Record& record : records) {
    slots.push_back(recorder->begin(record));
  }
  CHECK_EQ(slots.back(), -1);
  CHECK_EQ(contents(*recorder).open.size(), kRecorderOpen);
  for (std::size_t i = 0; i < records.size(); ++i) {
    recorder->end(slots[i], records[i]);
  }
  const RecorderContents read = contents(*recorder);
  CHECK_EQ(read.open.size(), 0U);
  CHECK_EQ(read.done.size(), records.size());
}

TEST(messages_in_any_number_do_not_hide_a_collective) {
  const auto recorder = make();
  std::vector<Record> messages(kRecorderOpen + 10, Record{.kind = Kind::recv});
  std::vector<int> slots;
  for (Record& message : messages) {
    slots.push_back(recorder->begin(message));
  }
  CHECK(std::ranges::count_if(slots, [](int slot) { return slot >= 0; }) == kRecorderMessages);
  Record record = some_record(1);
  CHECK(recorder->begin(record) >= 0);
  CHECK(contents(*recorder).open.back().kind == Kind::all_reduce);
}

TEST(the_history_keeps_the_newest_records) {
  const auto recorder = make();
  for (std::uint64_t i = 1; i <= kRecorderHistory + 100; ++i) {
    Record record = some_record(i);
    const int slot = recorder->begin(record);
    recorder->end(slot, record);
  }
  RecorderContents read = contents(*recorder);
  CHECK_EQ(read.done.size(), kRecorderHistory);
  CHECK_EQ(read.done.front().sequence, 101U);
  CHECK_EQ(read.done.back().sequence, kRecorderHistory + 100);
  read = contents(*recorder, 3);
  CHECK_EQ(read.done.size(), 3U);
  CHECK_EQ(read.done.back().sequence, kRecorderHistory + 100);
}

TEST(entries_of_groups_that_were_left_are_reused) {
  const auto recorder = make();
  std::vector<std::uint16_t> ids;
  for (std::size_t i = 0; i < kRecorderGroups; ++i) {
    ids.push_back(recorder->add_group(1, 4));
  }
  CHECK_EQ(recorder->add_group(0, 2), 0);
  GroupEntry* entry = recorder->group(ids[5]);
  CHECK(entry != nullptr);
  FlightRecorder::name_group(*entry, std::string(300, 'n'), std::string(300, '1'));
  entry->left_time.store(1);
  const std::uint16_t fresh = recorder->add_group(0, 2);
  CHECK(fresh != 0 && recorder->group(ids[5]) == nullptr && recorder->group(fresh) == entry);
  FlightRecorder::name_group(*entry, std::string(300, 'n'), std::string(300, '1'));
  const RecorderContents read = contents(*recorder);
  CHECK_EQ(read.groups.size(), kRecorderGroups);
  CHECK_EQ(read.groups.back().id, fresh);  // in the order of their formation
  CHECK_EQ(read.groups.back().name.size(), sizeof entry->name - 1);
  CHECK_EQ(read.groups.back().members, "");  // no members rather than wrong ones
}

TEST(group_ids_wrap_around_without_collision) {
  const auto recorder = make();
  const std::uint16_t living = recorder->add_group(0, 2);
  for (int i = 0; i < 70'000; ++i) {
    const std::uint16_t id = recorder->add_group(1, 2);
    const bool fresh = id != 0 && id != living;
    if (!CHECK(fresh)) return;
    recorder->group(id)->left_time.store(1);
  }
  CHECK_EQ(recorder->group(living)->rank, 0);
}

TEST(reports_and_the_ending) {
  const auto recorder = make();
  for (int step = 0; step < 300; ++step) {
    recorder->report(step, step / 2.0, "note");
  }
  recorder->record_ending(Ending::left, "");
  recorder->record_ending(Ending::failed, "ValueError: " + std::string(1000, 'x'));
  recorder->record_ending(Ending::exited, "");
  const RecorderContents read = contents(*recorder);
  CHECK_EQ(read.reports.size(), kRecorderReports);
  CHECK_EQ(read.reports.back().step, 299);
  CHECK(read.reports.back().loss == 149.5);
  recorder->report(300, std::nullopt, "");
  recorder->report(301, std::nan(""), "");
  const RecorderContents more = contents(*recorder);
  CHECK(!more.reports[kRecorderReports - 2].loss.has_value());
  CHECK(std::isnan(more.reports.back().loss.value_or(0)));
  CHECK_EQ(read.note, "note");
  CHECK(read.ending == Ending::failed && read.ending_time != 0);
  CHECK_EQ(read.exception.size(), 511U);
}

TEST(links_to_other_hosts) {
  const auto recorder = make();
  CHECK_EQ(recorder->add_link("node-b"), 0);
  CHECK_EQ(recorder->add_link("node-c"), 1);
  CHECK_EQ(recorder->add_link("node-b"), 0);
  recorder->record_link(1, {.sent = 70, .received = 80, .time = 90},
                        {.sent = 7, .received = 8, .time = 9});
  const std::vector<RecordedLink> links = contents(*recorder).links;
  CHECK_EQ(links.size(), 2U);
  CHECK(links[0].host == "node-b" && links[0].now.sent == 0 && links[0].earlier.time == 0);
  CHECK(links[1].host == "node-c" && links[1].now.sent == 70 && links[1].now.received == 80);
  CHECK(links[1].now.time == 90 && links[1].earlier.sent == 7);
  CHECK(links[1].earlier.received == 8 && links[1].earlier.time == 9);
  const std::string name(100, 'x');  // longer than its place
  CHECK_EQ(recorder->add_link(name), 2);
  CHECK_EQ(recorder->add_link(name), 2);
  CHECK(name.starts_with(contents(*recorder).links[2].host));
  for (std::size_t number = 3; number < kRecorderLinks; ++number) {
    CHECK_EQ(recorder->add_link("host " + std::to_string(number)), static_cast<int>(number));
  }
  CHECK_EQ(recorder->add_link("one too many"), -1);
}

TEST(more_call_sites_than_slots) {
  const auto recorder = make();
  std::uint32_t last = 0;
  for (std::size_t i = 0; i < kRecorderSites + 50; ++i) {
    last = call_site_number("many.py:" + std::to_string(i));
  }
  recorder->publish_sites();
  CHECK_EQ(call_site_text(last), "many.py:" + std::to_string(kRecorderSites + 49));
  CHECK_EQ(call_site_number("many.py:7"), call_site_number("many.py:7"));
  const RecorderContents read = contents(*recorder);
  CHECK_EQ(read.sites.size(), kRecorderSites);
  // A path is truncated at its beginning.
  const auto fresh = make();
  CHECK_EQ(contents(*fresh).sites.size(), kRecorderSites);
}

// Several threads write while one reads: records that are read as complete are complete.
TEST(reads_during_writes) {
  const auto recorder = make();
  constexpr int kThreads = 3;
  std::atomic<bool> stop = false;
  std::vector<std::thread> writers;
  for (int thread = 0; thread < kThreads; ++thread) {
    writers.emplace_back([&, thread] {
      for (std::uint64_t i = 1; !stop.load(std::memory_order_relaxed); ++i) {
        // All fields follow from one.
        Record record{.begin = i, .waited = 3 * i, .sequence = i, .count = 2 * i};
        record.thread = static_cast<std::uint8_t>(thread);
        const int slot = recorder->begin(record);
        record.end = i + 1;
        recorder->end(slot, record);
      }
    });
  }
  std::size_t seen = 0;
  for (int look = 0; look < 200; ++look) {
    for (const SharedRecord& shared : recorder->layout().history) {
      Record record;
      if (shared.load(record)) {
        ++seen;
        CHECK(record.count == 2 * record.begin && record.waited == 3 * record.begin &&
              record.end == record.begin + 1 && record.sequence == record.begin);
      }
    }
  }
  stop = true;
  for (std::thread& writer : writers) {
    writer.join();
  }
  CHECK(seen > 0);
  CHECK_EQ(contents(*recorder).open.size(), 0U);
}

TEST(other_files_are_rejected) {
  const auto recorder = make();
  const std::vector<std::byte> whole = copy_of(*recorder);
  RecorderContents read;
  CHECK(parse_recorder({}, 10, read).starts_with("not a flight recorder"));
  CHECK(parse_recorder(std::vector<std::byte>(sizeof(RecorderLayout)), 10, read)
            .starts_with("not a flight recorder"));
  CHECK(parse_recorder(std::span(whole).first(5000), 10, read).starts_with("damaged: 5000 bytes"));
  std::vector<std::byte> other = whole;
  other[8] = std::byte{9};
  CHECK(parse_recorder(other, 10, read).starts_with("written in layout version 9"));
}

// Reading arbitrary bytes after a valid beginning ends, within bounds (also under ASan and UBSan).
TEST(hostile_contents) {
  const auto recorder = make();
  Record record = some_record(1);
  recorder->end(recorder->begin(record), record);
  const std::vector<std::byte> whole = copy_of(*recorder);
  std::mt19937_64 random(ranks::seed);
  for (int round = 0; round < 50; ++round) {
    std::vector<std::byte> bytes = whole;
    const std::size_t changes = round % 2 == 0 ? 100 : bytes.size();
    for (std::size_t i = 0; i < changes; ++i) {
      bytes[12 + random() % (bytes.size() - 12)] = static_cast<std::byte>(random());
    }
    RecorderContents read;
    CHECK_EQ(parse_recorder(bytes, kRecorderHistory, read), "");
    CHECK(read.done.size() <= kRecorderHistory && read.open.size() <= kRecorderOpen);
    CHECK(read.groups.size() <= kRecorderGroups && read.reports.size() <= kRecorderReports);
    CHECK(read.links.size() <= kRecorderLinks);
  }
}

}  // namespace
