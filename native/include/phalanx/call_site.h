// Call sites in the user's code, by number; 0 means unknown. The caller of the core provides the
// number, and the core only passes it on to the flight recorder.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace phalanx {

// Returns the number of "path:line", and registers it if it is new; 0 if there are too many. Takes
// a lock.
std::uint32_t call_site_number(std::string_view text);
// Returns the text of a call site; empty for 0 and for unknown numbers.
std::string call_site_text(std::uint32_t number);
// The number of registered call sites.
std::uint32_t call_site_count();

// The call site of the next operation of this thread, and the kind of the thread.
struct Caller {
  static constexpr std::uint8_t kMain = 0;   // the main thread of the process
  static constexpr std::uint8_t kGroup = 1;  // a group's thread, which runs queued operations
  static constexpr std::uint8_t kOther = 2;

  std::uint32_t site = 0;
  std::uint8_t thread = kOther;
};
Caller& current_caller();

}  // namespace phalanx
