"""The memory orders that the models are checked with, read from the sources of the core.

So a model is about the orders that stand in the code: who weakens one is told by `make model`.
"""

import re
from pathlib import Path

ORDER = r"std::memory_order_(\w+)"

# Name in the models: file, and the one place in it.
PLACES = {
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
    "HEAD_STORE": ("src/mailbox_traffic.cpp", rf"channel\.head\.store\(head \+ moved, {ORDER}\)"),
    "HEAD_LOAD": ("src/mailbox_traffic.cpp", rf"head = channel\.head\.load\({ORDER}\);\n    if"),
    "TAIL_STORE": ("src/mailbox_traffic.cpp", rf"channel\.tail\.store\(tail \+ moved, {ORDER}\)"),
    "TAIL_LOAD": (
        "src/mailbox_traffic.cpp",
        rf"tail = channel\.tail\.load\({ORDER}\);\n    const std::size_t room",
    ),
    "FRAME_STORE": ("src/flight_recorder.cpp", rf"framed_\.store\(value\.number, {ORDER}\)"),
    "WORD_STORE": ("src/flight_recorder.cpp", rf"words_\[i\]\.store\(words\[i\], {ORDER}\)"),
    "WORD_LOAD": ("src/flight_recorder.cpp", rf"words\[i\] = words_\[i\]\.load\({ORDER}\)"),
    "FRAME_LOAD": ("src/flight_recorder.cpp", rf"value\.number == framed_\.load\({ORDER}\)"),
    "ROW_LOOK": ("src/rows_access.h", rf"words\[k\] = lock_of\(rows\[k\]\)\.load\({ORDER}\)"),
    "ROW_LOOK_AGAIN": ("src/rows_access.h", rf"now = lock_of\(rows\[k\]\)\.load\({ORDER}\)"),
    "ROW_READ": ("src/rows_access.h", rf"word = from\[i\]\.load\({ORDER}\)"),
    "ROW_PUT": ("src/rows_access.h", rf"\[at / sizeof word\]\.store\(word, {ORDER}\)"),
    "ROW_TAKE": ("src/rows_writers.cpp", rf"word_ \| \(place_ \+ 1\), {ORDER}\)"),
    "ROW_FREE": (
        "src/rows_writers.cpp",
        rf"lock\(row_\)\.store\(next_version\(word_\), {ORDER}\)",
    ),
}


class MissingAccessError(Exception):
    """The sources no longer have an access that the models are about."""


def orders_in(native: Path) -> dict[str, str]:
    """The order of every access of PLACES, as it stands in the sources below `native`."""
    orders = {}
    for name, (file, pattern) in PLACES.items():
        found = re.findall(pattern, (native / file).read_text())
        if len(found) != 1:
            raise MissingAccessError(
                f"{file}: {name} is found {len(found)} times, expected once. The source has "
                f"changed: see that the models still say what it does, and adapt {__name__}.py"
            )
        orders[name] = found[0]
    return orders
