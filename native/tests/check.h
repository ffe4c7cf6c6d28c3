// A test harness in one header, for one source per executable: TEST(name) { CHECK(...); } registers
// a function. main runs all of them, or those named as arguments, and returns 1 if a check failed.
#pragma once

#include <atomic>
#include <cstdio>
#include <iostream>
#include <sstream>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace check {

struct Test {
  const char* name;
  void (*run)();
};
inline std::vector<Test> tests;
inline std::atomic<int> failures = 0;  // ranks that run as threads check too

inline bool add(const char* name, void (*run)()) { return tests.push_back({name, run}), true; }

inline bool fail(const char* file, int line, const std::string& what) {
  ++failures;
  std::fprintf(stderr, "%s:%d: failed: %s\n", file, line, what.c_str());
  return false;
}

// Prints characters (int8_t, uint8_t) as numbers, and scoped enumerators as their values.
void show(std::ostream& out, const auto& value) {
  using T = std::remove_cvref_t<decltype(value)>;
  if constexpr (std::is_enum_v<T>) {
    out << static_cast<long long>(value);
  } else if constexpr (std::is_arithmetic_v<T>) {
    out << +value;
  } else {
    out << value;
  }
}

bool equal(const auto& a, const auto& b, const char* text, const char* file, int line) {
  if (a == b) return true;
  std::ostringstream what;
  show(what << text << "\n  left:  ", a);
  show(what << "\n  right: ", b);
  return fail(file, line, what.str());
}

}  // namespace check

#define TEST(name)                                                            \
  static void name();                                                         \
  [[maybe_unused]] static const bool name##_added = check::add(#name, &name); \
  static void name()

// Both return whether the check held, so that a test can stop or print more.
#define CHECK(...) ((__VA_ARGS__) || check::fail(__FILE__, __LINE__, #__VA_ARGS__))
#define CHECK_EQ(a, b) check::equal((a), (b), #a " == " #b, __FILE__, __LINE__)

int main(int argc, char** argv) {
  for (const check::Test& test : check::tests) {
    bool chosen = argc == 1;
    for (int i = 1; i < argc; ++i) chosen |= test.name == std::string_view(argv[i]);
    if (!chosen) continue;
    const int before = check::failures;
    test.run();
    std::printf("%s %s\n", check::failures == before ? "ok    " : "FAILED", test.name);
    std::fflush(stdout);
  }
  return check::failures == 0 ? 0 : 1;
}
