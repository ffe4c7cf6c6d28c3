// Processes that are killed or stopped at a step of a call.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <string_view>

#include "check.h"
#include "phalanx/hooks.h"

namespace process_faults {

inline void end(pid_t child, int signal = 0) {
  if (signal != 0) kill(child, signal);
  int ending = 0;
  CHECK_EQ(waitpid(child, &ending, 0), child);
}

#if defined(PHALANX_HOOKS)
inline int steps_left = 0;
inline int last_signal = SIGKILL;

// Kills or stops this process before one of its steps; the words of a row are not counted.
inline void inject_fault(const char* step) {
  if (std::string_view(step).starts_with("rows: word")) return;
  if (steps_left-- == 0) raise(last_signal);
}

// Forks a child that runs `body` and gets the signal before its step number `step`. Returns 0 if it
// has no such step and has ended normally.
template <class Body>
pid_t run_with_fault(int step, int signal, Body&& body) {
  const pid_t child = fork();
  if (child == 0) {
    steps_left = step;
    last_signal = signal;
    phalanx::step_hook.store(&inject_fault);
    body();
    _exit(0);
  }
  int ending = 0;
  CHECK_EQ(waitpid(child, &ending, WUNTRACED), child);
  if (WIFEXITED(ending)) {
    CHECK_EQ(WEXITSTATUS(ending), 0);
    return 0;
  }
  CHECK((signal == SIGKILL && WIFSIGNALED(ending)) || WIFSTOPPED(ending));
  return child;
}
#endif

}  // namespace process_faults
