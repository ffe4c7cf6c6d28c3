"""The mutants: one plausible mistake each, and the test or model that must find it.

A mutant replaces texts that occur exactly once. A mutant that no longer applies fails a check that
runs with the tests. Then the source has changed, and the mutant must follow.
"""

from agreement_mutants import AGREEMENT_MUTANTS
from lease_mutants import LEASE_MUTANTS
from mutant import Mutant
from row_mutants import ROWS

GROUP = "src/group.cpp"
COLLECTIVE = "src/collective.cpp"
COLLECTIVE_H = "include/phalanx/collective.h"
FINGERPRINT = "include/phalanx/fingerprint.h"
WAIT = "src/wait.cpp"
WAIT_H = "include/phalanx/wait.h"
SEGMENT = "include/phalanx/segment.h"
TREE = "src/tree.cpp"
STREAM = "src/collectives/stream.h"
PARTS = "src/collectives/parts.h"
EXCHANGE = "src/collectives/exchange.h"
SLICED = "src/collectives/sliced_reduction.cpp"
SOURCES = "src/collectives/sources.h"
LOCATIONS = "src/collectives/locations.h"
MERGED = "src/collectives/merged.cpp"
CHANNEL = "src/channel.cpp"
MAILBOX = "src/mailbox.cpp"
RECORDER = "src/flight_recorder.cpp"

# Detectors: a test, plain or under ThreadSanitizer, or a case of the models.
WAITING_MODEL = "model:waiting RANKS=2 ROUNDS=1"
PHASES_MODEL = "model:waiting PHASES=1 RANKS=2 ROUNDS=1"
ENTRY_MODEL = "model:entry WINDOW=2 ROUNDS=4"
SLOTS_MODEL = "model:channel MESSAGES=2 SLOTS=1 CAPACITY=1"
PIECES_MODEL = "model:channel MESSAGES=1 SLOTS=1 PIECES=2 CAPACITY=1"
RECORD_MODEL = "model:record RECORDS=4"
STEPS = "plain:test_steps"
COLLECTIVES = "plain:test_collectives"
TSAN_COLLECTIVES = "thread:test_collectives"


def weaker(name: str, file: str, caught_by: str, access: str, old: str, new: str) -> Mutant:
    """Weaken the memory order of an access, given by the text before the order."""
    before, after = (f"{access}std::memory_order_{each}" for each in (old, new))
    return Mutant(name, file, caught_by, ((before, after),))


ORDERS = [
    weaker(
        "entry stored relaxed",
        COLLECTIVE,
        WAITING_MODEL,
        "mine.number.store(number, ",
        "release",
        "relaxed",
    ),
    weaker(
        "history of an entry stored relaxed",
        COLLECTIVE,
        ENTRY_MODEL,
        "store(group_.history_, ",
        "release",
        "relaxed",
    ),
    weaker(
        "fingerprint of an entry loaded relaxed",
        FINGERPRINT,
        ENTRY_MODEL,
        "value.rest = words_[1].load(",
        "acquire",
        "relaxed",
    ),
    weaker(
        "step stored relaxed",
        GROUP,
        PHASES_MODEL,
        "own.step.store(step, ",
        "release",
        "relaxed",
    ),
    weaker(
        "step loaded relaxed",
        GROUP,
        PHASES_MODEL,
        "ready = [&] { return control.step.load(",
        "acquire",
        "relaxed",
    ),
    weaker(
        "sleeper announced with acq_rel",
        WAIT_H,
        SLOTS_MODEL,
        "event.sleepers.fetch_add(1, ",
        "seq_cst",
        "acq_rel",
    ),
    weaker(
        "ticket loaded relaxed",
        WAIT_H,
        WAITING_MODEL,
        "seen = event.ticket.load(",
        "acquire",
        "relaxed",
    ),
    weaker(
        "sleepers read without release",
        WAIT_H,
        WAITING_MODEL,
        "event.sleepers.fetch_add(0, ",
        "acq_rel",
        "acquire",
    ),
    weaker(
        "unlocked without release",
        WAIT_H,
        WAITING_MODEL,
        "event.sleepers.fetch_sub(kLocked, ",
        "acq_rel",
        "acquire",
    ),
    weaker(
        "sleepers of a peer loaded with acquire",
        WAIT_H,
        SLOTS_MODEL,
        "if (event.sleepers.load(",
        "seq_cst",
        "acquire",
    ),
    weaker(
        "slot stored with release",
        CHANNEL,
        SLOTS_MODEL,
        "slot.number.store(++sent_, ",
        "seq_cst",
        "release",
    ),
    weaker(
        "returned slots stored with release",
        CHANNEL,
        SLOTS_MODEL,
        "channel_.taken.store(taken, ",
        "seq_cst",
        "release",
    ),
    weaker(
        "tail stored with release",
        CHANNEL,
        PIECES_MODEL,
        "channel_.tail.store(tail_, ",
        "seq_cst",
        "release",
    ),
]

WAITING = [
    Mutant(
        "slow checks prolong a spin without end",
        WAIT_H,
        "plain:test_wait",
        ((" && ++preemptions <= kMostPreemptions)", ")"),),
    ),
    Mutant(
        "notify before the step",
        GROUP,
        STEPS,
        (
            (
                "own.step.store(step, std::memory_order_release);\n  notify(own.step_event);\n",
                "own.step.store(step, std::memory_order_release);\n",
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
        STEPS,
        (("  event.ticket.fetch_add(1, std::memory_order_acq_rel);\n", ""),),
    ),
    Mutant(
        "no check before sleep",
        WAIT_H,
        STEPS,
        (("    done = ready();\n", "    done = false;\n"),),
    ),
    Mutant(
        "ticket read after the check",
        WAIT_H,
        STEPS,
        (
            (
                """    PHALANX_STEP("wait: read the ticket");
    // acquire: the check comes after it.
    const auto seen = event.ticket.load(std::memory_order_acquire);
    PHALANX_STEP("wait: check again");
    done = ready();
""",
                """    PHALANX_STEP("wait: check again");
    done = ready();
    PHALANX_STEP("wait: read the ticket");
    const auto seen = event.ticket.load(std::memory_order_acquire);
""",
            ),
        ),
    ),
    Mutant(
        "no last check",
        WAIT_H,
        STEPS,
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
        STEPS,
        (("  if (!wake) {\n", "  if (true) {\n"),),
    ),
]

ENTERING = [
    Mutant(
        "no comparison of fingerprints",
        COLLECTIVE,
        "plain:test_group",
        (
            (
                "  if (agrees(peer, group_.entries_, theirs)) {\n",
                "  if (agrees(peer, group_.entries_, theirs) || true) {\n",
            ),
        ),
    ),
    Mutant(
        "parts of a composite operation count",
        COLLECTIVE,
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
        "one entry",
        COLLECTIVE_H,
        COLLECTIVES,
        (("entries[number % kEntries];", "entries[number % 1];"),),
    ),
    Mutant(
        "a lock that all threads get",
        WAIT_H,
        "plain:test_group",
        (("memory_order_acquire) & kLocked) == 0;", "memory_order_acquire) & 0) == 0;"),),
    ),
    Mutant(
        "a broken group is not refused",
        COLLECTIVE,
        "plain:test_group",
        (("    status_ = group_.refuse(status_);\n    return;\n", "    status_ = {};\n"),),
    ),
]

TREES = [
    Mutant(
        "a rank passes up before its children",
        COLLECTIVE,
        COLLECTIVES,
        (("meet_neighbour(child, base_ - 2)", "meet_neighbour(child, base_ - 3)"),),
    ),
    Mutant(
        "a rank of a tree takes what has not come down",
        COLLECTIVE,
        COLLECTIVES,
        (("meet_neighbour(tree.parent(), base_ - 1)", "meet_neighbour(tree.parent(), base_ - 3)"),),
    ),
    Mutant(
        "neighbours in a tree are not compared",
        COLLECTIVE,
        "plain:test_group",
        (("  if (status.ok()) {\n    status = compare(peer);\n  }\n", ""),),
    ),
    weaker(
        "step of a neighbour loaded relaxed",
        COLLECTIVE,
        TSAN_COLLECTIVES,
        "control(peer).step.load(",
        "acquire",
        "relaxed",
    ),
    Mutant(
        "the rank that a neighbour waits for is not named",
        GROUP,
        "plain:test_group",
        (("  for (int rank = 0; has_entered(peer) && ", "  for (int rank = 0; false && "),),
    ),
    Mutant(
        "blocks of a tree in the order of its ranks",
        TREE,
        COLLECTIVES,
        (("positions_[parent] + ends[parent];", "each;"),),
    ),
]

LARGE = [
    Mutant(
        "pieces of a ring are reused at once",
        COLLECTIVE,
        COLLECTIVES,
        (("if (piece.begin < end && begin < piece.end) {", "if (end == 0) {"),),
    ),
    Mutant(
        "a piece goes beyond its ring",
        COLLECTIVE,
        COLLECTIVES,
        (("position + bytes <= ring ? position : 0;", "position + 0 * ring;"),),
    ),
    Mutant(
        "a stream overtakes its takers",
        STREAM,
        COLLECTIVES,
        (("base + chunk - Chunks::kSlots + 1)", "base + chunk - Chunks::kSlots)"),),
    ),
    Mutant(
        "a chunk of a stream is taken too early",
        STREAM,
        COLLECTIVES,
        (("wait_step(peer, base + chunk, ", "wait_step(peer, base + chunk - 1, "),),
    ),
    Mutant(
        "parts are taken too early",
        PARTS,
        COLLECTIVES,
        (("group.wait_steps(base + chunk, ", "group.wait_steps(base, "),),
    ),
    Mutant(
        "an exchange keeps its buffer",
        EXCHANGE,
        COLLECTIVES,
        (("      collective_.next_exchange();\n      group.advance();", "      group.advance();"),),
    ),
    Mutant(
        "an exchange overwrites what it has not read",
        EXCHANGE,
        COLLECTIVES,
        (
            (
                "        take(from + done, part_of(span(chunk), done, block));\n"
                "        stage(to + done, part_of(next, done, block));\n",
                "        stage(to + done, part_of(next, done, block));\n"
                "        take(from + done, part_of(span(chunk), done, block));\n",
            ),
        ),
    ),
    Mutant(
        "copied out too early",
        SLICED,
        TSAN_COLLECTIVES,
        (("wait_steps(base + round, ", "wait_steps(base + round - 1, "),),
    ),
    Mutant(
        "a cache begins before the one before it",
        SLICED,
        COLLECTIVES,
        (("if (round != 0) {", "if (round != first_round) {"),),
    ),
    Mutant(
        "chunks of all caches are copied out in the same round",
        SLICED,
        COLLECTIVES,
        (
            ("if (round >= length && ", "if (round > first_round && "),
            ("copy_out(round - length);", "copy_out(round - first_round - 1);"),
        ),
    ),
    Mutant(
        "a rank announces a round before it has combined",
        SLICED,
        TSAN_COLLECTIVES,
        (
            (
                "    if (chunk < chunks) {\n      combine(chunk);\n    }\n"
                "    group.advance_to(base + round + 1);",
                "    group.advance_to(base + round + 1);\n"
                "    if (chunk < chunks) {\n      combine(chunk);\n    }\n    //",
            ),
        ),
    ),
    Mutant(
        "each cache divides the sum",
        SOURCES,
        COLLECTIVES,
        (("end < ranks_ && op_ == ReduceOp::avg", "false && op_ == ReduceOp::avg"),),
    ),
    Mutant(
        "partial results are rounded",
        SOURCES,
        COLLECTIVES,
        (("    return !is_half || ", "    return true || !is_half || "),),
    ),
    Mutant(
        "no exit barrier",
        LOCATIONS,
        TSAN_COLLECTIVES,
        (
            (
                "  return group.wait_steps(collective.base() + 1, collective.bounds());\n",
                "  return {};\n",
            ),
        ),
    ),
    Mutant(
        "all parts of a merged collective have one place",
        MERGED,
        "plain:test_merged",
        (("  offsets_.push_back(end);\n", "  offsets_.push_back(end * 0);\n"),),
    ),
]

FAILING = [
    Mutant(
        "abort wakes nobody",
        GROUP,
        STEPS,
        (
            ("      notify_always(segment_->control(rank).step_event);\n", ""),
            ("      notify_always(segment_->control(rank).message_event);\n", ""),
        ),
    ),
    Mutant(
        "the last failure wins",
        GROUP,
        STEPS,
        (
            (
                "if (word.compare_exchange_strong(none, pack(reason.status, rank_), "
                "std::memory_order_seq_cst)) {",
                "word.store(pack(reason.status, rank_));\n  if (none == 0) {",
            ),
        ),
    ),
    Mutant(
        "abort word before the fingerprints",
        GROUP,
        STEPS,
        (
            (
                "  own.failure_fingerprints[0].store(PackedFingerprint(reason.mine));\n"
                "  own.failure_fingerprints[1].store(PackedFingerprint(reason.theirs));\n",
                "",
            ),
            (
                '    PHALANX_STEP("abort: wake all");\n',
                '    PHALANX_STEP("abort: wake all");\n'
                "    own.failure_fingerprints[0].store(PackedFingerprint(reason.mine));\n"
                "    own.failure_fingerprints[1].store(PackedFingerprint(reason.theirs));\n",
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
        STEPS,
        (("(presence == Presence::left || presence == Presence::leaving) {", "(false) {"),),
    ),
    Mutant(
        "only the awaited rank is checked",
        "include/phalanx/group.h",
        "plain:test_rank_deaths",
        (("    return status_while_waiting(peer);\n", "    return peer_status(peer);\n"),),
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
        "slot before payload",
        CHANNEL,
        "thread:test_mailbox",
        (
            (
                "  slot.count = envelope.count;\n",
                "  slot.number.store(sent_ + 1);\n  slot.count = envelope.count;\n",
            ),
        ),
    ),
    Mutant(
        "no notification for a message",
        MAILBOX,
        STEPS,
        (
            (
                "    message.moved_ += moved;\n    notify_peer(message_event(peer));\n",
                "    message.moved_ += moved;\n",
            ),
        ),
    ),
    Mutant(
        "no notification for space",
        MAILBOX,
        STEPS,
        (
            (
                "    incoming.moved += moved;\n    notify_peer(message_event(peer));\n",
                "    incoming.moved += moved;\n",
            ),
        ),
    ),
    Mutant(
        "messages without a last check",
        "src/mailbox.cpp",
        STEPS,
        (
            (
                "if (check_peers().status.ok() || progress()) {",
                "if (check_peers().status.ok()) {",
            ),
        ),
    ),
    Mutant(
        "a failed try_lock is not announced",
        MAILBOX,
        STEPS,
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
    *TREES,
    *LARGE,
    *FAILING,
    *MESSAGES,
    *RECORDS,
    *ROWS,
    *LEASE_MUTANTS,
    *AGREEMENT_MUTANTS,
]
