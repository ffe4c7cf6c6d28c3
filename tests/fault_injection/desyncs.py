"""Mismatches: each rank must raise a CollectiveMismatch that names both sides and call sites.

One rank, the odd rank, makes a different call from the others, after some calls in which all ranks
agree. Each rank has its own call site and mode.
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

from tests.fault_injection import calls
from tests.fault_injection.calls import Call, PreparedCall
from tests.fault_injection.pool import Pool, TrialRank

# Timeout of a group in seconds; no rank may reach it.
TIMEOUT = 20.0
# Names of operations in error messages, if they differ from the names of the lines.
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

# Properties in which the ranks may differ.
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
    """The calls of one side, in the groups with these indices."""

    calls: tuple[Call, ...]
    groups: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Desync:
    """A trial, drawn from its `seed`."""

    number: int
    seed: str
    field: str
    ranks: int
    odd: int
    before: int
    """Number of calls in which all ranks agree first."""
    peer: int
    """Peer of the odd rank in a message."""
    odd_side: Side
    other_side: Side
    modes: tuple[str, ...]
    """Mode of each rank."""

    def __str__(self) -> str:
        odd_side, other_side = (
            " then ".join(map(str, side.calls)) for side in (self.odd_side, self.other_side)
        )
        return (
            f"{self.field}: rank {self.odd} of {self.ranks}: {odd_side or 'leaves'}; "
            f"the others: {other_side}; after {self.before} calls"
        )


def draw(seed: int, number: int, least: int, most: int) -> Desync:
    """Draw trial `number` of a seed; the fields take turns."""
    text = f"{seed} desync {number}"
    random = Random(text)
    ranks = random.randint(least, most)
    field = FIELDS[number % len(FIELDS)]
    odd = random.randrange(ranks)
    odd_side, other_side = _DRAW_SIDES[field](random, ranks)
    return Desync(
        number,
        text,
        field,
        ranks,
        odd,
        random.randrange(4),
        random.choice([rank for rank in range(ranks) if rank != odd]),
        odd_side,
        other_side,
        tuple(random.choice(calls.MODES) for _ in range(ranks)),
    )


def _draw_other(random: Random, choices: tuple[Any, ...], excluded: Any) -> Any:
    return random.choice([choice for choice in choices if choice != excluded])


def _draw_pair(
    kinds: tuple[str, ...], **values: tuple[Any, ...]
) -> Callable[..., tuple[Side, Side]]:
    """Return a function that draws sides whose calls differ in some fields."""

    def sides(random: Random, ranks: int) -> tuple[Side, Side]:
        call = calls.draw(random, ranks, kinds)
        changes = {
            name: _draw_other(random, choices or tuple(range(ranks)), getattr(call, name))
            for name, choices in values.items()
        }
        return Side((dataclasses.replace(call, **changes),)), Side((call,))

    return sides


def _draw_operation(random: Random, ranks: int) -> tuple[Side, Side]:
    first = calls.draw(random, ranks, _KINDS)
    others = tuple(kind for kind in _KINDS if _native_name(kind) != _native_name(first.kind))
    return Side((dataclasses.replace(first, kind=random.choice(others)),)), Side((first,))


def _draw_skipped(random: Random, ranks: int) -> tuple[Side, Side]:
    first, second = (side.calls[0] for side in _draw_operation(random, ranks))
    return Side((second,)), Side((first, second))


def _draw_left(random: Random, ranks: int) -> tuple[Side, Side]:
    return Side(()), Side((calls.draw(random, ranks, _KINDS),))


def _draw_order(random: Random, ranks: int) -> tuple[Side, Side]:
    call = calls.draw(random, ranks, _KINDS)
    return Side((call, call), (0, 1)), Side((call, call), (1, 0))


def _draw_message(**values: tuple[Any, ...]) -> Callable[..., tuple[Side, Side]]:
    def sides(random: Random, ranks: int) -> tuple[Side, Side]:
        call = Call("message", random.choice(calls.DTYPES), random.choice(calls.COUNTS))
        changes = {
            name: _draw_other(random, choices, getattr(call, name))
            for name, choices in values.items()
        }
        return Side((dataclasses.replace(call, **changes),)), Side((call,))

    return sides


def _draw_splits(random: Random, ranks: int) -> tuple[Side, Side]:
    call = Call("splits", random.choice(calls.DTYPES), random.choice(calls.COUNTS))
    return Side((dataclasses.replace(call, count=call.count + 1),)), Side((call,))


_DRAW_SIDES: dict[str, Callable[[Random, int], tuple[Side, Side]]] = {
    "operation": _draw_operation,
    "dtype": _draw_pair(_WITH_TENSORS, dtype=calls.DTYPES),
    "size": _draw_pair(_SIZED, count=calls.COUNTS),
    "root": _draw_pair(calls.ROOTED, root=()),
    "reduction": _draw_pair(calls.REDUCING, reduction=calls.REDUCTIONS),
    "splits": _draw_splits,
    "skipped": _draw_skipped,
    "left": _draw_left,
    "group order": _draw_order,
    "message size": _draw_message(count=calls.COUNTS),
    "message dtype": _draw_message(dtype=calls.DTYPES),
}


@dataclass(frozen=True)
class CaughtError:
    """The exception of a rank, the seconds until it was raised, and the call site."""

    error: str
    text: str
    seconds: float
    site: str


def run_rank(trial_rank: TrialRank, desync: Desync) -> CaughtError:
    """Make the calls of one rank."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(1)
    trial_rank.form("phalanx", TIMEOUT)
    group = dist.group.WORLD
    groups: list[Any] = [group]
    if desync.field == "group order":
        groups.append(dist.new_group())
    ready = _prepare_calls(trial_rank, desync, groups)
    for _ in range(desync.before):
        dist.all_reduce(torch.ones(3))
    start = time.monotonic()
    caught = CaughtError("", "", 0.0, _call_site(trial_rank.rank, 0))
    for number, run in enumerate(ready):
        try:
            run()
        except Exception as error:
            seconds = time.monotonic() - start
            site = _call_site(trial_rank.rank, number)
            caught = CaughtError(type(error).__name__, str(error), seconds, site)
            break
    if dist.is_initialized():
        dist.destroy_process_group()
    return caught


def _prepare_calls(
    trial_rank: TrialRank, desync: Desync, groups: list[Any]
) -> list[Callable[[], object]]:
    """Prepare the calls of a rank, each with its own call site."""
    is_odd = trial_rank.rank == desync.odd
    side = desync.odd_side if is_odd else desync.other_side
    if desync.field.startswith("message"):
        return _prepare_messages(trial_rank, desync, side.calls[0])
    if desync.field == "left" and is_odd:
        return [_compile_line("dist.destroy_process_group()", trial_rank.rank, 0, dist=dist)]
    if desync.field == "splits":
        return [_prepare_exchange(trial_rank, desync)]
    ready: list[Callable[[], object]] = []
    for number, (drawn, group) in enumerate(zip(side.calls, side.groups * 2, strict=False)):
        mode = desync.modes[trial_rank.rank]
        if drawn.kind in calls.BLOCKING:
            mode = "blocking"
        call = dataclasses.replace(drawn, mode=mode)
        file, line = _call_site(trial_rank.rank, number).split(":")
        ready.append(PreparedCall(call, groups[group], file, int(line)).run)
    return ready


def _prepare_messages(
    trial_rank: TrialRank, desync: Desync, call: Call
) -> list[Callable[[], object]]:
    """Prepare a message from the peer to the odd rank, then a barrier of all ranks."""
    tensor = torch.ones(call.count, dtype=getattr(torch, call.dtype))
    blocking = desync.modes[trial_rank.rank] == "blocking"
    names = {"dist": dist, "t": tensor, "odd": desync.odd, "peer": desync.peer}
    ready = []
    if trial_rank.rank == desync.peer:
        send = "dist.send(t, odd)" if blocking else "dist.isend(t, odd).wait()"
        ready.append(_compile_line(send, trial_rank.rank, 0, **names))
    elif trial_rank.rank == desync.odd:
        recv = "dist.recv(t, peer)" if blocking else "dist.irecv(t, peer).wait()"
        ready.append(_compile_line(recv, trial_rank.rank, 0, **names))
    return [*ready, dist.barrier]


def _prepare_exchange(trial_rank: TrialRank, desync: Desync) -> Callable[[], object]:
    """Prepare an exchange in which the odd rank sends its peer one element too many."""
    base, rank = desync.other_side.calls[0].count, trial_rank.rank
    input_counts, output_counts = [base] * trial_rank.size, [base] * trial_rank.size
    if rank == desync.odd:
        input_counts[desync.peer] += 1
    dtype = getattr(torch, desync.other_side.calls[0].dtype)
    names = {
        "outs": [torch.ones(count, dtype=dtype) for count in output_counts],
        "parts": [torch.ones(count, dtype=dtype) for count in input_counts],
    }
    is_async = desync.modes[rank] != "blocking"
    line = f"dist.all_to_all(outs, parts, async_op={is_async})"
    return _compile_line(f"{line}.wait()" if is_async else line, rank, 0, dist=dist, **names)


def _call_site(rank: int, number: int) -> str:
    """Return the call site of a call of a rank; each call has its own."""
    return f"rank_{rank}.py:{10 * (rank + 1) + number}"


def _compile_line(source: str, rank: int, number: int, **names: Any) -> Callable[[], object]:
    file, line = _call_site(rank, number).split(":")
    code = compile("\n" * (int(line) - 1) + source, file, "eval")
    return lambda: eval(code, names)


@dataclass
class Trial:
    """A desync and its results."""

    desync: Desync
    times: list[float] = field(default_factory=list)
    """Seconds from each rank's call to its exception."""
    raised: int = 0
    """Number of ranks that raised the expected exception."""
    expected: int = 0
    """Number of ranks that should raise it."""
    wrong: list[str] = field(default_factory=list)


def run(pool: Pool, desync: Desync) -> Trial:
    """Run a trial, then replace the ranks that died."""
    pool.begin(desync.ranks, run_rank, desync)
    trial = Trial(desync)
    for rank, answer in enumerate(pool.finish(desync.ranks, TIMEOUT + 10)):
        caught = answer.value
        if not isinstance(caught, CaughtError):
            ended = pool.replace(rank, has_died=not answer.hung)
            trial.wrong.append(f"rank {rank}: {answer.error or ended}")
        elif desync.field != "left" or rank != desync.odd:
            trial.expected += 1
            wrong = judge(desync, rank, caught)
            trial.raised += not wrong
            trial.times.append(caught.seconds)
            if wrong:
                description = f"rank {rank}: {caught.error or 'no exception'}: {caught.text}"
                trial.wrong.append(f"{description}\n    {'; '.join(wrong)}")
    return trial


def judge(desync: Desync, rank: int, caught: CaughtError) -> list[str]:
    """Return what is wrong with the exception of a rank."""
    if caught.error != "CollectiveMismatch":
        return ["expected CollectiveMismatch"]
    wrong = []
    others = [other for other in range(desync.ranks) if other != desync.odd]
    if desync.field.startswith("message") or desync.field == "splits":
        others = [desync.peer]
    text = caught.text.partition(": ")[2]
    if _call_site(desync.odd, 0) not in text:
        wrong.append(f"the odd rank's call site {_call_site(desync.odd, 0)} is missing")
    if not any(_call_site(other, 0) in text for other in others):
        wrong.append("the call site of the others is missing")
    return [*wrong, *(f"{words!r} is missing" for words in _expected(desync) if words not in text)]


def _expected(desync: Desync) -> list[str]:
    """Return the descriptions of both sides that the exception must contain."""
    sequence = desync.before + 1
    odd_side, other_side = desync.odd_side.calls, desync.other_side.calls
    if desync.field == "left":
        return [
            f"rank {desync.odd} ",
            "has left the group",
            _describe_call(other_side[0], sequence),
        ]
    if desync.field == "splits":
        counts = f"gives rank {desync.peer} {odd_side[0].count} elements", str(other_side[0].count)
        return [f"all_to_all #{sequence}", f"rank {desync.odd} ", *counts]
    if desync.field.startswith("message"):
        received, sent = (f"{call.dtype}[{call.count}]" for call in (odd_side[0], other_side[0]))
        return [f"send {sent} to rank {desync.odd}", f"recv {received} from rank {desync.peer}"]
    if desync.field == "group order":
        return ["groups in different orders", f"{_native_name(odd_side[0].kind)} #"]
    return [_describe_call(odd_side[0], sequence), _describe_call(other_side[0], sequence)]


def _native_name(kind: str) -> str:
    return _NATIVE.get(kind, kind)


def _describe_call(call: Call, sequence: int) -> str:
    """Describe an operation as error messages do."""
    words = [f"{_native_name(call.kind)} #{sequence}"]
    if "to_all" in call.kind:
        words.append(call.dtype)
    elif call.kind not in calls.WITHOUT_TENSORS:
        words.append(f"{call.dtype}[{call.count}]")
    if call.kind in calls.REDUCING:
        words.append(call.reduction)
    if call.kind in calls.ROOTED:
        words.append(f"root {call.root}")
    return " ".join(words)
