"""Results of the drivers, as tables and as stored records."""

from __future__ import annotations

import datetime
import io
import json
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from phalanx.bench.machine import machine, versions
from tests.fault_injection import desyncs, endurance, kills, matrix, training

# Seconds within which so large a part of all survivors must have raised.
LIMITS = {0.5: 0.010, 0.99: 0.100, 1.0: 1.0}


def summary_of_kills(trials: Sequence[kills.Trial], left: list[str]) -> dict[str, Any]:
    """What was measured: all deaths together, and by what they have in common."""
    keys: tuple[Callable[[kills.Trial], str], ...] = (
        lambda trial: trial.kill.method,
        lambda trial: trial.kill.moment,
        lambda trial: f"{trial.kill.ranks} ranks",
    )
    groups = {name: group for key in keys for name, group in _grouped(trials, key).items()}
    return {
        "all": _of_kills(trials),
        "by": {name: _of_kills(group) for name, group in groups.items()},
        "wrong": [f"{trial.kill}: {what}" for trial in trials for what in trial.wrong],
        "left": left,
    }


def _grouped(
    trials: Sequence[kills.Trial], key: Callable[[kills.Trial], str]
) -> dict[str, list[kills.Trial]]:
    names = sorted({key(trial) for trial in trials})
    return {name: [trial for trial in trials if key(trial) == name] for name in names}


def _of_kills(trials: Iterable[kills.Trial]) -> dict[str, Any]:
    chosen = list(trials)
    times = [seconds for trial in chosen for seconds in trial.times]
    return {
        "deaths": len(chosen),
        "survivors": sum(trial.kill.ranks - 1 for trial in chosen),
        "raised": len(times),
        "named": sum(trial.named for trial in chosen),
        "explained": sum(trial.explained for trial in chosen),
        "seconds": {str(part): _quantile(times, part) for part in (0.1, *LIMITS)},
        "growth": max((trial.growth for trial in chosen), default=0),
    }


def _quantile(times: list[float], part: float) -> float | None:
    """The time within which so large a part of all was done: one that was measured."""
    if not times:
        return None
    return round(float(np.quantile(times, part, method="inverted_cdf")), 6)


def failures_of_kills(summary: dict[str, Any], *, timed: bool) -> list[str]:
    """What is not as it must be."""
    found, seconds = summary["all"], summary["all"]["seconds"]
    wrong = [*summary["wrong"], *summary["left"]]
    silent = {name: found["survivors"] - found[name] for name in ("raised", "named")}
    wrong += [f"{count} survivors have not {name} it" for name, count in silent.items() if count]
    limits = LIMITS if timed else {1.0: 1.0}
    for part, limit in limits.items():
        if seconds[str(part)] is None or seconds[str(part)] > limit:
            wrong.append(f"{part:.0%} of the survivors took {seconds[str(part)]} s, not {limit} s")
    return wrong


def table_of_kills(summary: dict[str, Any]) -> Table:
    """One line for all, and one for each group of trials."""
    table = _table("deaths", "survivors", "raised", "named", "how", "10%", "50%", "99%", "all")
    table.caption = "10% to all: milliseconds within which so many survivors had the exception"
    for name, found in {"all": summary["all"], **summary["by"]}.items():
        counts = [found[key] for key in ("deaths", "survivors", "raised", "named", "explained")]
        times = [_milliseconds(seconds) for seconds in found["seconds"].values()]
        table.add_row(name, *map(str, counts), *times)
    return table


def summary_of_matrix(trials: Sequence[matrix.Trial]) -> dict[str, Any]:
    """How many faults were explained right, by the kind of verdict that is expected."""
    kinds = sorted({trial.case.kind for trial in trials})
    groups = {kind: [trial for trial in trials if trial.case.kind == kind] for kind in kinds}
    return {
        "all": _of_matrix(trials),
        "by": {kind: _of_matrix(group) for kind, group in groups.items()},
        "verdicts": {trial.case.name: trial.diagnosis for trial in trials},
        "wrong": [f"{trial.case.name}: {what}" for trial in trials for what in trial.wrong],
    }


def _of_matrix(trials: Sequence[matrix.Trial]) -> dict[str, int]:
    return {
        "faults": len(trials),
        "ranks": sum(trial.names_ranks for trial in trials),
        "right": sum(trial.right for trial in trials),
    }


def table_of_matrix(summary: dict[str, Any]) -> Table:
    """A line for all, and one for each kind of verdict."""
    table = _table("faults", "ranks", "right")
    table.caption = "ranks: those at fault are named; right: also the cause, and what helps"
    for name, found in {"all": summary["all"], **summary["by"]}.items():
        table.add_row(name, *map(str, found.values()))
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, caption_justify="left")
    table.add_column("", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right")
    return table


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f}"


def summary_of_desyncs(trials: Sequence[desyncs.Trial]) -> dict[str, Any]:
    """By field: how many ranks should have raised, and how many did with all that it must say."""
    fields: dict[str, Any] = {}
    for field in desyncs.FIELDS:
        chosen = [trial for trial in trials if trial.desync.field == field]
        times = [seconds for trial in chosen for seconds in trial.times]
        fields[field] = {
            "desyncs": len(chosen),
            "ranks": sum(trial.expected for trial in chosen),
            "raised": sum(trial.raised for trial in chosen),
            "seconds": {str(part): _quantile(times, part) for part in (0.5, 1.0)},
        }
    wrong = [f"{trial.desync}: {what}" for trial in trials for what in trial.wrong]
    return {"by": fields, "wrong": wrong}


def table_of_desyncs(summary: dict[str, Any]) -> Table:
    """A line for each field."""
    table = _table("desyncs", "ranks", "raised", "50%", "all")
    table.caption = "50%, all: milliseconds from a rank's call to its exception"
    for field, found in summary["by"].items():
        times = [_milliseconds(seconds) for seconds in found["seconds"].values()]
        counts = map(str, (found["desyncs"], found["ranks"], found["raised"]))
        table.add_row(field, *counts, *times)
    return table


def summary_of_training(trials: Sequence[training.Trial]) -> dict[str, Any]:
    """How many kills struck how many runs, and what didn't end as it must."""
    return {
        "kills": sum(trial.effective_kills for trial in trials),
        "runs": len(trials),
        "epochs": training.EPOCHS,
        "by": {name: _of_training(group) for name, group in _grouped_training(trials).items()},
        "wrong": [f"{trial}: {what}" for trial in trials for what in trial.wrong],
    }


def _grouped_training(trials: Sequence[training.Trial]) -> dict[str, list[training.Trial]]:
    groups: dict[str, list[training.Trial]] = {}
    for trial in trials:
        kind = "DistributedDataParallel" if trial.uses_ddp else "average_gradients"
        groups.setdefault(f"{trial.ranks} ranks, {kind}", []).append(trial)
    return dict(sorted(groups.items()))


def _of_training(trials: list[training.Trial]) -> dict[str, int]:
    return {
        "runs": len(trials),
        "kills": sum(trial.effective_kills for trial in trials),
        "equal": sum(not trial.wrong for trial in trials),
    }


def table_of_training(summary: dict[str, Any]) -> Table:
    """A line for each kind of run."""
    table = _table("runs", "kills", "equal")
    table.caption = "equal: runs that ended as one that nobody disturbed, bit for bit"
    for name, found in summary["by"].items():
        table.add_row(name, *(str(found[key]) for key in ("runs", "kills", "equal")))
    return table


def summary_of_operations(samples: list[list[endurance.Sample]]) -> dict[str, Any]:
    """By rank: what it held as the operations went on, and whether that is flat."""
    ranks = []
    for taken in samples:
        growth = endurance.growth(taken)
        ranks.append(
            {
                "flat": growth.is_flat,
                "grown": growth.resident,
                "blocks_grown": growth.blocks,
                "more": growth.more,
                "columns": ["operations", "seconds", "resident", "descriptors", "threads"],
                "samples": [
                    [
                        sample.operations,
                        round(sample.seconds, 1),
                        sample.resources.resident,
                        sample.resources.descriptors,
                        sample.resources.threads,
                    ]
                    for sample in taken
                ],
            }
        )
    return {"slack": endurance.SLACK, "ranks": ranks}


def table_of_operations(samples: list[list[endurance.Sample]]) -> Table:
    """A line for about each tenth of the operations, with what the ranks held."""
    table = _table("seconds", "MiB of each rank", "descriptors", "threads")
    step = max(1, len(samples[0]) // 10)
    for row in list(zip(*samples, strict=True))[::step]:
        first = row[0]
        table.add_row(
            f"{first.operations:,}",
            f"{first.seconds:.0f}",
            *(
                " ".join(f"{value(sample)}" for sample in row)
                for value in (
                    lambda sample: f"{sample.resources.resident / 2**20:.1f}",
                    lambda sample: sample.resources.descriptors,
                    lambda sample: sample.resources.threads,
                )
            ),
        )
    return table


def record(path: Path, title: str, table: Table, found: dict[str, Any]) -> None:
    """Write what was found: `path` with .json for programs, with .md for readers."""
    facts = {
        "command": f"make faults ARGS={shlex.quote(shlex.join(sys.argv[1:]))}",
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "versions": versions(),
    }
    path.with_suffix(".json").write_text(json.dumps({**facts, **found}, indent=1) + "\n")
    text = io.StringIO()
    Console(file=text, width=110).print(table)
    lines = [line.rstrip() for line in text.getvalue().splitlines()]
    where = f"{facts['machine']['processor']}, {facts['machine']['cores']} cores"
    head = [f"# {title}", "", f"`{facts['command']}`, {facts['date']}, {where}:", ""]
    path.with_suffix(".md").write_text("\n".join([*head, "```", *lines, "```", ""]))
