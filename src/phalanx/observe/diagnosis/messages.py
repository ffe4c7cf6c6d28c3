"""Unmatched messages: without their send, without their recv, or not waited for."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import TYPE_CHECKING

from phalanx.observe.diagnosis.diagnosis import Diagnosis, Rule, Side, build_sides
from phalanx.observe.diagnosis.exit_reasons import get_phalanx_error
from phalanx.observe.model import get_group

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from phalanx.observe.diagnosis.diagnosis import Phrases
    from phalanx.observe.diagnosis.wait_for_graph import WaitForGraph
    from phalanx.observe.model import Operation, Rank

__all__ = [
    "UnawaitedMessage",
    "UnreceivedMessage",
    "UnsentMessage",
    "diagnose_unsent_message",
    "find_incomplete_messages",
    "find_mismatched_message",
    "find_other_message",
]

_UNSENT = (
    "Every recv needs a send on the other rank, with the same group, tag, dtype and size. Check "
    "the operation that the other rank calls instead.",
    "If both ranks wait, use `isend` and `irecv`, or `batch_isend_irecv`, and wait afterwards.",
)


class UnsentMessage(Rule):
    """A rank waits for a message that is never sent."""

    kind = "unsent"
    fixes = _UNSENT

    def describe(self, phrases: Phrases) -> list[str]:
        diagnosis = phrases.diagnosis
        waiter, source = diagnosis.sides[0], diagnosis.sides[-1]
        other = source.ranks[0]
        one = len(diagnosis.ranks) == 1
        wait = phrases.choose_tense("has waited" if one else "have waited", "waited")
        send = phrases.choose_tense("sends", "sent")
        first = (
            f"{phrases.subject} {wait} for a message that no rank {send}: "
            f"{phrases.describe_call(waiter)},{phrases.describe_duration(diagnosis.since)}."
        )
        status = diagnosis.exit_status
        if status is not None and status.reason in ("completed", "left"):
            place = f"ended{phrases.describe_time(status.time)} without sending it"
        else:
            place = (
                f"{phrases.conjugate_be(source.ranks)} elsewhere{phrases.describe_location(other)}"
            )
        texts = [first, f"{phrases.describe_ranks(source.ranks).capitalize()} {place}."]
        if diagnosis.instead is not None:
            sent = phrases.describe_operation(other, diagnosis.instead)
            texts.append(f"The message that it sent instead has no matching recv: {sent}.")
        return [*texts, *phrases.describe_waiting_ranks()]


class UnreceivedMessage(Rule):
    """A rank waits for its message to be received."""

    kind = "unreceived"
    fixes = _UNSENT

    def describe(self, phrases: Phrases) -> list[str]:
        sender, receiver = phrases.diagnosis.sides[0], phrases.diagnosis.sides[-1]
        one = len(sender.ranks) == 1
        verb = phrases.choose_tense("has waited" if one else "have waited", "waited")
        place = phrases.describe_location(receiver.ranks[0])
        return [
            f"{phrases.subject} {verb} for a message to be received: "
            f"{phrases.describe_call(sender)},"
            f"{phrases.describe_duration(phrases.diagnosis.since)}.",
            f"{phrases.describe_ranks(receiver.ranks).capitalize()} "
            f"{phrases.conjugate_be(receiver.ranks)} elsewhere{place}.",
            *phrases.describe_waiting_ranks(),
        ]


class UnawaitedMessage(Rule):
    """A rank ended or left before its own message was complete."""

    kind = "unawaited"
    fixes = (
        "Wait for the work that `isend` and `irecv` return before the script ends or leaves the "
        "group: `work = dist.isend(...)`, later `work.wait()`. Until then the transfer is not "
        "complete.",
    )

    @staticmethod
    def detect(graph: WaitForGraph) -> Diagnosis | None:
        """Return a diagnosis if a rank ended or left while a message its peer needs was pending."""
        for number in graph.ranks:
            for posted in find_incomplete_messages(graph, number):
                if _is_needed(graph, number, posted):
                    own = Side((number,), posted, get_group(graph.ranks[number], posted))
                    waiting, status = (
                        build_sides(graph, graph.find_waiters([number])),
                        graph.exits[number],
                    )
                    return Diagnosis(
                        "unawaited", (number,), status.time, (own,), waiting, exit_status=status
                    )
        return None

    def describe(self, phrases: Phrases) -> list[str]:
        diagnosis = phrases.diagnosis
        group = diagnosis.sides[0].group
        left = group is not None and group.left
        did = f"{'left the group' if left else 'ended'}{phrases.describe_time(diagnosis.since)}"
        return [
            f"{phrases.subject} {did} without waiting for its own message: "
            f"{phrases.describe_call(diagnosis.sides[0])} was still under way.",
            *phrases.describe_waiting_ranks(),
        ]


def diagnose_unsent_message(graph: WaitForGraph, waiters: Sequence[int], source: int) -> Diagnosis:
    """Return the diagnosis of ranks that wait for messages that `source` does not send."""
    others = [number for number in graph.find_waiters(waiters) if number != source]
    return Diagnosis(
        "unsent",
        tuple(waiters),
        min(graph.waits[waiter].operation.begin for waiter in waiters),
        (*build_sides(graph, waiters), *build_sides(graph, [source])),
        build_sides(graph, others),
        exit_status=graph.exits.get(source),
        instead=find_other_message(graph, waiters[0], source),
    )


def find_incomplete_messages(graph: WaitForGraph, number: int) -> list[Operation]:
    """Return the messages of a rank that were incomplete when it ended or left."""
    rank = graph.ranks[number]
    if get_phalanx_error(rank):
        return []
    ended = graph.exits[number].reason in ("completed", "left")
    messages = (o for o in chain(rank.history, rank.open) if o.is_message and _is_cut(o))
    return [o for o in messages if ended or _has_left(rank, o)]


def _has_left(rank: Rank, message: Operation) -> bool:
    """Return whether a rank has left the group of a message, however its process ended later."""
    group = get_group(rank, message)
    return group is not None and group.left


def _is_cut(message: Operation) -> bool:
    """Return whether a message is incomplete, or failed because a rank was lost or had left."""
    return not message.end or message.outcome in ("left", "peer_lost")


def _is_needed(graph: WaitForGraph, number: int, posted: Operation) -> bool:
    """Return whether the peer of an incomplete message had posted the matching operation."""
    other = graph.get_global_rank(get_group(graph.ranks[number], posted), posted.peer)
    if other is None or other == number or graph.exits[other].reason in ("completed", "left"):
        return False
    kind = "recv" if posted.kind == "send" else "send"
    wanted = iterate_messages(
        graph, kind, other, number, _get_group_identity(graph, number, posted)
    )
    return any(o.sequence == posted.sequence and _is_cut(o) for o in wanted)


def find_other_message(graph: WaitForGraph, waiter: int, source: int) -> Operation | None:
    """Return the newest message from `source` for which `waiter` posted no recv, or None.

    None unless `waiter` waits for a message from `source`.
    """
    wait = graph.waits.get(waiter)
    if wait is None or wait.operation.kind != "recv" or wait.peers != (source,):
        return None
    identity = _get_group_identity(graph, waiter, wait.operation)
    sent = [*iterate_messages(graph, "send", source, waiter, identity)]
    received_tags = Counter(
        o.sequence for o in iterate_messages(graph, "recv", waiter, source, identity)
    )
    if not _has_complete_history(graph, waiter) or not _has_complete_history(graph, source):
        sent = [operation for operation in sent if operation.sequence not in received_tags]
    sent_tags = Counter(operation.sequence for operation in sent)
    for operation in reversed(sent):
        tag = operation.sequence
        if sent_tags[tag] > received_tags[tag] and tag != wait.operation.sequence:
            return operation
    return None


def find_mismatched_message(
    graph: WaitForGraph, number: int, recv: Operation
) -> tuple[int, Operation] | None:
    """Return the sender and the message that does not match a recv of this rank, or None."""
    group = get_group(graph.ranks[number], recv)
    source = graph.get_global_rank(group, recv.peer)
    sources = graph.get_group_ranks(group).values() if recv.peer < 0 else [source]
    for sender in sources:
        if sender is None or sender not in graph.ranks:
            continue
        sent = iterate_messages(
            graph, "send", sender, number, _get_group_identity(graph, number, recv)
        )
        for operation in reversed([*sent]):
            fits = (operation.dtype, operation.count) == (recv.dtype, recv.count)
            if operation.sequence == recv.sequence and not fits:
                return sender, operation
    return None


def iterate_messages(
    graph: WaitForGraph, kind: str, rank: int, other: int, identity: int | None
) -> Iterator[Operation]:
    """Yield the messages of one kind between two ranks in a group, the oldest first."""
    record = graph.ranks.get(rank)
    for operation in chain(record.history, record.open) if record is not None else ():
        if operation.kind != kind or _get_group_identity(graph, rank, operation) != identity:
            continue
        group = get_group(graph.ranks[rank], operation)
        # A recv from any rank may have received it.
        if graph.get_global_rank(group, operation.peer) == other or operation.peer < 0:
            yield operation


def _get_group_identity(graph: WaitForGraph, rank: int, operation: Operation) -> int | None:
    group = get_group(graph.ranks[rank], operation)
    return None if group is None else group.identity


def _has_complete_history(graph: WaitForGraph, number: int) -> bool:
    """Return whether all operations of a rank are known."""
    rank = graph.ranks[number]
    return rank.operations <= len(rank.history) + len(rank.open)
