// Reading a flight recorder: a copy of its file, looked at with distrust. Nothing in it is believed
// before it was checked, so that a damaged or forged file gives an error or odd texts, never a
// crash.
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
  bool left = false;
  std::string left_at;
  std::string name;
  std::string members;
  std::string why;
};

struct RecordedReport {
  std::uint64_t time = 0;
  std::int64_t step = 0;
  std::optional<double> loss;
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
  std::vector<RecordedGroup> groups;    // in the order in which they were formed
  std::vector<Record> open;             // oldest first
  std::vector<Record> done;             // oldest first
  std::vector<std::string> sites;       // by number
  std::vector<RecordedReport> reports;  // oldest first
  int torn = 0;                         // records that were being written
};

// Fills `contents`, with the newest `history` of the ended operations. Returns why it can't, in
// words; empty if it could.
std::string parse_recorder(std::span<const std::byte> bytes, std::size_t history,
                           RecorderContents& contents);

// A copy of the box of a process: through its descriptor while it lives, else from the directory in
// which the own box lies. Empty if there is none.
std::vector<std::byte> copy_recorder(int pid, int descriptor);

}  // namespace phalanx
