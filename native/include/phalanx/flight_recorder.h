// The flight recorder of a process: the operations of its rank, in a file that outlives the
// process.
//
// The file is mapped, so that a record costs a few stores and stays in the page cache when its
// writer is killed. The process is the only writer. Readers copy the file
// (flight_recorder_reader.h) and cannot affect the writer. A reader must detect records that are
// being written. So a record is framed by its number, which is written first at the end and last at
// the beginning. A reader that copies from the beginning to the end finds both only around a
// complete record. A thread claims a slot before it writes there.
//
// Layout, all of fixed size:
//   RecorderHeader | GroupEntry x kRecorderGroups | CallSite x kRecorderSites
//   | under way: SharedRecord x kRecorderOpen | SharedReport x kRecorderReports
//   | ended: SharedRecord x kRecorderHistory | LinkEntry x kRecorderLinks
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>

#include "phalanx/fingerprint.h"
#include "phalanx/segment.h"
#include "phalanx/status.h"
#include "phalanx/wait.h"

namespace phalanx {

inline constexpr std::uint64_t kRecorderMagic = 0x584f424c4b434201;  // "\1BCKLBOX"
inline constexpr std::uint32_t kRecorderVersion = 5;
inline constexpr std::size_t kRecorderGroups = 128;
inline constexpr std::size_t kRecorderSites = 1024;
inline constexpr std::size_t kRecorderOpen = 64;
// Messages use these slots only, so that any number of them cannot hide the rank's collective.
inline constexpr std::size_t kRecorderMessages = 56;
inline constexpr std::size_t kRecorderReports = 256;
inline constexpr std::size_t kRecorderHistory = 4096;
inline constexpr std::size_t kRecorderLinks = 64;

// One operation, as it is recorded.
struct Record {
  std::uint64_t number = 0;  // counts this process's operations, from 1
  std::uint64_t begin = 0;   // nanoseconds of the monotonic clock
  std::uint64_t end = 0;     // 0 while it is under way
  std::uint64_t waited = 0;  // nanoseconds
  std::uint64_t sequence = 0;
  std::uint64_t count = 0;
  std::int16_t peer = -1;         // root, or the other rank of a message
  std::int16_t waiting_for = -1;  // the awaited rank; after the end the one with the longest wait
  DType dtype = DType::uint8;
  ReduceOp op = ReduceOp::none;
  Code outcome = Code::ok;
  std::uint8_t thread = 0;  // see Caller
  std::uint32_t site = 0;   // number of a CallSite; 0: unknown
  std::uint16_t group = 0;  // id of a GroupEntry; 0: unknown
  Kind kind = Kind::none;
  std::uint8_t progress = 0;  // percent, of an operation between hosts; 0: unknown
};
static_assert(sizeof(Record) == 64);

// A record in the file.
class SharedRecord {
 public:
  void store(const Record& value);
  void clear();
  // While the operation is under way; called by the thread that runs it.
  void waiting_for(const Record& value);
  void progress(const Record& value);
  // False if the slot is empty, or was being written to.
  bool load(Record& value) const;
  bool empty() const;

 private:
  static constexpr std::size_t kWords = sizeof(Record) / 8;
  static constexpr std::size_t kPeers = offsetof(Record, peer) / 8;
  static constexpr std::size_t kProgress = offsetof(Record, progress) / 8;
  // The first word is the number, written last; `frame_` is the number, written first.
  std::atomic<std::uint64_t> words_[kWords];
  std::atomic<std::uint64_t> frame_;
};
static_assert(sizeof(SharedRecord) == 72);

// A text of at most N - 1 bytes. Either written once, before anything refers to it, or repeatedly
// (`note`), in which case a reader may get a mixture.
template <std::size_t N>
using Text = char[N];

struct RecorderHeader {
  // Written before the recorder is used, constant from then on.
  std::uint64_t magic;
  std::uint32_t version;
  std::int32_t rank;
  std::int32_t world_size;
  std::int32_t attempt;
  std::int32_t pid;
  std::int32_t reserved;
  std::int64_t clock;    // wall clock minus monotonic clock, nanoseconds
  std::uint64_t opened;  // monotonic
  Text<128> host;
  Text<128> job;
  // Writers: threads of the process, each field independently.
  alignas(kCacheLine) std::atomic<std::uint64_t> operations_begun;
  std::atomic<std::uint64_t> operations_ended;  // those moved to the history
  std::atomic<std::uint64_t> reports;
  std::atomic<std::uint32_t> sites;  // call sites in the table; published by a release
  std::atomic<std::uint32_t> groups;
  std::atomic<std::uint64_t> ending_time;  // monotonic; published with `ending`
  // The number of the operation of a group's thread that the main thread has been waiting for, for
  // some time; 0: none. Writer: the main thread.
  std::atomic<std::uint64_t> main_thread_wait;
  // The number of the operation that the main thread waits for, if no other thread of the process
  // can begin one meanwhile; 0: none. Writer: the main thread.
  std::atomic<std::uint64_t> lone_wait;
  std::atomic<std::uint32_t> ending;  // 0: none yet, else an Ending; published by a release
  Text<512> exception;
  Text<256> note;
};
static_assert(sizeof(RecorderHeader) <= kPage);
static_assert(offsetof(RecorderHeader, operations_begun) == 320);

enum class Ending : std::uint32_t { none = 0, left = 1, exited = 2, failed = 3 };

struct GroupEntry {
  std::atomic<std::uint64_t> identity;  // the segment's nonce; 0 while the group is being formed
  // collectives begun; writer: the holder of the collective lock
  std::atomic<std::uint64_t> sequence;
  std::atomic<std::uint64_t> left_time;  // monotonic; 0: this rank has not left
  std::atomic<std::uint32_t> id;         // 0: unused; written last
  std::atomic<std::uint32_t> left_at;    // a call site
  std::int32_t rank;
  std::int32_t size;
  Text<88> name;
  Text<128> members;       // ranks in the job: "0-3,6"; empty: too many
  Text<640> abort_reason;  // why this rank aborted it; holds a deadlock of six ranks
};
static_assert(sizeof(GroupEntry) == 896);

struct CallSite {
  Text<128> text;  // "path:line"
};
static_assert(sizeof(CallSite) == 128);

// A signalling NaN, which no computation yields.
inline constexpr std::uint64_t kNoLoss = 0x7ff4000000000001;

struct SharedReport {
  std::atomic<std::uint64_t> number;  // from 1; written last
  std::atomic<std::uint64_t> time;
  std::atomic<std::int64_t> step;
  std::atomic<std::uint64_t> loss;  // the bits of a double; kNoLoss: none was given
  std::atomic<std::uint64_t> frame;
};
static_assert(sizeof(SharedReport) == 40);

// The bytes that a link has carried until some time.
struct LinkBytes {
  std::uint64_t sent = 0;
  std::uint64_t received = 0;
  std::uint64_t time = 0;  // monotonic
};

// The link to another host, as this process uses it. Writer of the numbers: the holder of the
// link's lock in `hierarchical.links`. Each is written by itself, so a reader may get a mixture.
struct LinkEntry {
  std::atomic<std::uint32_t> used;  // 1: `host` is written; published by a release
  std::uint32_t reserved;
  std::atomic<std::uint64_t> sent;
  std::atomic<std::uint64_t> received;
  std::atomic<std::uint64_t> time;  // monotonic
  // The same some seconds before, from which readers compute the bandwidth.
  std::atomic<std::uint64_t> earlier_sent;
  std::atomic<std::uint64_t> earlier_received;
  std::atomic<std::uint64_t> earlier_time;
  Text<72> host;
};
static_assert(sizeof(LinkEntry) == 128);

struct RecorderLayout {
  RecorderHeader header;
  alignas(kPage) GroupEntry groups[kRecorderGroups];
  alignas(kPage) CallSite sites[kRecorderSites];
  alignas(kPage) SharedRecord open[kRecorderOpen];
  alignas(kCacheLine) SharedReport reports[kRecorderReports];
  alignas(kPage) SharedRecord history[kRecorderHistory];
  alignas(kPage) LinkEntry links[kRecorderLinks];
};
static_assert(offsetof(RecorderLayout, groups) == 4096);
static_assert(offsetof(RecorderLayout, sites) == 118784);
static_assert(offsetof(RecorderLayout, open) == 249856);
static_assert(offsetof(RecorderLayout, reports) == 254464);
static_assert(offsetof(RecorderLayout, history) == 266240);
static_assert(offsetof(RecorderLayout, links) == 561152);
static_assert(sizeof(RecorderLayout) == 569344, "a changed layout needs a new kRecorderVersion");

// The identity of the recorded rank.
struct RecorderIdentity {
  int rank = 0;
  int world_size = 1;
  int attempt = 0;
  std::string_view host;
  std::string_view job;
};

inline std::uint64_t nanoseconds(Clock::time_point time) {
  return static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count());
}

class FlightRecorder {
 public:
  // Maps the file behind `fd`, which must have the size of a RecorderLayout and be all zero, and
  // keeps the descriptor. Null and a status (system) if that fails.
  static std::unique_ptr<FlightRecorder> open(int fd, const RecorderIdentity& identity,
                                              Status& status);
  ~FlightRecorder();
  FlightRecorder(const FlightRecorder&) = delete;
  FlightRecorder& operator=(const FlightRecorder&) = delete;

  // The flight recorder of this process; null if there is none. It is never destroyed, since groups
  // and threads may write to it until the end.
  static FlightRecorder* own();
  static void install(std::unique_ptr<FlightRecorder> recorder);
  // For a forked child: the flight recorder belongs to its parent.
  static void detach();

  int descriptor() const { return fd_; }
  const RecorderLayout& layout() const { return *layout_; }

  // Returns the id of a new entry. If the table is full, it replaces the oldest group that was
  // left; if there is none, the group is not recorded (0).
  std::uint16_t add_group(int rank, int size);
  GroupEntry* group(std::uint16_t id);
  static void name_group(GroupEntry& entry, std::string_view name, std::string_view members);
  static void set_abort_reason(GroupEntry& entry, std::string_view reason);

  // Numbers an operation and records it as under way. Returns its slot, -1 if all are in use.
  int begin(Record& record);
  void waiting_for(int slot, const Record& record) { layout_->open[slot].waiting_for(record); }
  void progress(int slot, const Record& record) { layout_->open[slot].progress(record); }
  // Moves the record to the history.
  void end(int slot, const Record& record);
  // Numbers and records an operation that has ended, and was never recorded as under way.
  void record(Record& record);

  // For the main thread: sets the number of the operation of a group's thread that it waits for; 0:
  // none. Numbers are unique, so no order with the records is needed.
  void set_main_thread_wait(std::uint64_t number) {
    layout_->header.main_thread_wait.store(number, std::memory_order_relaxed);
  }
  // For the main thread: sets the number of the operation that it waits for while no other thread
  // can begin one; 0: none.
  void set_lone_wait(std::uint64_t number) {
    layout_->header.lone_wait.store(number, std::memory_order_relaxed);
  }

  // Returns the number of the link to a host, which is new if there is none; -1 if the table is
  // full.
  int add_link(std::string_view host);
  void record_link(int link, const LinkBytes& now, const LinkBytes& earlier);

  void report(std::int64_t step, std::optional<double> loss, std::string_view note);
  // Keeps the first ending other than `left`.
  void record_ending(Ending ending, std::string_view exception);
  // Publishes new call sites; see call_site.h.
  void publish_sites();

 private:
  FlightRecorder(RecorderLayout* layout, int fd) : layout_(layout), fd_(fd) {}

  RecorderLayout* layout_;
  int fd_;
  // The slots of `open` that are in use.
  std::atomic<std::uint64_t> used_slots_ = 0;
  std::mutex mutex_;  // for groups, sites, links, reports and the ending
  std::uint16_t last_group_ = 0;
};

}  // namespace phalanx
