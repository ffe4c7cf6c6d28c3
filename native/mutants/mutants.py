"""The mutants: one mistake each, somebody's slip of tomorrow, and who must find it.

Texts are replaced where they stand exactly once. A mutant that no longer applies fails the check
that runs with the tests: then the source has changed, and the mutant has to follow.
"""

from mutant import Mutant
from row_mutants import ROWS

GROUP = "src/group.cpp"
WAIT = "src/wait.cpp"
WAIT_H = "include/phalanx/wait.h"
SEGMENT = "src/segment.cpp"
PIPELINE = "src/collectives/pipeline.h"
REDUCTION = "src/collectives/reduction.cpp"
DIRECT = "src/collectives/direct.h"
TRAFFIC = "src/mailbox_traffic.cpp"
HOLD = "src/mailbox_hold.h"
BOX = "src/flight_recorder.cpp"

# What finds them: a test, plain or under ThreadSanitizer, or a case of the models.
WAITING_MODEL = "model:waiting RANKS=2 MEETINGS=2"
CHANNEL_MODEL = "model:channel ROOM=1 PIECES=2"
RECORD_MODEL = "model:record RECORDS=4"
TSAN_COLLECTIVES = "thread:test_collectives"
TSAN_MAILBOX = "thread:test_mailbox"


def weaker(name: str, file: str, caught_by: str, access: str, order: str) -> Mutant:
    """Another memory order for an access whose text stops before the order."""
    old = f"{access}std::memory_order_seq_cst)"
    return Mutant(name, file, caught_by, ((old, f"{access}std::memory_order_{order})"),))


ORDERS = [
    weaker("step stored relaxed", GROUP, TSAN_COLLECTIVES, "store(++step_, ", "relaxed"),
    weaker(
        "step stored with release",
        GROUP,
        WAITING_MODEL,
        "store(++step_, ",
        "release",
    ),
    weaker(
        "step loaded relaxed",
        GROUP,
        TSAN_COLLECTIVES,
        "ready = [&] { return control.step.load(",
        "relaxed",
    ),
    weaker(
        "step loaded with acquire",
        GROUP,
        WAITING_MODEL,
        "ready = [&] { return control.step.load(",
        "acquire",
    ),
    weaker(
        "sleeper announced with acq_rel",
        WAIT_H,
        WAITING_MODEL,
        "fetch_add(1, ",
        "acq_rel",
    ),
    weaker(
        "sleepers loaded with acquire",
        WAIT,
        WAITING_MODEL,
        "sleepers.load(",
        "acquire",
    ),
    weaker(
        "head stored with release",
        TRAFFIC,
        CHANNEL_MODEL,
        "store(head + moved, ",
        "release",
    ),
    weaker("head stored relaxed", TRAFFIC, TSAN_MAILBOX, "store(head + moved, ", "relaxed"),
    weaker(
        "tail stored with release",
        TRAFFIC,
        CHANNEL_MODEL,
        "store(tail + moved, ",
        "release",
    ),
    weaker("tail stored relaxed", TRAFFIC, TSAN_MAILBOX, "store(tail + moved, ", "relaxed"),
]

WAITING = [
    Mutant(
        "notify before the step",
        GROUP,
        "plain:test_steps",
        (
            (
                "(++step_, std::memory_order_seq_cst);\n  notify(own.stepped);\n",
                "(++step_, std::memory_order_seq_cst);\n",
            ),
            (
                '  PHALANX_STEP("advance: publish the step");\n',
                '  notify(own.stepped);\n  PHALANX_STEP("advance: publish the step");\n',
            ),
        ),
    ),
    Mutant(
        "no wake-up",
        WAIT,
        "plain:test_wait",
        (("  futex(event.ticket, FUTEX_WAKE, INT_MAX, nullptr);\n", ""),),
    ),
    Mutant("one is woken", WAIT, "plain:test_wait", (("FUTEX_WAKE, INT_MAX", "FUTEX_WAKE, 1"),)),
    Mutant(
        "ticket not changed",
        WAIT,
        "plain:test_steps",
        (("  event.ticket.fetch_add(1, std::memory_order_seq_cst);\n", ""),),
    ),
    Mutant(
        "no look before sleep",
        WAIT_H,
        "plain:test_steps",
        (("    done = ready();\n", "    done = false;\n"),),
    ),
    Mutant(
        "ticket read after the look",
        WAIT_H,
        "plain:test_steps",
        (
            (
                """    PHALANX_STEP("wait: read the ticket");
    const auto seen = event.ticket.load(std::memory_order_seq_cst);
    PHALANX_STEP("wait: look again");
    done = ready();
""",
                """    PHALANX_STEP("wait: look again");
    done = ready();
    PHALANX_STEP("wait: read the ticket");
    const auto seen = event.ticket.load(std::memory_order_seq_cst);
""",
            ),
        ),
    ),
    Mutant(
        "no last look",
        WAIT_H,
        "plain:test_steps",
        (
            (
                "      if (!ready()) {\n        return status;\n      }\n      break;\n",
                "      return status;\n",
            ),
        ),
    ),
    Mutant(
        "leaves without waking",
        GROUP,
        "plain:test_steps",
        (("  if (!wake) {\n", "  if (true) {\n"),),
    ),
]

MEETING = [
    Mutant(
        "fingerprint after the step",
        GROUP,
        "plain:test_group",
        (
            (
                "  segment_->control(rank_).fingerprints[meetings_ & 1].store(own);\n"
                "  advance();\n",
                "  advance();\n"
                "  segment_->control(rank_).fingerprints[meetings_ & 1].store(own);\n",
            ),
        ),
    ),
    Mutant(
        "nothing compared", GROUP, "plain:test_group", (("if (theirs != own) {", "if (false) {"),)
    ),
    Mutant(
        "parts of a composed operation count",
        "src/group_record.cpp",
        "plain:test_compose",
        (("  composed_ = status.ok();\n", "  composed_ = false;\n"),),
    ),
    Mutant(
        "a recv is not taken back",
        "src/mailbox.cpp",
        "plain:test_compose",
        (("  taken->name_ = name;\n  finish(taken, {});\n", "  taken->name_ = name;\n"),),
    ),
    Mutant(
        "no message comes from elsewhere",
        "src/mailbox.cpp",
        "plain:test_compose",
        ((" && !foreign_ ? last", " ? last"),),
    ),
    Mutant(
        "one fingerprint",
        GROUP,
        "plain:test_collectives",
        (
            ("fingerprints[meetings_ & 1].store", "fingerprints[0].store"),
            ("fingerprints[meetings_ & 1].load", "fingerprints[0].load"),
        ),
    ),
    Mutant(
        "one inline buffer",
        SEGMENT,
        TSAN_COLLECTIVES,
        (("static_cast<std::size_t>(rank) + (sequence & 1)", "static_cast<std::size_t>(rank)"),),
    ),
    Mutant(
        "a broken group is written to",
        GROUP,
        "plain:test_group",
        (
            (
                "    return refuse(own, bounds, status);\n  }\n  if (!staging",
                "    (void)refuse(own, bounds, status);\n  }\n  if (!staging",
            ),
        ),
    ),
]

LARGE = [
    Mutant(
        "one staging place",
        SEGMENT,
        TSAN_COLLECTIVES,
        (("start + (chunk & 1) * chunk_bytes()", "start + (chunk & 0) * chunk_bytes()"),),
    ),
    Mutant(
        "produced too early",
        PIPELINE,
        TSAN_COLLECTIVES,
        (("wait_step(peer, base + chunk, bounds)", "wait_step(peer, base + chunk - 1, bounds)"),),
    ),
    Mutant(
        "consumed too early",
        PIPELINE,
        "plain:test_collectives",
        (("wait_step(peer, base + chunk + 1, bounds)", "wait_step(peer, base + chunk, bounds)"),),
    ),
    Mutant(
        "copied out too early",
        REDUCTION,
        TSAN_COLLECTIVES,
        (("base + 2 * chunk + (last ? 2 : 3)", "base + 2 * chunk + (last ? 1 : 2)"),),
    ),
    Mutant(
        "no parting",
        DIRECT,
        TSAN_COLLECTIVES,
        (
            (
                "  return group.wait_steps(group.step(), bounds);\n",
                "  (void)bounds;\n  return {};\n",
            ),
        ),
    ),
]

FAILING = [
    Mutant(
        "abort wakes nobody",
        GROUP,
        "plain:test_steps",
        (
            ("      notify_always(segment_->control(rank).stepped);\n", ""),
            ("      notify_always(segment_->control(rank).bell);\n", ""),
        ),
    ),
    Mutant(
        "the last failure wins",
        GROUP,
        "plain:test_steps",
        (
            (
                "if (word.compare_exchange_strong(none, pack(why, rank_), "
                "std::memory_order_seq_cst)) {",
                "word.store(pack(why, rank_));\n  if (none == 0) {",
            ),
        ),
    ),
    Mutant(
        "abort word before what it tells",
        GROUP,
        "plain:test_steps",
        (
            ("  own.trouble[0].store(why.mine);\n  own.trouble[1].store(why.theirs);\n", ""),
            (
                '    PHALANX_STEP("abort: wake all");\n',
                '    PHALANX_STEP("abort: wake all");\n'
                "    own.trouble[0].store(why.mine);\n    own.trouble[1].store(why.theirs);\n",
            ),
        ),
    ),
    Mutant(
        "no look at processes",
        GROUP,
        "plain:test_kills",
        (("failing || (ended && presence != Presence::left);", "failing || (ended && false);"),),
    ),
    Mutant(
        "no look at who left",
        GROUP,
        "plain:test_steps",
        (("presence.load(std::memory_order_seq_cst) == Presence::left) {", "pid.load() < 0) {"),),
    ),
    Mutant(
        "only who is waited for is looked at",
        GROUP,
        "plain:test_kills",
        (("{ return trouble_while_awaiting(peer); }", "{ return trouble_with(peer); }"),),
    ),
    Mutant(
        "the arena of a dead rank is an error of the system",
        GROUP,
        "plain:test_kills",
        (("if (lost(owner)) {", "if (false) {"),),
    ),
]

MESSAGES = [
    Mutant(
        "head before bytes",
        TRAFFIC,
        TSAN_MAILBOX,
        (
            (
                "    const std::size_t moved = move_out(message, channel, head, room);\n",
                "    channel.head.store(head + (room == 0 ? 0 : kLine));\n"
                "    const std::size_t moved = move_out(message, channel, head, room);\n",
            ),
        ),
    ),
    Mutant(
        "no bell for bytes",
        TRAFFIC,
        "plain:test_steps",
        (
            (
                "head + moved, std::memory_order_seq_cst);\n    notify(bell(peer));\n",
                "head + moved, std::memory_order_seq_cst);\n",
            ),
        ),
    ),
    Mutant(
        "no bell for room",
        TRAFFIC,
        "plain:test_steps",
        (
            (
                "tail + moved, std::memory_order_seq_cst);\n    notify(bell(peer));\n",
                "tail + moved, std::memory_order_seq_cst);\n",
            ),
        ),
    ),
    Mutant(
        "messages without a last look",
        "src/mailbox.cpp",
        "plain:test_steps",
        (
            (
                "if (const Status status = trouble(); status.ok() || drive()) {",
                "if (const Status status = trouble(); status.ok()) {",
            ),
        ),
    ),
    Mutant(
        "a try in vain is not told",
        HOLD,
        "plain:test_steps",
        (("      mailbox_.missed_.store(true, std::memory_order_seq_cst);\n", ""),),
    ),
]

RECORDS = [
    Mutant(
        "words of a record stored relaxed",
        BOX,
        RECORD_MODEL,
        (
            (
                "words_[i].store(words[i], std::memory_order_release)",
                "words_[i].store(words[i], std::memory_order_relaxed)",
            ),
        ),
    ),
]

MUTANTS = [*ORDERS, *WAITING, *MEETING, *LARGE, *FAILING, *MESSAGES, *RECORDS, *ROWS]
