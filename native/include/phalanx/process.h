// A handle on a peer's process (a pidfd), which no other process can take over by inheriting its
// pid.
#pragma once

#include <memory>
#include <optional>

namespace phalanx {

class Process {
 public:
  // 0, or an errno; ESRCH when there is no such process. Groups with the same peer share one
  // descriptor.
  int open(int pid);
  // Whether it has ended, or runs no more code on its way to that. False for a handle that is not
  // open.
  bool ended() const;
  // The wait status of a process that has ended, where the kernel tells it to others than the
  // parent: while it ends or is a zombie, or from Linux 6.15 on. Blocks for 0.2 s at most, and only
  // for one that ended without a failure.
  std::optional<int> wait_status() const;

 private:
  struct Handle;
  std::shared_ptr<const Handle> handle_;
};

}  // namespace phalanx
