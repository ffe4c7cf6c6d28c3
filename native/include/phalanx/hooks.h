// Hooks for tests: a name before every step that touches shared memory. A test can end the process
// there, pause it, or yield to other ranks. Without PHALANX_HOOKS, which only test builds define,
// they compile to nothing.
#pragma once

#if defined(PHALANX_HOOKS)

#include <atomic>

namespace phalanx {

// Called with the name of the next step, by the thread that takes it. Null: no hook.
inline std::atomic<void (*)(const char* step)> step_hook = nullptr;

inline void before_step(const char* step) {
  if (auto* hook = step_hook.load(std::memory_order_relaxed); hook != nullptr) {
    hook(step);
  }
}

}  // namespace phalanx

#define PHALANX_STEP(name) ::phalanx::before_step(name)
#else
#define PHALANX_STEP(name) static_cast<void>(0)
#endif
