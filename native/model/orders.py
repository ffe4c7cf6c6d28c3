"""The memory orders of the models, read from the sources of the core.

The models are checked with the orders in the code: `make model` fails if one is weakened.
"""

import re
from pathlib import Path

ORDER = r"std::memory_order_(\w+)"

# Name in the models: the file, and a pattern that matches exactly once.
ACCESSES = {
    "STEP_STORE": ("src/group.cpp", rf"own\.step\.store\(\+\+step_, {ORDER}\)"),
    "STEP_LOAD": (
        "src/group.cpp",
        rf"ready = \[&\] {{ return control\.step\.load\({ORDER}\) >= target",
    ),
    "SLEEPERS_ADD": ("include/phalanx/wait.h", rf"event\.sleepers\.fetch_add\(1, {ORDER}\)"),
    "SLEEPERS_SUB": ("include/phalanx/wait.h", rf"event\.sleepers\.fetch_sub\(1, {ORDER}\)"),
    "TICKET_LOAD": ("include/phalanx/wait.h", rf"seen = event\.ticket\.load\({ORDER}\)"),
    "SLEEPERS_LOAD": ("src/wait.cpp", rf"if \(event\.sleepers\.load\({ORDER}\) != 0\)"),
    "TICKET_ADD": ("src/wait.cpp", rf"event\.ticket\.fetch_add\(1, {ORDER}\)"),
    "HEAD_STORE": ("src/mailbox.cpp", rf"channel\.head\.store\(head \+ moved, {ORDER}\)"),
    "HEAD_LOAD": ("src/mailbox.cpp", rf"head = channel\.head\.load\({ORDER}\);\n    if"),
    "TAIL_STORE": ("src/mailbox.cpp", rf"channel\.tail\.store\(tail \+ moved, {ORDER}\)"),
    "TAIL_LOAD": (
        "src/mailbox.cpp",
        rf"tail = channel\.tail\.load\({ORDER}\);\n    const std::size_t room",
    ),
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
