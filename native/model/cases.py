"""The cases: each model with its parameters and the expected result.

A case that `holds` is searched to the end. All other cases are known to be wrong, and the search
must find the error: a model that cannot fail proves nothing.
"""

import re
from dataclasses import dataclass
from itertools import product

HOLDS = "holds"
ASSERTION = "assertion violated"
HANGS = "invalid end state"


@dataclass(frozen=True)
class Case:
    model: str
    defines: tuple[str, ...]
    expected: str = HOLDS
    # Skipped in the short run.
    long: bool = False

    @property
    def name(self) -> str:
        shown = [each for each in self.defines if not re.match("VALUES=|.*=0$", each)]
        return " ".join([self.model, *shown])


# Small enough to find each error at once. VALUES bounds the number of values of a location; an
# assertion fails if it is too small.
WAITING = ("PHASES=0", "RANKS=2", "ROUNDS=2", "VALUES=20", "DEATHS=0", "SPURIOUS=0")
WAITING_SPURIOUS = (*WAITING[:5], "SPURIOUS=1")
WAITING_PHASES = ("PHASES=1", "RANKS=2", "ROUNDS=1", "VALUES=20", "DEATHS=0", "SPURIOUS=0")
WAITING_ONE_SIDED = ("PHASES=2", *WAITING_PHASES[1:])
WAITING_DEATH = ("PHASES=0", "RANKS=2", "ROUNDS=1", "VALUES=20", "DEATHS=1", "SPURIOUS=0")
ENTRY = ("WINDOW=2", "ROUNDS=4", "VALUES=6")
SLOTS = ("MESSAGES=2", "SLOTS=1", "PIECES=0", "CAPACITY=1", "VALUES=20", "DEATHS=0", "SPURIOUS=0")
SLOTS_DEATH = (*SLOTS[:5], "DEATHS=1", "SPURIOUS=0")
PIECES = ("MESSAGES=1", "SLOTS=1", "PIECES=2", *SLOTS[3:])
PIECES_DEATH = ("MESSAGES=1", "SLOTS=1", "PIECES=2", *SLOTS_DEATH[3:])
RECORD = ("RECORDS=4", "VALUES=9")
ROW = ("DEATHS=0", "VALUES=8")
ROW_DEATH = ("DEATHS=1", "VALUES=8")
LEASE = ("DEATHS=0", "DEPARTURES=0", "VALUES=11")
LEASE_DEATH = ("DEATHS=1", "DEPARTURES=0", "VALUES=11")
LEASE_LEFT = ("DEATHS=0", "DEPARTURES=1", "VALUES=11")

# The operations of collective.pml.
SMALL, MOVE_ONE, MOVE_ALL, REDUCE, EXCHANGE, ZERO_COPY = range(1, 7)


def collective(
    ranks: int,
    *operations: int,
    deaths: int = 0,
    timeouts: int = 0,
    mismatches: int = 0,
    chunks: int = 3,
) -> tuple[str, ...]:
    padded = (*operations, SMALL, SMALL)[:3]
    return (
        f"RANKS={ranks}",
        f"OPS={len(operations)}",
        *(f"OP{number}={operation}" for number, operation in enumerate(padded, 1)),
        f"CHUNKS={chunks}",
        f"DEATHS={deaths}",
        f"TIMEOUTS={timeouts}",
        f"MISMATCHES={mismatches}",
    )


def correct_cases() -> list[Case]:
    cases = [
        Case("waiting", WAITING),
        Case("waiting", WAITING_SPURIOUS, long=True),
        Case("waiting", WAITING_PHASES),
        Case("waiting", WAITING_ONE_SIDED),
        Case("waiting", WAITING_DEATH),
        Case("entry", ENTRY),
        Case("channel", SLOTS),
        Case("channel", SLOTS_DEATH),
        Case("channel", PIECES),
        Case("channel", PIECES_DEATH),
        Case("mailbox_lock", ()),
        Case("record", RECORD),
        Case("record", (*RECORD, "CLEARED")),
        Case("row", ROW),
        Case("row", ROW_DEATH),
        Case("row", ("DEATHS=2", "VALUES=8")),
        Case("lease", LEASE),
        Case("lease", LEASE_DEATH),
        Case("lease", LEASE_LEFT),
        Case("lease", ("DEATHS=1", "DEPARTURES=1", "VALUES=11"), long=True),
        # Accesses that need not be seq_cst: see README.
        Case("waiting", (*WAITING, "SLEEPERS_SUB=relaxed")),
        Case("waiting", (*WAITING, "TICKET_LOAD=relaxed")),
        Case("waiting", (*WAITING, "TICKET_ADD=relaxed")),
    ]
    for operation in range(SMALL, ZERO_COPY + 1):
        cases += [
            Case("collective", collective(2, operation, operation, SMALL, deaths=1)),
            Case("collective", collective(2, operation, operation, SMALL, timeouts=1), long=True),
            Case("collective", collective(3, operation, SMALL, deaths=1, chunks=2), long=True),
            Case("collective", collective(3, operation, operation, chunks=2), long=True),
        ]
    return [
        *cases,
        Case("collective", collective(2, SMALL, ZERO_COPY, SMALL, mismatches=1, timeouts=1)),
        Case("collective", collective(3, SMALL, SMALL, mismatches=1)),
        Case("collective", collective(3, SMALL, SMALL, deaths=2), long=True),
        Case("collective", collective(3, SMALL, SMALL, mismatches=1, deaths=1), long=True),
        Case("collective", (*collective(3, SMALL, deaths=1), "LATE")),
    ]


def wrong_orders() -> list[Case]:
    """Return each access with an order that is too weak for it."""
    waiting = {
        "STEP_STORE": "release relaxed",
        "STEP_LOAD": "acquire relaxed",
        "SLEEPERS_ADD": "acq_rel relaxed",
        "SLEEPERS_LOAD": "acquire relaxed",
    }
    channel = {
        "HEAD_STORE": "release relaxed",
        "HEAD_LOAD": "acquire relaxed",
        "TAIL_STORE": "release relaxed",
        "TAIL_LOAD": "acquire relaxed",
    }
    cases = []
    for model, base, table in (("waiting", WAITING, waiting), ("channel", CHANNEL, channel)):
        for access, orders in table.items():
            for order in orders.split():
                # Without release and acquire, data are wrong; a tail publishes none. Without
                # seq_cst, a wake-up is lost.
                data = order == "relaxed" and access in {
                    "STEP_STORE",
                    "STEP_LOAD",
                    "HEAD_STORE",
                    "HEAD_LOAD",
                }
                expected = ASSERTION if data else HANGS
                cases.append(Case(model, (*base, f"{access}={order}"), expected))
    for access, order in product(("WORD_STORE", "WORD_LOAD"), ("relaxed",)):
        cases.append(Case("record", (*RECORD, f"{access}={order}"), ASSERTION))
    for access, order in (
        *product(
            ("ROW_CHECK", "ROW_LOAD", "ROW_STORE", "ROW_ACQUIRE", "ROW_RELEASE"), ("relaxed",)
        ),
        ("ROW_ACQUIRE", "release"),
    ):
        cases.append(Case("row", (*ROW, f"{access}={order}"), ASSERTION))
    leases = "LEASE_BEGIN", "LEASE_FINISH", "LEASE_TAKE", "LEASE_WAIT", "LEASE_RETURN"
    return cases + [Case("lease", (*LEASE, f"{each}=relaxed"), ASSERTION) for each in leases]


def wrong_steps() -> list[Case]:
    """Return the cases in which a step is missing or comes too early."""
    plain = collective(2, SMALL, SMALL, SMALL)
    mixed = collective(2, SMALL, ZERO_COPY, SMALL)
    death = collective(2, SMALL, SMALL, SMALL, deaths=1)
    timeout = collective(2, SMALL, SMALL, SMALL, timeouts=1)
    timeouts = collective(2, SMALL, SMALL, SMALL, timeouts=2)
    differing = collective(2, SMALL, SMALL, SMALL, mismatches=1)

    def large(operation: int) -> tuple[str, ...]:
        return collective(2, operation, operation, SMALL)

    return [
        Case("waiting", (*WAITING, "NO_TICKET"), HANGS),
        Case("waiting", (*WAITING, "NO_WAKE"), HANGS),
        Case("waiting", (*WAITING, "NOTIFY_FIRST"), HANGS),
        Case("waiting", (*WAITING, "NO_CHECK_BEFORE_SLEEP"), HANGS),
        Case("waiting", (*WAITING_DEATH, "NO_LAST_CHECK"), ASSERTION),
        Case("channel", (*CHANNEL, "HEAD_FIRST"), ASSERTION),
        Case("channel", (*CHANNEL, "TAIL_FIRST"), ASSERTION),
        Case("channel", (*CHANNEL, "NO_NOTIFY_FOR_BYTES"), HANGS),
        Case("channel", (*CHANNEL, "NO_NOTIFY_FOR_SPACE"), HANGS),
        Case("channel", (*CHANNEL_DEATH, "NO_LAST_CHECK"), ASSERTION),
        Case("mailbox_lock", ("NO_MISSED",), HANGS),
        Case("mailbox_lock", ("NO_NOTIFY_AFTER_UNLOCK",), HANGS),
        Case("mailbox_lock", ("NO_SECOND_TRY",), HANGS),
        Case("record", (*RECORD, "FRAME_LAST"), ASSERTION),
        Case("row", (*ROW, "NO_SECOND_CHECK"), ASSERTION),
        Case("row", (*ROW, "LOCKED_ROW_IS_READ"), ASSERTION),
        Case("row", (*ROW, "VERSION_STAYS"), ASSERTION),
        Case("row", (*ROW, "RELEASED_FIRST"), ASSERTION),
        Case("row", (*ROW_DEATH, "SAVED_FIRST"), ASSERTION),
        Case("row", (*ROW_DEATH, "NOT_RESTORED"), ASSERTION),
        Case("lease", (*LEASE, "NOT_FREE_IS_LEASED"), ASSERTION),
        Case("lease", (*LEASE, "FINISHED_FIRST"), ASSERTION),
        Case("lease", (*LEASE, "NOT_MARKED_UNWRITTEN"), HANGS),
        Case("lease", (*LEASE_LEFT, "ANY_LEASE_ENDS"), ASSERTION),
        Case("lease", (*LEASE_DEATH, "NO_LAST_CHECK"), ASSERTION),
        Case("collective", (*plain, "ONE_INLINE_BUFFER"), ASSERTION),
        Case("collective", (*mixed, "ONE_FINGERPRINT"), ASSERTION),
        Case("collective", (*plain, "FINGERPRINT_AFTER_STEP"), ASSERTION),
        Case("collective", (*timeout, "NO_PREPARE"), ASSERTION),
        Case("collective", (*death, "NO_LAST_CHECK"), ASSERTION),
        Case("collective", (*death, "NO_PROCESS_CHECK"), HANGS),
        Case("collective", (*timeouts, "ABORT_STORES"), ASSERTION),
        Case("collective", (*timeout, "WORD_BEFORE_FINGERPRINTS"), ASSERTION),
        Case("collective", (*differing, "NO_COMPARE"), ASSERTION),
        Case("collective", (*collective(3, SMALL, deaths=1), "LATE", "AWAIT_ONLY_PEER"), HANGS),
        Case("collective", (*large(MOVE_ONE), "PRODUCE_EARLY"), ASSERTION),
        Case("collective", (*large(MOVE_ALL), "CONSUME_EARLY"), ASSERTION),
        Case("collective", (*large(MOVE_ALL), "ONE_STAGING_PLACE"), ASSERTION),
        Case("collective", (*large(EXCHANGE), "ONE_STAGING_PLACE"), ASSERTION),
        Case("collective", (*large(REDUCE), "COMBINE_EARLY"), ASSERTION),
        Case("collective", (*large(REDUCE), "COPY_OUT_EARLY"), ASSERTION),
        Case("collective", (*large(ZERO_COPY), "NO_EXIT_BARRIER"), ASSERTION),
    ]


CASES = [*correct_cases(), *wrong_orders(), *wrong_steps()]
