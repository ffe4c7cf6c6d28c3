"""The mutants: one plausible mistake each, and the test or model that must find it.

A mutant replaces texts that occur exactly once. A mutant that no longer applies fails a check that
runs with the tests. Then the source has changed, and the mutant must follow.
"""

from lease_mutants import LEASE_MUTANTS
from mutant import Mutant
from row_mutants import ROWS

GROUP = "src/group.cpp"
WAIT = "src/wait.cpp"
WAIT_H = "include/phalanx/wait.h"
SEGMENT = "src/segment.cpp"
PIPELINE = "src/collectives/pipeline.h"
REDUCTION = "src/collectives/reduction.cpp"
ZERO_COPY = "src/collectives/zero_copy.h"
MAILBOX = "src/mailbox.cpp"
RECORDER = "src/flight_recorder.cpp"

# Detectors: a test, plain or under ThreadSanitizer, or a case of the models.
WAITING_MODEL = "model:waiting RANKS=2 ROUNDS=2"
CHANNEL_MODEL = "model:channel CAPACITY=1 PIECES=2"
RECORD_MODEL = "model:record RECORDS=4"
TSAN_COLLECTIVES = "thread:test_collectives"
TSAN_MAILBOX = "thread:test_mailbox"


def weaker(name: str, file: str, caught_by: str, access: str, order: str) -> Mutant:
    """Weaken the memory order of an access, given by the text before the order."""
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
        MAILBOX,
        CHANNEL_MODEL,
        "store(head + moved, ",
        "release",
    ),
    weaker("head stored relaxed", MAILBOX, TSAN_MAILBOX, "store(head + moved, ", "relaxed"),
    weaker(
        "tail stored with release",
        MAILBOX,
        CHANNEL_MODEL,
        "store(tail + moved, ",
        "release",
    ),
    weaker("tail stored relaxed", MAILBOX, TSAN_MAILBOX, "store(tail + moved, ", "relaxed"),
]

WAITING = [
    Mutant(
        "notify before the step",
        GROUP,
        "plain:test_steps",
        (
            (
                "(++step_, std::memory_order_seq_cst);\n  notify(own.step_event);\n",
                "(++step_, std::memory_order_seq_cst);\n",
            ),
            (
                '  PHALANX_STEP("advance: publish the step");\n',
                '  notify(own.step_event);\n  PHALANX_STEP("advance: publish the step");\n',
            ),
        ),
    ),
    Mutant(
        "no wake-up",
        WAIT,
        "plain:test_wait",
        (("  futex(event.ticket, FUTEX_WAKE, INT_MAX, nullptr);\n", ""),),
    ),
    Mutant(
        "only one sleeper is woken",
        WAIT,
        "plain:test_wait",
        (("FUTEX_WAKE, INT_MAX", "FUTEX_WAKE, 1"),),
    ),
    Mutant(
        "ticket not changed",
        WAIT,
        "plain:test_steps",
        (("  event.ticket.fetch_add(1, std::memory_order_seq_cst);\n", ""),),
    ),
    Mutant(
        "no check before sleep",
        WAIT_H,
        "plain:test_steps",
        (("    done = ready();\n", "    done = false;\n"),),
    ),
    Mutant(
        "ticket read after the check",
        WAIT_H,
        "plain:test_steps",
        (
            (
                """    PHALANX_STEP("wait: read the ticket");
    const auto seen = event.ticket.load(std::memory_order_seq_cst);
    PHALANX_STEP("wait: check again");
    done = ready();
""",
                """    PHALANX_STEP("wait: check again");
    done = ready();
    PHALANX_STEP("wait: read the ticket");
    const auto seen = event.ticket.load(std::memory_order_seq_cst);
""",
            ),
        ),
    ),
    Mutant(
        "no last check",
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

ENTERING = [
    Mutant(
        "fingerprint after the step",
        GROUP,
        "plain:test_group",
        (
            (
                "  segment_->control(rank_).fingerprints[entries_ & 1].store(own);\n  advance();\n",
                "  advance();\n  segment_->control(rank_).fingerprints[entries_ & 1].store(own);\n",
            ),
        ),
    ),
    Mutant(
        "no comparison of fingerprints",
        GROUP,
        "plain:test_group",
        (("if (theirs != own) {", "if (false) {"),),
    ),
    Mutant(
        "parts of a composite operation count",
        "src/group.cpp",
        "plain:test_composite",
        (("  composite_ = status.ok();\n", "  composite_ = false;\n"),),
    ),
    Mutant(
        "a withdrawn recv is not finished",
        "src/mailbox.cpp",
        "plain:test_composite",
        (
            (
                "  withdrawn->global_rank_ = global_rank;\n  finish(withdrawn, {});\n",
                "  withdrawn->global_rank_ = global_rank;\n",
            ),
        ),
    ),
    Mutant(
        "no message comes from other hosts",
        "src/mailbox.cpp",
        "plain:test_composite",
        ((" && !expects_remote_ ? last", " ? last"),),
    ),
    Mutant(
        "one fingerprint",
        GROUP,
        "plain:test_collectives",
        (
            ("fingerprints[entries_ & 1].store", "fingerprints[0].store"),
            ("fingerprints[entries_ & 1].load", "fingerprints[0].load"),
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
        "one staging slot",
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
        "no exit barrier",
        ZERO_COPY,
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
            ("      notify_always(segment_->control(rank).step_event);\n", ""),
            ("      notify_always(segment_->control(rank).message_event);\n", ""),
        ),
    ),
    Mutant(
        "the last failure wins",
        GROUP,
        "plain:test_steps",
        (
            (
                "if (word.compare_exchange_strong(none, pack(reason, rank_), "
                "std::memory_order_seq_cst)) {",
                "word.store(pack(reason, rank_));\n  if (none == 0) {",
            ),
        ),
    ),
    Mutant(
        "abort word before the fingerprints",
        GROUP,
        "plain:test_steps",
        (
            (
                "  own.failure_fingerprints[0].store(reason.mine);\n"
                "  own.failure_fingerprints[1].store(reason.theirs);\n",
                "",
            ),
            (
                '    PHALANX_STEP("abort: wake all");\n',
                '    PHALANX_STEP("abort: wake all");\n'
                "    own.failure_fingerprints[0].store(reason.mine);\n"
                "    own.failure_fingerprints[1].store(reason.theirs);\n",
            ),
        ),
    ),
    Mutant(
        "no check of processes",
        GROUP,
        "plain:test_rank_deaths",
        (("failing || (ended && presence != Presence::left);", "failing || (ended && false);"),),
    ),
    Mutant(
        "no check of ranks that left",
        GROUP,
        "plain:test_steps",
        (("presence.load(std::memory_order_seq_cst) == Presence::left) {", "pid.load() < 0) {"),),
    ),
    Mutant(
        "only the awaited rank is checked",
        GROUP,
        "plain:test_rank_deaths",
        (("{ return status_while_waiting(peer); }", "{ return peer_status(peer); }"),),
    ),
    Mutant(
        "the arena of a dead rank is a system error",
        GROUP,
        "plain:test_rank_deaths",
        (("if (is_lost(owner)) {", "if (false) {"),),
    ),
]

MESSAGES = [
    Mutant(
        "head before bytes",
        MAILBOX,
        TSAN_MAILBOX,
        (
            (
                "    const std::size_t moved = write_piece(message, channel, head, room);\n",
                "    channel.head.store(head + (room == 0 ? 0 : kCacheLine));\n"
                "    const std::size_t moved = write_piece(message, channel, head, room);\n",
            ),
        ),
    ),
    Mutant(
        "no notification for bytes",
        MAILBOX,
        "plain:test_steps",
        (
            (
                "head + moved, std::memory_order_seq_cst);\n    notify(message_event(peer));\n",
                "head + moved, std::memory_order_seq_cst);\n",
            ),
        ),
    ),
    Mutant(
        "no notification for space",
        MAILBOX,
        "plain:test_steps",
        (
            (
                "tail + moved, std::memory_order_seq_cst);\n    notify(message_event(peer));\n",
                "tail + moved, std::memory_order_seq_cst);\n",
            ),
        ),
    ),
    Mutant(
        "messages without a last check",
        "src/mailbox.cpp",
        "plain:test_steps",
        (
            (
                "if (const Status status = check_peers(); status.ok() || progress()) {",
                "if (const Status status = check_peers(); status.ok()) {",
            ),
        ),
    ),
    Mutant(
        "a failed try_lock is not announced",
        MAILBOX,
        "plain:test_steps",
        (("      mailbox_.lock_missed_.store(true, std::memory_order_seq_cst);\n", ""),),
    ),
]

RECORDS = [
    Mutant(
        "words of a record stored relaxed",
        RECORDER,
        RECORD_MODEL,
        (
            (
                "words_[i].store(words[i], std::memory_order_release)",
                "words_[i].store(words[i], std::memory_order_relaxed)",
            ),
        ),
    ),
]

MUTANTS = [
    *ORDERS,
    *WAITING,
    *ENTERING,
    *LARGE,
    *FAILING,
    *MESSAGES,
    *RECORDS,
    *ROWS,
    *LEASE_MUTANTS,
]
