"""Processes whose clock is off: a shared library that shifts the time of day."""

from __future__ import annotations

import subprocess
from pathlib import Path

__all__ = ["skew"]

_SOURCE = """
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t clock, struct timespec* now) {
  int result = syscall(SYS_clock_gettime, clock, now);
  if (result == 0 && clock == CLOCK_REALTIME) now->tv_sec += (SECONDS);
  return result;
}

int gettimeofday(struct timeval* now, void* zone) {
  struct timespec precise;
  (void)zone;
  clock_gettime(CLOCK_REALTIME, &precise);
  now->tv_sec = precise.tv_sec;
  now->tv_usec = precise.tv_nsec / 1000;
  return 0;
}

time_t time(time_t* now) {
  struct timespec precise;
  clock_gettime(CLOCK_REALTIME, &precise);
  if (now) *now = precise.tv_sec;
  return precise.tv_sec;
}
"""


def skew(seconds: int, folder: Path) -> dict[str, str]:
    """Return environment variables that shift the time of day of a process and its children.

    Args:
        seconds: The seconds by which the clock is ahead; behind if negative.
        folder: An existing folder for the library.
    """
    source, library = folder / f"clock{seconds}.c", folder / f"clock{seconds}.so"
    source.write_text(_SOURCE)
    command = ["cc", "-shared", "-fPIC", f"-DSECONDS={seconds}", "-o", str(library), str(source)]
    subprocess.run(command, check=True)
    return {"LD_PRELOAD": str(library)}
