// A handle on a peer's process (a pidfd), which stays valid if the pid is reused.
#pragma once

#include <memory>
#include <optional>

namespace phalanx {

class Process {
 public:
  // Returns 0 or an errno; ESRCH if there is no such process. Groups with the same peer share one
  // descriptor.
  int open(int pid);
  // Whether it has ended, or is exiting and runs no more code; true from the beginning if there was
  // no such process. False if the handle is not open for another reason.
  bool ended() const;
  // The wait status of a process that has ended, if the kernel reports it to processes other than
  // the parent: while it exits or is a zombie, or from Linux 6.15 on. Blocks for at most 0.2 s, and
  // only for a process that ended without a failure.
  std::optional<int> wait_status() const;

 private:
  struct Handle;
  std::shared_ptr<const Handle> handle_;
  bool missing_ = false;  // there was no such process
};

}  // namespace phalanx
