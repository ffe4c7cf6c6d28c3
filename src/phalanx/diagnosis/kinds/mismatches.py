"""Operations that do not match: different calls of ranks, and messages without their counterpart.

A message may be unsent, unreceived, of another size, or not waited for.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, ClassVar

from phalanx.diagnosis.exit_reasons import get_group_error
from phalanx.diagnosis.formatting import (
    format_call_site,
    format_ranks,
    format_tensor,
    join_texts,
)
from phalanx.diagnosis.kinds.diagnosis import CHECK_BRANCHES, Diagnosis, Side, build_sides

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from phalanx.diagnosis.model import Group, Operation, Rank
    from phalanx.diagnosis.wait_for_graph import WaitForGraph

_UNAWAITED = (
    "Wait for the work that `isend` and `irecv` return before the script ends or leaves the group: "
    "`work = dist.isend(...)`, later `work.wait()`. Until then the transfer is not complete."
)

_UNSENT = (
    "Every recv needs a send on the other rank, with the same group, tag, dtype and size. Check "
    "the operation that the other rank calls instead.",
    "If both ranks wait, use `isend` and `irecv`, or `batch_isend_irecv`, and wait afterwards.",
)


class MismatchedOperation(Diagnosis):
    """Ranks called operations that do not match."""

    kind = "branch"
    fixes: ClassVar[tuple[str, ...]] = (
        CHECK_BRANCHES,
        "`phalanx trace` shows the earlier operations of each rank.",
    )

    @classmethod
    def detect(cls, graph: WaitForGraph) -> Diagnosis | None:
        """Return a diagnosis if the first failure is a mismatch, of operations or of a message."""
        failure = graph.first_failure
        if failure is None or failure.outcome != "mismatch":
            return None
        failed = [n for n in sorted(graph.failures) if _has_mismatch(graph, n, failure.group)]
        messages = [number for number in failed if graph.failures[number].operation.is_message]
        collectives = [number for number in failed if number not in messages]
        if len({_get_signature(graph.failures[n].operation) for n in collectives}) < 2:
            for number in messages:
                if (diagnosis := MismatchedMessage.of_receiver(graph, number)) is not None:
                    return diagnosis
        # The ranks in the latest collective; the others were notified in an earlier one.
        sequences = {number: graph.failures[number].operation.sequence for number in collectives}
        latest = [n for n, sequence in sequences.items() if sequence == max(sequences.values())]
        sides = _build_mismatch_sides(graph, latest or failed)
        at_fault = _find_minority_callers(sides)
        kind = MismatchedTensor if _are_one_call(sides) else cls
        return kind(graph, at_fault, graph.moment, sides, reason=graph.find_exception())

    def describe_cause(self) -> list[str]:
        time, reason = self.describe_time(self.since), self.escape_reason(400)
        own = [side for side in self.sides if set(side.ranks) <= set(self.ranks)]
        rest = self._describe_calls([side for side in self.sides if side not in own])
        if rest and len(own) == 1:
            it = "it" if self.is_single else "they"
            called = f"{it} called {self.describe_call(own[0])}, but {join_texts(rest)}"
            return [f"{self.subject} took a different branch than the others{time}: {called}."]
        calls = self._describe_calls(own) + rest
        first = f"Ranks took different branches{time}: {join_texts(calls)}."
        return [first, *([reason] if len(calls) == 1 and reason else [])]

    def _describe_calls(self, sides: Sequence[Side]) -> list[str]:
        return [f"{format_ranks(side.ranks)} called {self.describe_call(side)}" for side in sides]


class MismatchedTensor(MismatchedOperation):
    """Ranks called the same operation at the same line, with tensors that do not match."""

    kind = "tensor"
    fixes = (
        "A collective needs tensors of one dtype and one number of elements. The last batch of an "
        "epoch may be smaller on some ranks: pad it, or exchange the sizes first "
        "(`all_gather_object`).",
    )

    def describe_cause(self) -> list[str]:
        called = [(side, side.operation) for side in self.sides if side.operation is not None]
        call, counts = called[0][1], {operation.count for _, operation in called}
        what = "sizes" if len(counts) > 1 else "dtypes"
        given = [
            f"{format_ranks(side.ranks)} {format_tensor(operation)}" for side, operation in called
        ]
        return [
            f"Ranks gave {call.kind} #{call.sequence} at {format_call_site(call)} tensors of "
            f"different {what}{self.describe_time(self.since)}: {join_texts(given)}."
        ]


class MismatchedMessage(Diagnosis):
    """A message does not match its recv."""

    kind = "message"
    fixes = ("Use the same dtype and number of elements for send and recv.",)

    @classmethod
    def of_receiver(cls, graph: WaitForGraph, number: int) -> Diagnosis | None:
        """Return a diagnosis if a message does not match the failed recv of a rank."""
        recv = graph.failures[number].operation
        found = _find_mismatched_message(graph, number, recv) if recv.kind == "recv" else None
        if found is None:
            return None
        sender, sent = found
        sender_side = Side((sender,), sent, graph.ranks[sender].get_group(sent))
        sides = (_build_failed_side(graph, [number]), sender_side)
        return cls(graph, tuple(sorted((number, sender))), graph.moment, sides, instead=sent)

    def describe_cause(self) -> list[str]:
        receiver, sender = self.sides
        return [
            f"A message does not match its recv: {format_ranks(sender.ranks)} called "
            f"{self.describe_call(sender)}, "
            f"but {format_ranks(receiver.ranks)} called {self.describe_call(receiver)}."
        ]


class UnsentMessage(Diagnosis):
    """A rank waits for a message that is never sent."""

    kind = "unsent"
    fixes = _UNSENT

    @classmethod
    def detect(cls, graph: WaitForGraph) -> Diagnosis | None:
        """Return a diagnosis if a rank was sent a message other than the one that it waits for."""
        for source in graph.blocking:
            for waiter in graph.find_waiters([source]):
                if _find_other_message(graph, waiter, source) is not None:
                    return cls.between(graph, [waiter], source)
        return None

    @classmethod
    def between(cls, graph: WaitForGraph, waiters: Sequence[int], source: int) -> Diagnosis:
        """Return the diagnosis of ranks that wait for messages that `source` does not send."""
        others = [number for number in graph.find_waiters(waiters) if number != source]
        return cls(
            graph,
            tuple(waiters),
            min(graph.waits[waiter].operation.begin for waiter in waiters),
            (*build_sides(graph, waiters), *build_sides(graph, [source])),
            build_sides(graph, others),
            graph.exits[source],
            _find_other_message(graph, waiters[0], source),
        )

    def describe_cause(self) -> list[str]:
        waiter, source = self.sides[0], self.sides[-1]
        wait = self.choose_verb("has waited", "have waited", "waited")
        send = "sends" if self.graph.is_live else "sent"
        first = (
            f"{self.subject} {wait} for a message that no rank {send}: "
            f"{self.describe_call(waiter)},{self.describe_duration(self.since)}."
        )
        status = self.exit_status
        if status.has_finished:
            place = f"ended{self.describe_time(status.time)} without sending it"
        else:
            place = self.describe_elsewhere(source)
        texts = [first, f"{self.describe_ranks(source.ranks).capitalize()} {place}."]
        if self.instead is not None:
            sent = self.describe_operation(source.ranks[0], self.instead)
            texts.append(f"The message that it sent instead has no matching recv: {sent}.")
        return texts

    def suggest_fixes(self) -> list[str]:
        has_ended = self.exit_status.has_finished
        return [*self.fixes, *(suggest_waiting(self.graph) if has_ended else ())]

    def describe_elsewhere(self, side: Side) -> str:
        """Return that a side is not in the operation that matches, with its location."""
        return f"{self.conjugate_be(side.ranks)} elsewhere{self.describe_location(side.ranks[0])}"


class UnreceivedMessage(UnsentMessage):
    """A rank waits for its message to be received."""

    kind = "unreceived"

    def describe_cause(self) -> list[str]:
        sender, receiver = self.sides[0], self.sides[-1]
        has = "has" if len(sender.ranks) == 1 else "have"
        verb = f"{has} waited" if self.graph.is_live else "waited"
        return [
            f"{self.subject} {verb} for a message to be received: {self.describe_call(sender)},"
            f"{self.describe_duration(self.since)}.",
            f"{self.describe_ranks(receiver.ranks).capitalize()} "
            f"{self.describe_elsewhere(receiver)}.",
        ]


class UnawaitedMessage(Diagnosis):
    """A rank ended or left before its own message was complete."""

    kind = "unawaited"
    fixes = (_UNAWAITED,)

    @classmethod
    def detect(cls, graph: WaitForGraph) -> Diagnosis | None:
        """Return a diagnosis if a rank ended or left while a message its peer needs was pending."""
        for number, rank in graph.ranks.items():
            for posted in find_incomplete_messages(graph, number):
                if _is_needed(graph, number, posted):
                    own = Side((number,), posted, rank.get_group(posted))
                    waiting = build_sides(graph, graph.find_waiters([number]))
                    status = graph.exits[number]
                    return cls(graph, (number,), status.time, (own,), waiting, status)
        return None

    def describe_cause(self) -> list[str]:
        group = self.sides[0].group
        did = "left the group" if group is not None and group.left else "ended"
        return [
            f"{self.subject} {did}{self.describe_time(self.since)} without waiting for its own "
            f"message: {self.describe_call(self.sides[0])} was still under way."
        ]


# Mismatches.


def _has_mismatch(graph: WaitForGraph, number: int, group: Group | None) -> bool:
    """Return whether a rank failed because of a mismatch in this group."""
    failure = graph.failures[number]
    own = failure.group
    same = own is not None and group is not None and own.identity == group.identity
    return failure.outcome == "mismatch" and (same or failure is graph.first_failure)


def _get_signature(operation: Operation) -> tuple[object, ...]:
    """Return the arguments that must be the same on all ranks of a collective."""
    return (
        operation.sequence,
        operation.kind,
        operation.dtype,
        operation.count,
        operation.peer,
        operation.op,
    )


def _are_one_call(sides: Sequence[Side]) -> bool:
    """Return whether the calls of several sides differ in their tensors only."""
    operations = [side.operation for side in sides]
    calls = {
        each and (each.sequence, each.kind, each.peer, each.op, each.site) for each in operations
    }
    return len(sides) > 1 and None not in operations and len(calls) == 1


def _build_mismatch_sides(graph: WaitForGraph, numbers: list[int]) -> tuple[Side, ...]:
    """Return the sides of a mismatch, the rarest call first.

    Ranks that made the same call at the same call site form one side.
    """
    places: dict[tuple[object, str], list[int]] = {}
    alike: Counter[object] = Counter()
    for number in numbers:
        operation = graph.failures[number].operation
        places.setdefault((_get_signature(operation), operation.site), []).append(number)
        alike[_get_signature(operation)] += 1
    ordered = sorted(places, key=lambda place: (alike[place[0]], places[place]))
    return tuple(_build_failed_side(graph, places[place]) for place in ordered)


def _build_failed_side(graph: WaitForGraph, ranks: list[int]) -> Side:
    failure = graph.failures[ranks[0]]
    return Side(tuple(ranks), failure.operation, failure.group)


def _find_minority_callers(sides: tuple[Side, ...]) -> tuple[int, ...]:
    """Return the ranks that made the rarest call; all ranks if several calls are equally rare."""
    callers: dict[object, list[int]] = {}
    for side in sides:
        signature = None if side.operation is None else _get_signature(side.operation)
        callers.setdefault(signature, []).extend(side.ranks)
    few = min(len(ranks) for ranks in callers.values())
    fewest = [ranks for ranks in callers.values() if len(ranks) == few]
    named = fewest[0] if len(fewest) == 1 else [n for ranks in callers.values() for n in ranks]
    return tuple(sorted(named))


# Messages.


def suggest_waiting(graph: WaitForGraph) -> list[str]:
    """Return advice on messages that ranks which have ended may have begun with `isend` or `irecv`.

    Records of PyTorch, if the job has any, do not show such calls.
    """
    return [_UNAWAITED] if any(rank.recorded for rank in graph.ranks.values()) else []


def find_incomplete_messages(graph: WaitForGraph, number: int) -> list[Operation]:
    """Return the messages of a rank that were incomplete when it ended or left."""
    rank = graph.ranks[number]
    if get_group_error(rank):
        return []
    has_finished = graph.exits[number].has_finished
    messages = (o for o in rank.records if o.is_message and _is_cut(o))
    return [o for o in messages if has_finished or _has_left(rank, o)]


def _has_left(rank: Rank, message: Operation) -> bool:
    """Return whether a rank has left the group of a message, however its process ended later."""
    group = rank.get_group(message)
    return group is not None and group.left


def _is_cut(message: Operation) -> bool:
    """Return whether a message is incomplete, or failed because a rank was lost or had left."""
    return not message.end or message.outcome in ("left", "peer_lost")


def _is_needed(graph: WaitForGraph, number: int, posted: Operation) -> bool:
    """Return whether the peer of an incomplete message had posted the matching operation."""
    group = graph.ranks[number].get_group(posted)
    other = graph.get_global_rank(group, posted.peer)
    if other is None or other == number or graph.exits[other].has_finished:
        return False
    kind = "recv" if posted.kind == "send" else "send"
    wanted = _iterate_messages(graph, kind, other, number, group)
    return any(o.sequence == posted.sequence and _is_cut(o) for o in wanted)


def _find_other_message(graph: WaitForGraph, waiter: int, source: int) -> Operation | None:
    """Return the newest message from `source` for which `waiter` posted no recv, or None.

    None unless `waiter` waits for a message from `source`.
    """
    wait = graph.waits.get(waiter)
    if wait is None or wait.operation.kind != "recv" or wait.peers != (source,):
        return None
    group = graph.ranks[waiter].get_group(wait.operation)
    sent = [*_iterate_messages(graph, "send", source, waiter, group)]
    received = _iterate_messages(graph, "recv", waiter, source, group)
    received_tags = Counter(operation.sequence for operation in received)
    # If not all operations of both ranks are known, only tags without any recv count.
    if any(graph.ranks[n].operations > len(graph.ranks[n].records) for n in (waiter, source)):
        sent = [operation for operation in sent if operation.sequence not in received_tags]
    sent_tags = Counter(operation.sequence for operation in sent)
    for operation in reversed(sent):
        tag = operation.sequence
        if sent_tags[tag] > received_tags[tag] and tag != wait.operation.sequence:
            return operation
    return None


def _find_mismatched_message(
    graph: WaitForGraph, number: int, recv: Operation
) -> tuple[int, Operation] | None:
    """Return the sender and the message that does not match a recv of this rank, or None."""
    group = graph.ranks[number].get_group(recv)
    members = graph.get_group_ranks(group)
    for sender in members.values() if recv.peer < 0 else [members.get(recv.peer, -1)]:
        for operation in reversed([*_iterate_messages(graph, "send", sender, number, group)]):
            fits = (operation.dtype, operation.count) == (recv.dtype, recv.count)
            if operation.sequence == recv.sequence and not fits:
                return sender, operation
    return None


def _iterate_messages(
    graph: WaitForGraph, kind: str, rank: int, other: int, group: Group | None
) -> Iterator[Operation]:
    """Yield the messages of one kind between two ranks in a group, the oldest first."""
    if rank not in graph.ranks:
        return
    identity = None if group is None else group.identity
    for operation in graph.ranks[rank].records:
        own = graph.ranks[rank].get_group(operation)
        if operation.kind != kind or (None if own is None else own.identity) != identity:
            continue
        # A recv from any rank may have received it.
        if graph.get_global_rank(own, operation.peer) == other or operation.peer < 0:
            yield operation
