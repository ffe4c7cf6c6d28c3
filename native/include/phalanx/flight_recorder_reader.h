// The reader of flight recorders. It works on a copy of the file and trusts nothing in it before it
// is checked: a damaged or forged file yields an error or odd texts, never a crash.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "phalanx/flight_recorder.h"

namespace phalanx {

struct RecordedGroup {
  std::uint64_t identity = 0;
  std::uint64_t sequence = 0;
  std::uint16_t id = 0;
  int rank = 0;
  int size = 0;
  std::uint64_t left_time = 0;  // 0: it has not left
  std::string left_at;
  std::string name;
  std::string members;
  std::string abort_reason;
};

struct RecordedReport {
  std::uint64_t time = 0;
  std::int64_t step = 0;
  std::optional<double> loss;
};

struct RecordedLink {
  std::string host;
  LinkBytes now;
  LinkBytes earlier;
};

struct RecorderContents {
  int pid = 0;
  int rank = 0;
  int world_size = 0;
  int attempt = 0;
  std::string host;
  std::string job;
  std::int64_t clock = 0;
  std::uint64_t opened = 0;
  Ending ending = Ending::none;
  std::uint64_t ending_time = 0;
  std::string exception;
  std::string note;
  std::uint64_t operations = 0;
  std::uint64_t main_thread_wait = 0;
  std::uint64_t lone_wait = 0;
  std::vector<RecordedGroup> groups;    // in the order of their formation
  std::vector<Record> open;             // oldest first
  std::vector<Record> done;             // oldest first
  std::vector<std::string> sites;       // by number
  std::vector<RecordedReport> reports;  // oldest first
  std::vector<RecordedLink> links;
  int torn = 0;  // records that were being written
};

// Fills `contents`, with the newest `history` of the ended operations. Returns an error message;
// empty on success.
std::string parse_recorder(std::span<const std::byte> bytes, std::size_t history,
                           RecorderContents& contents);

// Copies the flight recorder of a process: through its descriptor while the process lives,
// otherwise from the directory of this process's own flight recorder. Empty if there is none.
std::vector<std::byte> copy_recorder(int pid, int descriptor);

}  // namespace phalanx
