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
WAITING = ("PHASES=0", "RANKS=2", "ROUNDS=1", "VALUES=20", "DEATHS=0", "SPURIOUS=0")
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


def agreement(ranks: int, *, deaths: int = 0, late: int = 0, failures: int = 0) -> tuple[str, ...]:
    return f"RANKS={ranks}", f"DEATHS={deaths}", f"LATE={late}", f"FAILURES={failures}"


def replication(
    trainers: int, updates: int, *, deaths: int = 0, suspicions: int = 0
) -> tuple[str, ...]:
    return (
        f"TRAINERS={trainers}",
        f"UPDATES={updates}",
        f"DEATHS={deaths}",
        f"SUSPICIONS={suspicions}",
    )


def references(workers: int, owner: int, steps: int, *, deaths: int = 0) -> tuple[str, ...]:
    return f"WORKERS={workers}", f"OWNER={owner}", f"STEPS={steps}", f"DEATHS={deaths}"


def newcomers(old: int, new: int, *, deaths: int = 0) -> tuple[str, ...]:
    return f"OLD={old}", f"NEW={new}", f"DEATHS={deaths}"


ANY = 255  # timeouts without a limit

# The operations of collective.pml.
SMALL, GIVE, STREAM, IN_PLACE, SLICED, PARTS, EXCHANGE, TREE = range(1, 9)


def collective(
    ranks: int,
    *operations: int,
    deaths: int = 0,
    timeouts: int = 0,
    mismatches: int = 0,
    runs_ahead: int = 0,
    chunks: int = 3,
) -> tuple[str, ...]:
    padded = (*operations, SMALL, SMALL)[:3]
    return (
        f"RANKS={ranks}",
        f"OPS={len(operations)}",
        *(f"OP{number}={operation}" for number, operation in enumerate(padded, 1)),
        f"CHUNKS={chunks}",
        f"RUNS_AHEAD={runs_ahead}",
        f"DEATHS={deaths}",
        f"TIMEOUTS={timeouts}",
        f"MISMATCHES={mismatches}",
    )


# With a window of two, every entry is compared before it is replaced.
DIFFERING_AHEAD = (
    *collective(2, GIVE, SMALL, SMALL, runs_ahead=1, mismatches=1),
    "WINDOW=3",
)


def correct_cases() -> list[Case]:
    cases = [
        Case("waiting", WAITING),
        Case("waiting", WAITING_SPURIOUS),
        Case("waiting", WAITING_PHASES),
        Case("waiting", WAITING_ONE_SIDED),
        Case("waiting", WAITING_DEATH),
        Case("entry", ENTRY),
        Case("channel", SLOTS),
        Case("channel", SLOTS_DEATH),
        Case("channel", PIECES),
        Case("channel", PIECES_DEATH, long=True),
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
        # While a rank may still die, no hang is found: hence every number of deaths.
        *(
            Case("agreement", agreement(ranks, deaths=deaths, late=late, failures=1))
            for ranks in (2, 3)
            for late in (0, 1, ANY)
            for deaths in range(ranks + 1)
        ),
        Case("agreement", (*agreement(3, deaths=2, late=ANY, failures=2), "ROUNDS=6")),
        *(
            Case("agreement", agreement(4, deaths=deaths, failures=failures), long=True)
            for deaths, failures in ((0, 0), (1, 0), (2, 0), (3, 0), (1, 1))
        ),
        Case("agreement", agreement(4, late=1), long=True),
        Case("agreement", agreement(4, deaths=1, late=1), long=True),
        *(
            Case("newcomers", newcomers(old, new, deaths=deaths))
            for old, new in ((1, 1), (1, 2), (2, 1), (2, 2))
            for deaths in range(3)
        ),
        *(
            Case("replication", replication(2, 2, deaths=deaths, suspicions=suspicions))
            for deaths in range(3)
            for suspicions in range(3)
        ),
        Case("replication", replication(1, 4, deaths=1, suspicions=2)),
        *(
            Case("references", references(workers, owner, steps, deaths=deaths))
            for workers, steps in ((2, 5), (3, 4))
            for owner in (0, 1)
            for deaths in (0, 1)
        ),
        Case("references", references(3, 1, 5, deaths=2), long=True),
        # Orders that may be weaker: see README.
        Case("waiting", (*WAITING, "SLEEPERS_SUB=relaxed")),
        Case("waiting", (*WAITING, "SLEEPERS_ADD=acq_rel")),
        Case("waiting", (*WAITING, "TICKET_ADD=release")),
    ]
    for operation in range(SMALL, EXCHANGE + 1):
        three = [operation] * 3
        cases += [
            Case("collective", collective(2, *three, runs_ahead=1)),
            Case("collective", collective(2, *three[1:], SMALL, runs_ahead=1, deaths=1)),
        ]
    return [
        *cases,
        Case("collective", collective(3, TREE, TREE)),
        Case("collective", (*collective(3, TREE, TREE), "STAR")),
        Case("collective", collective(3, TREE, deaths=1)),
        Case("collective", (*collective(3, TREE, deaths=1), "STAR")),
        Case("collective", collective(3, TREE, TREE, mismatches=1)),
        Case("collective", collective(3, TREE, GIVE, TREE, runs_ahead=1)),
        Case("collective", collective(2, TREE, GIVE, TREE, runs_ahead=1, mismatches=1)),
        Case("collective", collective(2, TREE, TREE, SMALL, deaths=1)),
        Case("collective", (*collective(3, SLICED), "CHAIN"), long=True),
        Case("collective", (*collective(2, SLICED, SLICED), "CHAIN")),
        Case("collective", (*collective(2, SLICED, deaths=1), "CHAIN")),
        Case("collective", DIFFERING_AHEAD),
        Case("collective", collective(2, SMALL, SLICED, SMALL, mismatches=1, timeouts=1)),
        Case("collective", collective(3, SMALL, SMALL, mismatches=1), long=True),
        Case("collective", (*collective(3, SMALL, deaths=1), "LATE")),
    ]


def wrong_orders() -> list[Case]:
    """Return each access with an order that is too weak for it."""
    # Without release and acquire, data are wrong; without the order of the handshake, a wake-up is
    # lost.
    table = [
        ("waiting", WAITING, ASSERTION, {"ENTRY_STORE": "relaxed", "ENTRY_LOAD": "relaxed"}),
        ("waiting", WAITING_PHASES, ASSERTION, {"STEP_STORE": "relaxed", "STEP_LOAD": "relaxed"}),
        (
            "waiting",
            WAITING,
            HANGS,
            {
                "SLEEPERS_ADD": "release relaxed",
                "SLEEPERS_READ": "acquire relaxed",
                "SLEEPERS_UNLOCK": "acquire relaxed",
                "TICKET_LOAD": "relaxed",
                "TICKET_ADD": "acquire relaxed",
            },
        ),
        ("channel", SLOTS, ASSERTION, {"SLOT_STORE": "relaxed", "SLOT_LOAD": "relaxed"}),
        (
            "channel",
            SLOTS,
            HANGS,
            {
                "SLOT_STORE": "release",
                "SLOT_LOAD": "acquire",
                "TAKEN_STORE": "release",
                "TAKEN_LOAD": "acquire",
                "SLEEPERS_ADD": "acq_rel",
                "SLEEPERS_LOAD": "acquire",
            },
        ),
        ("channel", PIECES, ASSERTION, {"HEAD_STORE": "relaxed", "HEAD_LOAD": "relaxed"}),
        (
            "channel",
            PIECES,
            HANGS,
            {
                "HEAD_STORE": "release",
                "HEAD_LOAD": "acquire",
                "TAIL_STORE": "release",
                "TAIL_LOAD": "acquire",
            },
        ),
        (
            "entry",
            ENTRY,
            ASSERTION,
            {
                "ENTRY_STORE": "relaxed",
                "ENTRY_HISTORY": "relaxed",
                "FINGERPRINT_STORE": "relaxed",
                "FINGERPRINT_LOAD": "relaxed",
                "LAST_HISTORY": "relaxed",
            },
        ),
    ]
    cases = [
        Case(model, (*base, f"{access}={order}"), expected)
        for model, base, expected, accesses in table
        for access, orders in accesses.items()
        for order in orders.split()
    ]
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
    death = collective(2, SMALL, SMALL, SMALL, deaths=1)
    timeout = collective(2, SMALL, SMALL, SMALL, timeouts=1)
    timeouts = collective(2, SMALL, SMALL, SMALL, timeouts=2)
    differing = collective(2, SMALL, SMALL, SMALL, mismatches=1)
    ahead = collective(2, GIVE, GIVE, GIVE, runs_ahead=1)

    def large(operation: int) -> tuple[str, ...]:
        return collective(2, operation, operation, SMALL, runs_ahead=1)

    return [
        Case("waiting", (*WAITING, "NO_TICKET"), HANGS),
        Case("waiting", (*WAITING, "NO_WAKE"), HANGS),
        Case("waiting", (*WAITING, "NOTIFY_FIRST"), HANGS),
        Case("waiting", (*WAITING, "NOTIFY_BY_LOAD"), HANGS),
        Case("waiting", (*WAITING, "NO_CHECK_BEFORE_SLEEP"), HANGS),
        Case("waiting", (*WAITING, "NO_NOTIFY_BEFORE_WAIT"), HANGS),
        Case("waiting", (*WAITING, "NO_NOTIFY_AT_UNLOCK"), HANGS),
        Case("waiting", (*WAITING_ONE_SIDED, "NOT_LONG"), HANGS),
        Case("waiting", (*WAITING_DEATH, "NO_LAST_CHECK"), ASSERTION),
        Case("entry", (*ENTRY, "DATA_LAST"), ASSERTION),
        Case("entry", (*ENTRY, "ENSURED_LATE"), ASSERTION),
        Case("entry", (*ENTRY, "NO_SECOND_CHECK"), ASSERTION),
        Case("channel", (*SLOTS, "SLOT_FIRST"), ASSERTION),
        Case("channel", (*SLOTS, "TAKEN_FIRST"), ASSERTION),
        Case("channel", (*SLOTS, "NO_NOTIFY_FOR_SLOT"), HANGS),
        Case("channel", (*SLOTS, "NO_NOTIFY_FOR_SLOTS"), HANGS),
        Case("channel", (*SLOTS_DEATH, "NO_LAST_CHECK"), ASSERTION),
        Case("channel", (*PIECES, "HEAD_FIRST"), ASSERTION),
        Case("channel", (*PIECES, "TAIL_FIRST"), ASSERTION),
        Case("channel", (*PIECES, "NO_NOTIFY_FOR_BYTES"), HANGS),
        Case("channel", (*PIECES, "NO_NOTIFY_FOR_SPACE"), HANGS),
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
        Case("newcomers", (*newcomers(2, 1, deaths=1), "INVITES_FIRST"), HANGS),
        Case("newcomers", (*newcomers(1, 2, deaths=1), "NO_CHECK_OF_NEWCOMERS"), HANGS),
        Case("newcomers", (*newcomers(1, 2, deaths=1), "NO_ABANDONING"), HANGS),
        Case("newcomers", (*newcomers(2, 1, deaths=1), "NO_FIRST_COLLECTIVE"), ASSERTION),
        Case("replication", (*replication(1, 2, suspicions=2), "WITHOUT_STORE"), ASSERTION),
        Case("replication", (*replication(1, 1, deaths=1), "ANSWERS_EARLY"), ASSERTION),
        Case("replication", (*replication(1, 2, deaths=1), "WITHOUT_TOKENS"), ASSERTION),
        Case("replication", (*replication(1, 2, suspicions=1), "MAKES_LATE_CHANGES"), ASSERTION),
        *(
            Case("references", (*references(2, owner, 3), mistake), ASSERTION)
            for owner in (0, 1)
            for mistake in ("FREED_BEFORE_CREATION", "ANY_ORDER", "NOTHING_KEPT")
        ),
        Case("references", (*references(3, 0, 3, deaths=1), "DEATH_FIRST"), ASSERTION),
        Case("agreement", (*agreement(2, late=1), "OVERWRITTEN"), ASSERTION),
        Case("agreement", (*agreement(2, late=1), "EXCLUDED_BY_ONE"), ASSERTION),
        Case("agreement", (*agreement(2, late=1), "GOES_ON_EXCLUDED"), ASSERTION),
        Case("agreement", (*agreement(2), "NO_GROUP_FORMED"), ASSERTION),
        Case("agreement", (*agreement(3, deaths=1), "STRANDED_JOINS"), ASSERTION),
        Case("agreement", (*agreement(3, deaths=1), "STRANDED_COUNT"), ASSERTION),
        Case("agreement", (*agreement(2, deaths=1), "NO_CHECK_FOR_DEATHS"), HANGS),
        Case("agreement", (*agreement(2, deaths=1), "PUBLISHED_LATE"), HANGS),
        Case("agreement", (*agreement(2, late=ANY), "PUBLISHED_LATE"), ASSERTION),
        Case("agreement", (*agreement(2, late=ANY), "NO_DECISION_ON_THE_CREATOR"), ASSERTION),
        Case("agreement", (*agreement(2, deaths=1), "ONE_LOOK"), ASSERTION),
        Case("agreement", (*agreement(3, late=1), "ONE_LOOK"), ASSERTION),
        Case("agreement", (*agreement(2, failures=1), "EXCLUDED_CREATOR_AWAITED"), HANGS),
        Case("agreement", (*agreement(2, failures=1), "GIVES_UP_SILENTLY"), HANGS),
        Case("agreement", (*agreement(3, deaths=2), "ROUNDS=5"), ASSERTION),
        Case("collective", (*plain, "ONE_ENTRY"), HANGS),
        Case("collective", (*plain, "ENTRY_BEFORE_DATA"), ASSERTION),
        Case("collective", (*ahead, "NO_ENSURE_ENTERED"), ASSERTION),
        Case("collective", (*death, "NO_LAST_CHECK"), ASSERTION),
        Case("collective", (*death, "NO_PROCESS_CHECK"), HANGS),
        Case("collective", (*timeouts, "ABORT_STORES"), ASSERTION),
        Case("collective", (*timeout, "WORD_BEFORE_FINGERPRINTS"), ASSERTION),
        Case("collective", (*differing, "NO_COMPARE"), ASSERTION),
        Case("collective", (*DIFFERING_AHEAD, "NO_HISTORY"), ASSERTION),
        Case("collective", (*collective(3, SMALL, deaths=1), "LATE", "AWAIT_ONLY_PEER"), HANGS),
        Case("collective", (*large(STREAM), "NO_ENSURE_FINISHED"), ASSERTION),
        Case("collective", (*large(STREAM), "DONE_AT_ENTRY"), ASSERTION),
        Case("collective", (*large(STREAM), "CREDIT_EARLY"), ASSERTION),
        Case("collective", (*large(STREAM), "TAKE_EARLY"), ASSERTION),
        Case("collective", (*large(IN_PLACE), "NO_WAIT_FOR_TAKERS"), ASSERTION),
        Case("collective", (*large(PARTS), "WAIT_FOR_NEXT_ENTRY"), HANGS),
        Case("collective", (*large(PARTS), "TAKE_EARLY"), ASSERTION),
        Case("collective", (*large(PARTS), "ONE_PLACE"), ASSERTION),
        Case("collective", (*large(SLICED), "COPY_OUT_EARLY"), ASSERTION),
        Case("collective", (*large(SLICED), "COPY_OUT_EARLY", "CHAIN"), ASSERTION),
        Case("collective", (*large(SLICED), "BEGIN_EARLY", "CHAIN"), ASSERTION),
        Case("collective", (*large(SLICED), "NO_WAIT_FOR_LATE"), ASSERTION),
        Case("collective", (*large(SLICED), "NO_EXIT_BARRIER"), ASSERTION),
        Case("collective", (*large(EXCHANGE), "NO_SWAP"), ASSERTION),
        Case("collective", (*collective(3, TREE), "PASS_UP_EARLY"), ASSERTION),
        Case("collective", (*collective(3, TREE), "PASS_DOWN_EARLY"), ASSERTION),
        Case("collective", (*large(TREE), "NO_ENSURE_FINISHED"), ASSERTION),
        Case("collective", (*collective(3, TREE, mismatches=1), "NO_COMPARE"), ASSERTION),
    ]


CASES = [*correct_cases(), *wrong_orders(), *wrong_steps()]
