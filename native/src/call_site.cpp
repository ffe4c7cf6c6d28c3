#include "phalanx/call_site.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <deque>
#include <mutex>
#include <unordered_map>

namespace phalanx {
namespace {

constexpr std::size_t kMaxSites = 1 << 16;

struct Sites {
  std::mutex mutex;
  std::deque<std::string> texts{""};  // by number; never moved, since the map's keys view them
  std::unordered_map<std::string_view, std::uint32_t> numbers;
};

Sites& sites() {
  // Never destroyed: threads may use it until the end of the process.
  static Sites* const all = new Sites;
  return *all;
}

}  // namespace

std::uint32_t call_site_number(std::string_view text) {
  Sites& all = sites();
  const std::lock_guard lock(all.mutex);
  if (const auto known = all.numbers.find(text); known != all.numbers.end()) {
    return known->second;
  }
  if (all.texts.size() == kMaxSites) {
    return 0;
  }
  const auto number = static_cast<std::uint32_t>(all.texts.size());
  all.numbers.emplace(all.texts.emplace_back(text), number);
  return number;
}

std::string call_site_text(std::uint32_t number) {
  Sites& all = sites();
  const std::lock_guard lock(all.mutex);
  return number < all.texts.size() ? all.texts[number] : std::string();
}

std::uint32_t call_site_count() {
  Sites& all = sites();
  const std::lock_guard lock(all.mutex);
  return static_cast<std::uint32_t>(all.texts.size());
}

Caller& current_caller() {
  // The function gettid is younger (glibc 2.30) than the C library that wheels are built for.
  thread_local Caller caller{
      .site = 0, .thread = syscall(SYS_gettid) == getpid() ? Caller::kMain : Caller::kOther};
  return caller;
}

}  // namespace phalanx
