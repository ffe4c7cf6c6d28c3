// The flight recorder: what is written is what is read, from several threads, while it is being written,
// after the tables are full, and out of files that hold anything.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <random>
#include <thread>

#include "check.h"
#include "phalanx/flight_recorder_reader.h"
#include "phalanx/call_site.h"
#include "ranks.h"

using namespace phalanx;

namespace {

// The numbers of layout version 2: who changes one must change kBoxVersion.
static_assert(kBoxVersion == 2 && kBoxMagic == 0x584f424c4b434201);
static_assert(sizeof(Record) == 64 && sizeof(SharedRecord) == 72);
static_assert(offsetof(Record, sequence) == 32 && offsetof(Record, peer) == 48);
static_assert(offsetof(Record, dtype) == 52 && offsetof(Record, site) == 56);
static_assert(offsetof(Record, group) == 60 && offsetof(Record, kind) == 62);
static_assert(offsetof(BoxHeader, host) == 48 && offsetof(BoxHeader, job) == 176);
static_assert(offsetof(BoxHeader, begun) == 320 && offsetof(BoxHeader, main_waits) == 360);
static_assert(offsetof(BoxHeader, last_words) == 372);
static_assert(sizeof(GroupNote) == 896 && offsetof(GroupNote, name) == 40);
static_assert(sizeof(CallSite) == 128 && sizeof(SharedReport) == 40);
static_assert(sizeof(BoxLayout) == 561152 && offsetof(BoxLayout, history) == 266240);

std::unique_ptr<FlightRecorder> make() {
  const int fd = memfd_create("box", MFD_CLOEXEC);
  CHECK(fd >= 0 && ftruncate(fd, sizeof(BoxLayout)) == 0);
  Status status;
  auto box = FlightRecorder::open(
      fd, {.rank = 3, .world_size = 8, .attempt = 2, .host = "node-a", .job = "a-job"}, status);
  CHECK(box && status.ok());
  return box;
}

std::vector<std::byte> copy_of(const FlightRecorder& box) {
  std::vector<std::byte> bytes(sizeof(BoxLayout));
  CHECK(pread(box.descriptor(), bytes.data(), bytes.size(), 0) ==
        static_cast<ssize_t>(bytes.size()));
  return bytes;
}

BoxContents contents(const FlightRecorder& box, std::size_t history = kBoxHistory) {
  BoxContents read;
  CHECK_EQ(read_box(copy_of(box), history, read), "");
  return read;
}

Record some_record(std::uint64_t sequence, std::uint32_t site = 0) {
  return {.begin = 10, .sequence = sequence, .count = 7, .site = site, .kind = Kind::all_reduce};
}

TEST(who_it_is_of) {
  const auto box = make();
  const BoxContents read = contents(*box);
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
  const auto box = make();
  const std::uint32_t site = call_site_number("train.py:40");
  box->publish_sites();
  Record first = some_record(1, site);
  Record second = some_record(2);
  const int first_place = box->begin(first);
  const int second_place = box->begin(second);
  second.waiting_for = 5;
  box->waiting_for(second_place, second);
  first.end = 20;
  first.outcome = Code::peer_lost;
  box->end(first_place, first);
  const BoxContents read = contents(*box);
  CHECK_EQ(read.operations, 2U);
  CHECK(read.done.size() == 1 && read.open.size() == 1 && read.torn == 0);
  CHECK_EQ(read.done[0].number, 1U);
  CHECK_EQ(read.done[0].end, 20U);
  CHECK(read.done[0].outcome == Code::peer_lost);
  CHECK_EQ(read.sites[read.done[0].site], "train.py:40");
  CHECK_EQ(read.open[0].number, 2U);
  CHECK_EQ(read.open[0].waiting_for, 5);
}

TEST(what_the_main_thread_waits_for) {
  const auto box = make();
  Record record = some_record(1);
  const int place = box->begin(record);
  CHECK_EQ(contents(*box).main_waits, 0U);
  box->main_waits(record.number);
  CHECK_EQ(contents(*box).main_waits, contents(*box).open[0].number);
  box->end(place, record);
  box->main_waits(0);
  CHECK_EQ(contents(*box).main_waits, 0U);
}

TEST(more_operations_under_way_than_places) {
  const auto box = make();
  std::vector<Record> records(kBoxOpen + 10);
  std::vector<int> places;
  for (Record& record : records) {
    places.push_back(box->begin(record));
  }
  CHECK_EQ(places.back(), -1);
  CHECK_EQ(contents(*box).open.size(), kBoxOpen);
  for (std::size_t i = 0; i < records.size(); ++i) {
    box->end(places[i], records[i]);
  }
  const BoxContents read = contents(*box);
  CHECK_EQ(read.open.size(), 0U);
  CHECK_EQ(read.done.size(), records.size());
}

TEST(messages_in_any_number_do_not_hide_a_collective) {
  const auto box = make();
  std::vector<Record> messages(kBoxOpen + 10, Record{.kind = Kind::recv});
  std::vector<int> places;
  for (Record& message : messages) {
    places.push_back(box->begin(message));
  }
  CHECK(std::ranges::count_if(places, [](int place) { return place >= 0; }) == kBoxMessages);
  Record record = some_record(1);
  CHECK(box->begin(record) >= 0);
  CHECK(contents(*box).open.back().kind == Kind::all_reduce);
}

TEST(the_history_keeps_the_newest) {
  const auto box = make();
  for (std::uint64_t i = 1; i <= kBoxHistory + 100; ++i) {
    Record record = some_record(i);
    const int place = box->begin(record);
    box->end(place, record);
  }
  BoxContents read = contents(*box);
  CHECK_EQ(read.done.size(), kBoxHistory);
  CHECK_EQ(read.done.front().sequence, 101U);
  CHECK_EQ(read.done.back().sequence, kBoxHistory + 100);
  read = contents(*box, 3);
  CHECK_EQ(read.done.size(), 3U);
  CHECK_EQ(read.done.back().sequence, kBoxHistory + 100);
}

TEST(groups_that_were_left_make_room) {
  const auto box = make();
  std::vector<std::uint16_t> ids;
  for (std::size_t i = 0; i < kBoxGroups; ++i) {
    ids.push_back(box->add_group(1, 4));
  }
  CHECK_EQ(box->add_group(0, 2), 0);
  GroupNote* note = box->group(ids[5]);
  CHECK(note != nullptr);
  FlightRecorder::name_group(*note, std::string(300, 'n'), std::string(300, '1'));
  note->left.store(1);
  const std::uint16_t fresh = box->add_group(0, 2);
  CHECK(fresh != 0 && box->group(ids[5]) == nullptr && box->group(fresh) == note);
  FlightRecorder::name_group(*note, std::string(300, 'n'), std::string(300, '1'));
  const BoxContents read = contents(*box);
  CHECK_EQ(read.groups.size(), kBoxGroups);
  CHECK_EQ(read.groups.back().id, fresh);  // in the order in which they were formed
  CHECK_EQ(read.groups.back().name.size(), sizeof note->name - 1);
  CHECK_EQ(read.groups.back().members, "");  // rather none than wrong ones
}

TEST(ids_of_groups_come_round_but_not_onto_living_ones) {
  const auto box = make();
  const std::uint16_t living = box->add_group(0, 2);
  for (int i = 0; i < 70'000; ++i) {
    const std::uint16_t id = box->add_group(1, 2);
    const bool fresh = id != 0 && id != living;
    if (!CHECK(fresh)) return;
    box->group(id)->left.store(1);
  }
  CHECK_EQ(box->group(living)->rank, 0);
}

TEST(reports_and_the_ending) {
  const auto box = make();
  for (int step = 0; step < 300; ++step) {
    box->report(step, step / 2.0, "note");
  }
  box->set_ending(Ending::left, "");
  box->set_ending(Ending::failed, "ValueError: " + std::string(1000, 'x'));
  box->set_ending(Ending::exited, "");
  const BoxContents read = contents(*box);
  CHECK_EQ(read.reports.size(), kBoxReports);
  CHECK_EQ(read.reports.back().step, 299);
  CHECK(read.reports.back().loss == 149.5);
  box->report(300, std::nullopt, "");
  box->report(301, std::nan(""), "");
  const BoxContents more = contents(*box);
  CHECK(!more.reports[kBoxReports - 2].loss.has_value());
  CHECK(std::isnan(more.reports.back().loss.value_or(0)));
  CHECK_EQ(read.note, "note");
  CHECK(read.ending == Ending::failed && read.ending_time != 0);
  CHECK_EQ(read.last_words.size(), 511U);
}

TEST(more_call_sites_than_places) {
  const auto box = make();
  std::uint32_t last = 0;
  for (std::size_t i = 0; i < kBoxSites + 50; ++i) {
    last = call_site_number("many.py:" + std::to_string(i));
  }
  box->publish_sites();
  CHECK_EQ(call_site_text(last), "many.py:" + std::to_string(kBoxSites + 49));
  CHECK_EQ(call_site_number("many.py:7"), call_site_number("many.py:7"));
  const BoxContents read = contents(*box);
  CHECK_EQ(read.sites.size(), kBoxSites);
  // A path is cut at its beginning.
  const auto fresh = make();
  CHECK_EQ(contents(*fresh).sites.size(), kBoxSites);
}

// Several threads write while one reads: what is read as whole is whole.
TEST(read_while_written) {
  const auto box = make();
  constexpr int kThreads = 3;
  std::atomic<bool> stop = false;
  std::vector<std::thread> writers;
  for (int thread = 0; thread < kThreads; ++thread) {
    writers.emplace_back([&, thread] {
      for (std::uint64_t i = 1; !stop.load(std::memory_order_relaxed); ++i) {
        // All fields follow from one.
        Record record{.begin = i, .waited = 3 * i, .sequence = i, .count = 2 * i};
        record.thread = static_cast<std::uint8_t>(thread);
        const int place = box->begin(record);
        record.end = i + 1;
        box->end(place, record);
      }
    });
  }
  std::size_t seen = 0;
  for (int look = 0; look < 200; ++look) {
    for (const SharedRecord& shared : box->layout().history) {
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
  CHECK_EQ(contents(*box).open.size(), 0U);
}

TEST(what_is_no_flight_recorder) {
  const auto box = make();
  const std::vector<std::byte> whole = copy_of(*box);
  BoxContents read;
  CHECK(read_box({}, 10, read).starts_with("no flight recorder"));
  CHECK(read_box(std::vector<std::byte>(sizeof(BoxLayout)), 10, read).starts_with("no flight recorder"));
  CHECK(read_box(std::span(whole).first(5000), 10, read).starts_with("damaged: 5000 bytes"));
  std::vector<std::byte> other = whole;
  other[8] = std::byte{9};
  CHECK(read_box(other, 10, read).starts_with("written in layout version 9"));
}

// Whatever stands behind a good beginning, reading ends, within bounds (under ASan and UBSan too).
TEST(hostile_contents) {
  const auto box = make();
  Record record = some_record(1);
  box->end(box->begin(record), record);
  const std::vector<std::byte> whole = copy_of(*box);
  std::mt19937_64 random(ranks::seed);
  for (int round = 0; round < 50; ++round) {
    std::vector<std::byte> bytes = whole;
    const std::size_t changes = round % 2 == 0 ? 100 : bytes.size();
    for (std::size_t i = 0; i < changes; ++i) {
      bytes[12 + random() % (bytes.size() - 12)] = static_cast<std::byte>(random());
    }
    BoxContents read;
    CHECK_EQ(read_box(bytes, kBoxHistory, read), "");
    CHECK(read.done.size() <= kBoxHistory && read.open.size() <= kBoxOpen);
    CHECK(read.groups.size() <= kBoxGroups && read.reports.size() <= kBoxReports);
  }
}

}  // namespace
