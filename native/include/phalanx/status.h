// The result of an operation of the core. The core throws nothing: the bindings turn a status into
// a Python exception, in one place.
#pragma once

#include <cstdint>

#include "phalanx/fingerprint.h"

namespace phalanx {

// The numbers are stored in the abort word of the segment: append only.
enum class Code : std::uint8_t {
  ok = 0,
  peer_lost = 1,      // the process of rank `peer` is gone
  mismatch = 2,       // rank `peer` is in another operation than rank `reporter`
  timeout = 3,        // rank `reporter` waited for rank `peer` until the deadline
  aborted = 4,        // rank `reporter` aborted the group
  interrupted = 5,    // a Python signal handler of rank `reporter` raised
  out_of_memory = 6,  // rank `reporter` could not get the pages of its part of the segment
  system = 7,         // a system call failed; `error` is its errno
  left = 8,           // rank `peer` has left the group (shut it down) and will not come
  deadlock = 9,  // ranks wait for each other in several groups; see `reporter`'s flight recorder
};

struct [[nodiscard]] Status {
  Code code = Code::ok;
  std::int32_t peer = -1;      // the rank that the failure is about
  std::int32_t reporter = -1;  // the rank that detected it
  std::int32_t error = 0;

  bool ok() const { return code == Code::ok; }
};
static_assert(sizeof(Status) == 16, "returned in registers");

// The reason why a group is broken.
struct Failure {
  Status status;
  Fingerprint mine;    // of `status.reporter`, for mismatch and timeout
  Fingerprint theirs;  // of `status.peer`, for mismatch

  // NOLINTNEXTLINE(google-explicit-constructor): most failures have no fingerprints
  Failure(Status reason, const Fingerprint& own = {}, const Fingerprint& other = {})
      : status(reason), mine(own), theirs(other) {}
};

}  // namespace phalanx
