// Places in the user's code, by number: 0 is "not known". Whoever calls the core says where the
// user called from; the core only hands the number on, to the flight recorder.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace phalanx {

// The number of "path:line", new or known; 0 when there are too many. Takes a lock.
std::uint32_t call_site_number(std::string_view text);
// Its text; empty for 0 and for numbers that nobody has given.
std::string call_site_text(std::uint32_t number);
// How many numbers have been given.
std::uint32_t call_site_count();

// Where the operation comes from that this thread does next, and which thread it is.
struct Caller {
  static constexpr std::uint8_t kMain = 0;   // the main one of the process
  static constexpr std::uint8_t kGroup = 1;  // a group's own, which runs what others have queued
  static constexpr std::uint8_t kOther = 2;

  std::uint32_t site = 0;
  std::uint8_t thread = kOther;
};
Caller& current_caller();

}  // namespace phalanx
