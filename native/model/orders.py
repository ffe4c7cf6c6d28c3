"""The memory orders of the models, read from the sources of the core.

The models are checked with the orders in the code: `make model` fails if one is weakened.
"""

import re
from pathlib import Path

ORDER = r"std::memory_order_(\w+)"

# Name in the models: the file, and a pattern that matches exactly once.
ACCESSES = {
    "SLEEPERS_ADD": ("include/phalanx/wait.h", rf"event\.sleepers\.fetch_add\(1, {ORDER}\)"),
    "SLEEPERS_SUB": ("include/phalanx/wait.h", rf"event\.sleepers\.fetch_sub\(1, {ORDER}\)"),
    "SLEEPERS_READ": ("include/phalanx/wait.h", rf"event\.sleepers\.fetch_add\(0, {ORDER}\)"),
    "SLEEPERS_LOAD": ("include/phalanx/wait.h", rf"if \(event\.sleepers\.load\({ORDER}\) != 0\)"),
    "SLEEPERS_LOCK": ("include/phalanx/wait.h", rf"sleepers\.fetch_or\(kLocked, {ORDER}\)"),
    "SLEEPERS_UNLOCK": ("include/phalanx/wait.h", rf"sleepers\.fetch_sub\(kLocked, {ORDER}\)"),
    "SLEEPERS_GLANCE": ("src/collective.cpp", rf"sleepers\.load\({ORDER}\) != kLocked"),
    "TICKET_LOAD": ("include/phalanx/wait.h", rf"seen = event\.ticket\.load\({ORDER}\)"),
    "TICKET_ADD": ("src/wait.cpp", rf"event\.ticket\.fetch_add\(1, {ORDER}\)"),
    "ENTRY_CLEAR": ("src/collective.cpp", rf"mine\.number\.store\(0, {ORDER}\)"),
    "ENTRY_HISTORY": ("src/collective.cpp", rf"history\.store\(group_\.history_, {ORDER}\)"),
    "ENTRY_STORE": ("src/collective.cpp", rf"mine\.number\.store\(number, {ORDER}\)"),
    "ENTRY_LOAD": ("src/collective.cpp", rf"number\.load\({ORDER}\) == group_\.entries_"),
    "ENTERED_STORE": ("src/collective.cpp", rf"control\.entered\.store\(number, {ORDER}\)"),
    "ENTERED_LOAD": ("src/collective.cpp", rf"entered = control\.entered\.load\({ORDER}\)"),
    "LAST_LOAD": ("src/collective.cpp", rf"there = other\.number\.load\({ORDER}\) == number"),
    "LAST_HISTORY": ("src/collective.cpp", rf"history = other\.history\.load\({ORDER}\)"),
    "LAST_CHECK": ("src/collective.cpp", rf"other\.number\.load\({ORDER}\) != number\)"),
    "FINGERPRINT_STORE": (
        "include/phalanx/fingerprint.h",
        rf"words_\[1\]\.store\(value\.rest, {ORDER}\)",
    ),
    "FINGERPRINT_LOAD": (
        "include/phalanx/fingerprint.h",
        rf"value\.rest = words_\[1\]\.load\({ORDER}\)",
    ),
    "STEP_STORE": ("src/group.cpp", rf"own\.step\.store\(step, {ORDER}\)"),
    "STEP_LOAD": (
        "src/group.cpp",
        rf"ready = \[&\] {{ return control\.step\.load\({ORDER}\) >= target",
    ),
    "SLOT_STORE": ("src/channel.cpp", rf"slot\.number\.store\(\+\+sent_, {ORDER}\)"),
    "SLOT_LOAD": ("src/channel.cpp", rf"number\.load\({ORDER}\) == taken \+ 1"),
    "TAKEN_STORE": ("src/channel.cpp", rf"channel_\.taken\.store\(taken, {ORDER}\)"),
    "TAKEN_LOAD": ("src/channel.cpp", rf"taken_ = channel_\.taken\.load\({ORDER}\)"),
    "HEAD_BEGIN": ("src/channel.cpp", rf"\(moved\);\n    channel_\.head\.store\(head_, {ORDER}\)"),
    "HEAD_STORE": (
        "src/channel.cpp",
        rf"notify_peer\.\n    channel_\.head\.store\(head_, {ORDER}\)",
    ),
    "HEAD_LOAD": ("src/channel.cpp", rf"head_ = channel_\.head\.load\({ORDER}\)"),
    "TAIL_STORE": ("src/channel.cpp", rf"channel_\.tail\.store\(tail_, {ORDER}\)"),
    "TAIL_LOAD": ("src/channel.cpp", rf"tail_ = channel_\.tail\.load\({ORDER}\)"),
    "FRAME_STORE": ("src/flight_recorder.cpp", rf"frame_\.store\(value\.number, {ORDER}\)"),
    "WORD_STORE": ("src/flight_recorder.cpp", rf"words_\[i\]\.store\(words\[i\], {ORDER}\)"),
    "WORD_LOAD": ("src/flight_recorder.cpp", rf"words\[i\] = words_\[i\]\.load\({ORDER}\)"),
    "FRAME_LOAD": ("src/flight_recorder.cpp", rf"value\.number == frame_\.load\({ORDER}\)"),
    "ROW_CHECK": ("src/rows_access.h", rf"words\[k\] = lock_of\(rows\[k\]\)\.load\({ORDER}\)"),
    "ROW_CHECK_AGAIN": ("src/rows_access.h", rf"now = lock_of\(rows\[k\]\)\.load\({ORDER}\)"),
    "ROW_LOAD": ("src/rows_access.h", rf"word = from\[i\]\.load\({ORDER}\)"),
    "ROW_STORE": ("src/rows_access.h", rf"\[at / sizeof word\]\.store\(word, {ORDER}\)"),
    "ROW_ACQUIRE": ("src/rows_writers.cpp", rf"word_ \| \(slot_ \+ 1\), {ORDER}\)"),
    "ROW_RELEASE": (
        "src/rows_writers.cpp",
        rf"lock\(row_\)\.store\(next_version\(word_\), {ORDER}\)",
    ),
    "LEASE_BEGIN": ("src/leases.cpp", rf"last = word\.load\({ORDER}\)"),
    "LEASE_FINISH": ("src/leases.cpp", rf"store\(word_of\(lease\.number, state\), {ORDER}\)"),
    "LEASE_TAKE": ("src/leases.cpp", rf"words\[block\]\.load\({ORDER}\);\n  if"),
    "LEASE_WAIT": ("src/leases.cpp", rf"words\[block\]\.load\({ORDER}\);\n    return"),
    "LEASE_RETURN": ("src/leases.cpp", rf"compare_exchange_strong\(word, freed, {ORDER}"),
}


class MissingAccessError(Exception):
    """An access of the models is missing in the sources."""


def orders_in(native: Path) -> dict[str, str]:
    """Return the order of every access, as it is in the sources below `native`."""
    orders = {}
    for name, (file, pattern) in ACCESSES.items():
        found = re.findall(pattern, (native / file).read_text())
        if len(found) != 1:
            raise MissingAccessError(
                f"{file}: {name} is found {len(found)} times, expected once. The source has "
                f"changed: check that the models still describe it, and adapt {__name__}.py"
            )
        orders[name] = found[0]
    return orders
