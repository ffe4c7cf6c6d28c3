"""Ranks that disagree: each must raise CollectiveMismatch that names both sides and where they are.

One rank, the odd one, does something else than the others: after some calls in which all agreed,
from a line of its own, in a way of its own.
"""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
import torch.distributed as dist

from tests.drill import calls
from tests.drill.calls import Call, Prepared
from tests.drill.pool import Place, Pool

# Seconds of a group's timeout: nobody may come to it.
TIMEOUT = 20.0
# Native names and numbers, as errors have them, where they are others than those of the lines.
_NATIVE = {
    "all_gather_single": "all_gather",
    "reduce_scatter_single": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "all_reduce_coalesced": "all_reduce",
    "monitored_barrier": "barrier",
}
_KINDS = tuple(kind for kind in calls.LINES if kind not in calls.MESSAGES and kind != "objects")
_WITH_TENSORS = tuple(kind for kind in _KINDS if kind not in calls.WITHOUT_TENSORS)
_SIZED = tuple(kind for kind in _WITH_TENSORS if "to_all" not in kind)

# What the ranks may disagree about.
FIELDS = (
    "operation",
    "dtype",
    "size",
    "root",
    "reduction",
    "splits",
    "skipped",
    "left",
    "group order",
    "message size",
    "message dtype",
)


@dataclass(frozen=True)
class Side:
    """What one side does: calls, in the groups with these indices."""

    calls: tuple[Call, ...]
    groups: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Desync:
    """One trial, drawn from its `seed`."""

    number: int
    seed: str
    field: str
    ranks: int
    odd: int
    before: int
    """So many calls in which all agree come first."""
    peer: int
    """Of the odd rank, in a message."""
    mine: Side
    theirs: Side
    ways: tuple[str, ...]
    """By rank: how it waits."""

    def __str__(self) -> str:
        mine, theirs = (" then ".join(map(str, side.calls)) for side in (self.mine, self.theirs))
        return (
            f"{self.field}: rank {self.odd} of {self.ranks}: {mine or 'leaves'}; "
            f"the others: {theirs}; after {self.before} calls"
        )


def draw(seed: int, number: int, least: int, most: int) -> Desync:
    """Trial `number` of a seed; the fields take turns."""
    text = f"{seed} desync {number}"
    random = Random(text)
    ranks = random.randint(least, most)
    field = FIELDS[number % len(FIELDS)]
    odd = random.randrange(ranks)
    mine, theirs = _SIDES[field](random, ranks)
    return Desync(
        number,
        text,
        field,
        ranks,
        odd,
        random.randrange(4),
        random.choice([rank for rank in range(ranks) if rank != odd]),
        mine,
        theirs,
        tuple(random.choice(calls.WAYS) for _ in range(ranks)),
    )


def _other(random: Random, choices: tuple[Any, ...], than: Any) -> Any:
    return random.choice([choice for choice in choices if choice != than])


def _pair(kinds: tuple[str, ...], **values: tuple[Any, ...]) -> Callable[..., tuple[Side, Side]]:
    """Sides of which a field of the call differs."""

    def sides(random: Random, ranks: int) -> tuple[Side, Side]:
        call = calls.draw(random, ranks, kinds)
        changes = {
            name: _other(random, choices or tuple(range(ranks)), getattr(call, name))
            for name, choices in values.items()
        }
        return Side((dataclasses.replace(call, **changes),)), Side((call,))

    return sides


def _operation(random: Random, ranks: int) -> tuple[Side, Side]:
    first = calls.draw(random, ranks, _KINDS)
    others = tuple(kind for kind in _KINDS if _native(kind) != _native(first.kind))
    return Side((dataclasses.replace(first, kind=random.choice(others)),)), Side((first,))


def _skipped(random: Random, ranks: int) -> tuple[Side, Side]:
    first, second = (side.calls[0] for side in _operation(random, ranks))
    return Side((second,)), Side((first, second))


def _left(random: Random, ranks: int) -> tuple[Side, Side]:
    return Side(()), Side((calls.draw(random, ranks, _KINDS),))


def _order(random: Random, ranks: int) -> tuple[Side, Side]:
    call = calls.draw(random, ranks, _KINDS)
    return Side((call, call), (0, 1)), Side((call, call), (1, 0))


def _message(**values: tuple[Any, ...]) -> Callable[..., tuple[Side, Side]]:
    def sides(random: Random, ranks: int) -> tuple[Side, Side]:
        call = Call("message", random.choice(calls.DTYPES), random.choice(calls.COUNTS))
        changes = {
            name: _other(random, choices, getattr(call, name)) for name, choices in values.items()
        }
        return Side((dataclasses.replace(call, **changes),)), Side((call,))

    return sides


def _splits(random: Random, ranks: int) -> tuple[Side, Side]:
    call = Call("splits", random.choice(calls.DTYPES), random.choice(calls.COUNTS))
    return Side((dataclasses.replace(call, count=call.count + 1),)), Side((call,))


_SIDES: dict[str, Callable[[Random, int], tuple[Side, Side]]] = {
    "operation": _operation,
    "dtype": _pair(_WITH_TENSORS, dtype=calls.DTYPES),
    "size": _pair(_SIZED, count=calls.COUNTS),
    "root": _pair(calls.ROOTED, root=()),
    "reduction": _pair(calls.REDUCING, reduction=calls.REDUCTIONS),
    "splits": _splits,
    "skipped": _skipped,
    "left": _left,
    "group order": _order,
    "message size": _message(count=calls.COUNTS),
    "message dtype": _message(dtype=calls.DTYPES),
}


@dataclass(frozen=True)
class Caught:
    """What a rank raised, in which time, and where it was when it did."""

    error: str
    text: str
    seconds: float
    site: str


def rank_of(place: Place, desync: Desync) -> Caught:
    """What each rank runs."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(1)
    place.form("phalanx", TIMEOUT)
    group = dist.group.WORLD
    groups: list[Any] = [group]
    if desync.field == "group order":
        groups.append(dist.new_group())
    ready = _prepared(place, desync, groups)
    for _ in range(desync.before):
        dist.all_reduce(torch.ones(3))
    start = time.monotonic()
    caught = Caught("", "", 0.0, _site(place.rank, 0))
    for number, run in enumerate(ready):
        try:
            run()
        except Exception as error:
            seconds = time.monotonic() - start
            site = _site(place.rank, number)
            caught = Caught(type(error).__name__, str(error), seconds, site)
            break
    if dist.is_initialized():
        dist.destroy_process_group()
    return caught


def _prepared(place: Place, desync: Desync, groups: list[Any]) -> list[Callable[[], object]]:
    """What a rank does, each from a line of its own."""
    is_odd = place.rank == desync.odd
    side = desync.mine if is_odd else desync.theirs
    if desync.field.startswith("message"):
        return _of_messages(place, desync, side.calls[0])
    if desync.field == "left" and is_odd:
        return [_line("dist.destroy_process_group()", place.rank, 0, dist=dist)]
    if desync.field == "splits":
        return [_exchange(place, desync)]
    ready: list[Callable[[], object]] = []
    for number, (drawn, group) in enumerate(zip(side.calls, side.groups * 2, strict=False)):
        way = desync.ways[place.rank]
        if drawn.kind in calls.BLOCKING:
            way = "blocking"
        call = dataclasses.replace(drawn, way=way)
        file, line = _site(place.rank, number).split(":")
        ready.append(Prepared(call, groups[group], file, int(line)).run)
    return ready


def _of_messages(place: Place, desync: Desync, call: Call) -> list[Callable[[], object]]:
    """The odd rank receives what its peer sends; the others, and the two, meet behind it."""
    tensor = torch.ones(call.count, dtype=getattr(torch, call.dtype))
    blocking = desync.ways[place.rank] == "blocking"
    names = {"dist": dist, "t": tensor, "odd": desync.odd, "peer": desync.peer}
    ready = []
    if place.rank == desync.peer:
        send = "dist.send(t, odd)" if blocking else "dist.isend(t, odd).wait()"
        ready.append(_line(send, place.rank, 0, **names))
    elif place.rank == desync.odd:
        recv = "dist.recv(t, peer)" if blocking else "dist.irecv(t, peer).wait()"
        ready.append(_line(recv, place.rank, 0, **names))
    return [*ready, dist.barrier]


def _exchange(place: Place, desync: Desync) -> Callable[[], object]:
    """An exchange in which the odd rank gives its peer an element more than that expects."""
    base, rank = desync.theirs.calls[0].count, place.rank
    given, taken = [base] * place.size, [base] * place.size
    if rank == desync.odd:
        given[desync.peer] += 1
    dtype = getattr(torch, desync.theirs.calls[0].dtype)
    names = {
        "outs": [torch.ones(count, dtype=dtype) for count in taken],
        "parts": [torch.ones(count, dtype=dtype) for count in given],
    }
    is_async = desync.ways[rank] != "blocking"
    line = f"dist.all_to_all(outs, parts, async_op={is_async})"
    return _line(f"{line}.wait()" if is_async else line, rank, 0, dist=dist, **names)


def _site(rank: int, number: int) -> str:
    """The line that a rank makes its calls from, another one for each."""
    return f"rank_{rank}.py:{10 * (rank + 1) + number}"


def _line(source: str, rank: int, number: int, **names: Any) -> Callable[[], object]:
    file, line = _site(rank, number).split(":")
    code = compile("\n" * (int(line) - 1) + source, file, "eval")
    return lambda: eval(code, names)


@dataclass
class Trial:
    """A desync, and what came of it."""

    desync: Desync
    times: list[float] = field(default_factory=list)
    """Seconds from a rank's call to its exception."""
    raised: int = 0
    """Ranks that raised what they should."""
    expected: int = 0
    """Ranks that should have."""
    wrong: list[str] = field(default_factory=list)


def run(pool: Pool, desync: Desync) -> Trial:
    """Carry out one trial; afterwards the pool is whole again."""
    pool.begin(desync.ranks, rank_of, desync)
    trial = Trial(desync)
    for rank, answer in enumerate(pool.finish(desync.ranks, TIMEOUT + 10)):
        caught = answer.value
        if not isinstance(caught, Caught):
            ended = pool.replace(rank, dead=not answer.hung)
            trial.wrong.append(f"rank {rank}: {answer.error or ended}")
        elif desync.field != "left" or rank != desync.odd:
            trial.expected += 1
            wrong = judge(desync, rank, caught)
            trial.raised += not wrong
            trial.times.append(caught.seconds)
            if wrong:
                what = f"rank {rank}: {caught.error or 'no exception'}: {caught.text}"
                trial.wrong.append(f"{what}\n    {'; '.join(wrong)}")
    return trial


def judge(desync: Desync, rank: int, caught: Caught) -> list[str]:
    """What is wrong with what a rank says."""
    if caught.error != "CollectiveMismatch":
        return ["expected CollectiveMismatch"]
    wrong = []
    others = [other for other in range(desync.ranks) if other != desync.odd]
    if desync.field.startswith("message") or desync.field == "splits":
        others = [desync.peer]
    told = caught.text.partition(": ")[2]
    if _site(desync.odd, 0) not in told:
        wrong.append(f"the odd rank's call site {_site(desync.odd, 0)} is missing")
    if not any(_site(other, 0) in told for other in others):
        wrong.append("the call site of the others is missing")
    return [*wrong, *(f"{words!r} is missing" for words in _expected(desync) if words not in told)]


def _expected(desync: Desync) -> list[str]:
    """What must be said of both sides."""
    sequence = desync.before + 1
    mine, theirs = desync.mine.calls, desync.theirs.calls
    if desync.field == "left":
        return [f"rank {desync.odd} ", "has left the group", _words(theirs[0], sequence)]
    if desync.field == "splits":
        counts = f"gives rank {desync.peer} {mine[0].count} elements", str(theirs[0].count)
        return [f"all_to_all #{sequence}", f"rank {desync.odd} ", *counts]
    if desync.field.startswith("message"):
        received, sent = (f"{call.dtype}[{call.count}]" for call in (mine[0], theirs[0]))
        return [f"send {sent} to rank {desync.odd}", f"recv {received} from rank {desync.peer}"]
    if desync.field == "group order":
        return ["groups in different orders", f"{_native(mine[0].kind)} #"]
    return [_words(mine[0], sequence), _words(theirs[0], sequence)]


def _native(kind: str) -> str:
    return _NATIVE.get(kind, kind)


def _words(call: Call, sequence: int) -> str:
    """An operation as errors have it."""
    words = [f"{_native(call.kind)} #{sequence}"]
    if "to_all" in call.kind:
        words.append(call.dtype)
    elif call.kind not in calls.WITHOUT_TENSORS:
        words.append(f"{call.dtype}[{call.count}]")
    if call.kind in calls.REDUCING:
        words.append(call.reduction)
    if call.kind in calls.ROOTED:
        words.append(f"root {call.root}")
    return " ".join(words)
