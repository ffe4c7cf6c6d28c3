"""Result tables and records of the fault injection drivers."""

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
from tests.fault_injection import (
    desyncs,
    endurance,
    healthy,
    kills,
    matrix,
    replacements,
    servers,
    shrinks,
    training,
)

# For each fraction of the survivors, the seconds within which they must have raised.
LIMITS = {0.5: 0.010, 0.99: 0.100, 1.0: 1.0}


def summarize_kills(trials: Sequence[kills.Trial], leftovers: list[str]) -> dict[str, Any]:
    """Summarize all deaths together, and grouped by common properties."""
    keys: tuple[Callable[[kills.Trial], str], ...] = (
        lambda trial: trial.kill.method,
        lambda trial: trial.kill.moment,
        lambda trial: f"{trial.kill.ranks} ranks",
    )
    groups = {name: group for key in keys for name, group in _group_kills(trials, key).items()}
    return {
        "all": _count_kills(trials),
        "by": {name: _count_kills(group) for name, group in groups.items()},
        "wrong": [f"{trial.kill}: {problem}" for trial in trials for problem in trial.wrong],
        "left": leftovers,
    }


def _group_kills(
    trials: Sequence[kills.Trial], key: Callable[[kills.Trial], str]
) -> dict[str, list[kills.Trial]]:
    names = sorted({key(trial) for trial in trials})
    return {name: [trial for trial in trials if key(trial) == name] for name in names}


def _count_kills(trials: Iterable[kills.Trial]) -> dict[str, Any]:
    selected = list(trials)
    times = [seconds for trial in selected for seconds in trial.times]
    return {
        "deaths": len(selected),
        "survivors": sum(trial.kill.ranks - 1 for trial in selected),
        "raised": len(times),
        "named": sum(trial.named for trial in selected),
        "explained": sum(trial.explained for trial in selected),
        "seconds": {str(fraction): _quantile(times, fraction) for fraction in (0.1, *LIMITS)},
        "growth": max((trial.growth for trial in selected), default=0),
    }


def _quantile(times: list[float], fraction: float) -> float | None:
    """Return the measured time within which this fraction of all was done."""
    if not times:
        return None
    return round(float(np.quantile(times, fraction, method="inverted_cdf")), 6)


def find_kill_failures(summary: dict[str, Any], *, timed: bool) -> list[str]:
    """Return descriptions of all failures."""
    results, seconds = summary["all"], summary["all"]["seconds"]
    problems = [*summary["wrong"], *summary["left"]]
    missing = {name: results["survivors"] - results[name] for name in ("raised", "named")}
    problems += [
        f"{count} survivors have not {name} it" for name, count in missing.items() if count
    ]
    limits = LIMITS if timed else {1.0: 1.0}
    for fraction, limit in limits.items():
        if seconds[str(fraction)] is None or seconds[str(fraction)] > limit:
            problems.append(
                f"{fraction:.0%} of the survivors took {seconds[str(fraction)]} s, not {limit} s"
            )
    return problems


def build_kills_table(summary: dict[str, Any]) -> Table:
    """Build a table with a line for all trials and one for each group."""
    table = _make_table("deaths", "survivors", "raised", "named", "how", "10%", "50%", "99%", "all")
    table.caption = "10% to all: milliseconds within which this share of the survivors had raised"
    for name, results in {"all": summary["all"], **summary["by"]}.items():
        counts = [results[key] for key in ("deaths", "survivors", "raised", "named", "explained")]
        times = [_milliseconds(seconds) for seconds in results["seconds"].values()]
        table.add_row(name, *map(str, counts), *times)
    return table


def summarize_healthy(trials: Sequence[healthy.Trial]) -> dict[str, Any]:
    """Summarize the explanations of healthy jobs, by program."""
    return {
        "by": {
            program: {
                "jobs": len(chosen := [each for each in trials if each.run.program == program]),
                "explanations": sum(each.kinds.total() for each in chosen),
                "wrong": sum(len(each.wrong) for each in chosen),
            }
            for program in sorted({each.run.program for each in trials})
        },
        "wrong": [f"{each.run}: {problem}" for each in trials for problem in each.wrong],
    }


def build_healthy_table(summary: dict[str, Any]) -> Table:
    """Build a table with a line for each program."""
    table = _make_table("jobs", "explanations", "wrong")
    for program, counts in summary["by"].items():
        table.add_row(program, *map(str, counts.values()))
    return table


# For each fraction of the survivors, the seconds from a death to their next collective.
SHRINK_LIMITS = {0.5: 0.020, 0.99: 0.100, 1.0: 1.0}


def summarize_shrinks(trials: Sequence[shrinks.Trial], leftovers: list[str]) -> dict[str, Any]:
    """Summarize all trials together, and by the number of ranks at their start."""
    sizes = sorted({trial.shrinking.ranks for trial in trials})
    groups = {
        f"{size} ranks": [trial for trial in trials if trial.shrinking.ranks == size]
        for size in sizes
    }
    return {
        "all": _count_shrinks(trials),
        "by": {name: _count_shrinks(group) for name, group in groups.items()},
        "wrong": [f"{trial.shrinking}: {problem}" for trial in trials for problem in trial.wrong],
        "left": leftovers,
    }


def _count_shrinks(trials: Iterable[shrinks.Trial]) -> dict[str, Any]:
    selected = list(trials)
    times = [seconds for trial in selected for seconds in trial.times]
    return {
        "trials": len(selected),
        "deaths": sum(len(trial.shrinking.victims) for trial in selected),
        "shrinks": sum(trial.shrinks for trial in selected),
        "seconds": {
            str(fraction): _quantile(times, fraction) for fraction in (0.1, *SHRINK_LIMITS)
        },
        "growth": max((trial.growth for trial in selected), default=0),
    }


def build_shrinks_table(summary: dict[str, Any]) -> Table:
    """Build a table with a line for all trials and one for each number of ranks."""
    table = _make_table("trials", "deaths", "shrinks", "10%", "50%", "99%", "all")
    table.caption = (
        "shrinks: those of all survivors; 10% to all: milliseconds within which this share of them "
        "had completed a collective after a death"
    )
    for name, results in {"all": summary["all"], **summary["by"]}.items():
        times = [_milliseconds(seconds) for seconds in results["seconds"].values()]
        counts = [str(results[key]) for key in ("trials", "deaths", "shrinks")]
        table.add_row(name, *counts, *times)
    return table


def find_shrink_failures(summary: dict[str, Any], *, timed: bool, hosts: int = 1) -> list[str]:
    """Return descriptions of all failures."""
    seconds = summary["all"]["seconds"]
    limits = (SHRINK_LIMITS if hosts == 1 else {1.0: SHRINK_LIMITS[1.0]}) if timed else {}
    late = [
        f"{fraction:.0%} of the survivors took {seconds[str(fraction)]} s, not {limit} s"
        for fraction, limit in limits.items()
        if seconds[str(fraction)] is None or seconds[str(fraction)] > limit
    ]
    return [*summary["wrong"], *summary["left"], *late]


REPLACEMENT_LIMITS = {0.99: 1.0}


def summarize_replacements(trial: replacements.Trial) -> dict[str, Any]:
    """Summarize a trial."""
    quantiles = {
        str(fraction): _quantile(trial.times, fraction)
        for fraction in (0.1, 0.5, *REPLACEMENT_LIMITS, 1.0)
    }
    rate = trial.steps / trial.seconds if trial.seconds else 0.0
    return {
        "ranks": trial.ranks,
        "spares": trial.spares,
        "kills": trial.kills,
        "steps": trial.steps,
        "seconds": quantiles,
        "share_of_steps": rate / trial.undisturbed if trial.undisturbed else None,
        "mean_between_kills": trial.seconds / max(trial.kills, 1),
        "wrong": trial.wrong,
    }


def build_replacements_table(summary: dict[str, Any]) -> Table:
    """Build a table with a line for the trial."""
    table = _make_table("ranks", "spares", "kills", "steps", "10%", "50%", "99%", "all", "share")
    table.caption = (
        "10% to all: milliseconds within which, after this share of the kills, all ranks had "
        "completed a step again; share: of the steps that an undisturbed run makes in the same time"
    )
    times = [_milliseconds(seconds) for seconds in summary["seconds"].values()]
    share = summary["share_of_steps"]
    counts = [f"{summary[key]:,}" for key in ("ranks", "spares", "kills", "steps")]
    mean = f"a kill each {summary['mean_between_kills']:.1f} s"
    table.add_row(mean, *counts, *times, "-" if share is None else f"{share:.0%}")
    return table


def find_replacement_failures(summary: dict[str, Any], *, timed: bool) -> list[str]:
    """Return descriptions of all failures."""
    late = [
        f"{fraction:.0%} of the replacements took {seconds} s, not {limit} s"
        for fraction, limit in (REPLACEMENT_LIMITS if timed else {}).items()
        if (seconds := summary["seconds"][str(fraction)]) is None or seconds > limit
    ]
    return [*summary["wrong"], *late]


def summarize_servers(trials: Sequence[servers.Trial], leftovers: list[str]) -> dict[str, Any]:
    """Summarize the trials, one for each kind of training."""
    return {
        "by": {_name_training(trial): _count_servers(trial) for trial in trials},
        "wrong": [
            *(f"{_name_training(trial)}: {each}" for trial in trials for each in trial.wrong),
            *leftovers,
        ],
    }


def _name_training(trial: servers.Trial) -> str:
    return "in step" if trial.staleness is None else f"staleness {trial.staleness}"


def _count_servers(trial: servers.Trial) -> dict[str, Any]:
    fractions = (0.5, *REPLACEMENT_LIMITS, 1.0)
    return {
        "kills": trial.kills,
        "deaths_in_copies": trial.deaths_in_copies,
        "updates": trial.updates,
        "mean_between_kills": trial.seconds / max(trial.kills, 1),
        "seconds": {str(fraction): _quantile(trial.times, fraction) for fraction in fractions},
    }


def build_servers_table(summary: dict[str, Any]) -> Table:
    """Build a table with a line for each kind of training."""
    table = _make_table("training", "kills", "in copies", "updates", "50%", "99%", "all")
    table.caption = (
        "in copies: deaths of workers that were getting a copy; 50% to all: milliseconds from the "
        "kill to the end of a trainer's next update, for this share of the kills and trainers"
    )
    for name, found in summary["by"].items():
        counts = [f"{found[key]:,}" for key in ("kills", "deaths_in_copies", "updates")]
        table.add_row(name, *counts, *map(_milliseconds, found["seconds"].values()))
    return table


def find_server_failures(summary: dict[str, Any], *, timed: bool) -> list[str]:
    """Return descriptions of all failures."""
    late = [
        f"{name}: {fraction:.0%} of the failovers took {seconds} s, not {limit} s"
        for name, found in summary["by"].items()
        for fraction, limit in (REPLACEMENT_LIMITS if timed else {}).items()
        if (seconds := found["seconds"][str(fraction)]) is None or seconds > limit
    ]
    return [*summary["wrong"], *late]


def summarize_matrix(trials: Sequence[matrix.Trial]) -> dict[str, Any]:
    """Count the faults that were explained correctly, by the expected kind of verdict."""
    kinds = sorted({trial.case.kind for trial in trials})
    groups = {kind: [trial for trial in trials if trial.case.kind == kind] for kind in kinds}
    return {
        "all": _count_matrix(trials),
        "by": {kind: _count_matrix(group) for kind, group in groups.items()},
        "verdicts": {trial.case.name: trial.diagnosis for trial in trials},
        "wrong": [f"{trial.case.name}: {problem}" for trial in trials for problem in trial.wrong],
    }


def _count_matrix(trials: Sequence[matrix.Trial]) -> dict[str, int]:
    return {
        "faults": len(trials),
        "ranks": sum(trial.names_ranks for trial in trials),
        "right": sum(trial.right for trial in trials),
    }


def build_matrix_table(summary: dict[str, Any]) -> Table:
    """Build a table with a line for all faults and one for each kind of verdict."""
    table = _make_table("faults", "ranks", "right")
    table.caption = "ranks: the ranks at fault are named; right: so are the cause and the remedy"
    for name, results in {"all": summary["all"], **summary["by"]}.items():
        table.add_row(name, *map(str, results.values()))
    return table


def _make_table(*columns: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, caption_justify="left")
    table.add_column("", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right")
    return table


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f}"


def summarize_desyncs(trials: Sequence[desyncs.Trial]) -> dict[str, Any]:
    """Count, by field, the ranks that should have raised and those with a complete message."""
    fields: dict[str, Any] = {}
    for field in desyncs.FIELDS:
        selected = [trial for trial in trials if trial.desync.field == field]
        times = [seconds for trial in selected for seconds in trial.times]
        fields[field] = {
            "desyncs": len(selected),
            "ranks": sum(trial.expected for trial in selected),
            "raised": sum(trial.raised for trial in selected),
            "seconds": {str(fraction): _quantile(times, fraction) for fraction in (0.5, 1.0)},
        }
    problems = [f"{trial.desync}: {problem}" for trial in trials for problem in trial.wrong]
    return {"by": fields, "wrong": problems}


def build_desyncs_table(summary: dict[str, Any]) -> Table:
    """Build a table with a line for each field."""
    table = _make_table("desyncs", "ranks", "raised", "50%", "all")
    table.caption = "50%, all: milliseconds from a rank's call to its exception"
    for field, results in summary["by"].items():
        times = [_milliseconds(seconds) for seconds in results["seconds"].values()]
        counts = map(str, (results["desyncs"], results["ranks"], results["raised"]))
        table.add_row(field, *counts, *times)
    return table


def summarize_training(trials: Sequence[training.Trial]) -> dict[str, Any]:
    """Count kills and runs, and list runs with a wrong result."""
    return {
        "kills": sum(trial.effective_kills for trial in trials),
        "runs": len(trials),
        "epochs": training.EPOCHS,
        "by": {name: _count_training(group) for name, group in _group_training(trials).items()},
        "wrong": [f"{trial}: {problem}" for trial in trials for problem in trial.wrong],
    }


def _group_training(trials: Sequence[training.Trial]) -> dict[str, list[training.Trial]]:
    groups: dict[str, list[training.Trial]] = {}
    for trial in trials:
        kind = "DistributedDataParallel" if trial.uses_ddp else "average_gradients"
        groups.setdefault(f"{trial.ranks} ranks, {kind}", []).append(trial)
    return dict(sorted(groups.items()))


def _count_training(trials: list[training.Trial]) -> dict[str, int]:
    return {
        "runs": len(trials),
        "kills": sum(trial.effective_kills for trial in trials),
        "equal": sum(not trial.wrong for trial in trials),
    }


def build_training_table(summary: dict[str, Any]) -> Table:
    """Build a table with a line for each kind of run."""
    table = _make_table("runs", "kills", "equal")
    table.caption = "equal: runs with the result of an undisturbed run, bit for bit"
    for name, results in summary["by"].items():
        table.add_row(name, *(str(results[key]) for key in ("runs", "kills", "equal")))
    return table


def summarize_operations(samples: list[list[endurance.Sample]]) -> dict[str, Any]:
    """Summarize, by rank, the resources held over time, and whether they are constant."""
    ranks = []
    for rank_samples in samples:
        growth = endurance.growth(rank_samples)
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
                    for sample in rank_samples
                ],
            }
        )
    return {"slack": endurance.SLACK, "ranks": ranks}


def build_operations_table(samples: list[list[endurance.Sample]]) -> Table:
    """Build a table with a line for each tenth of the operations and the ranks' resources."""
    table = _make_table("seconds", "MiB of each rank", "descriptors", "threads")
    step = max(1, len(samples[0]) // 10)
    for rank_samples in list(zip(*samples, strict=True))[::step]:
        first = rank_samples[0]
        table.add_row(
            f"{first.operations:,}",
            f"{first.seconds:.0f}",
            *(
                " ".join(f"{value(sample)}" for sample in rank_samples)
                for value in (
                    lambda sample: f"{sample.resources.resident / 2**20:.1f}",
                    lambda sample: sample.resources.descriptors,
                    lambda sample: sample.resources.threads,
                )
            ),
        )
    return table


def build_schedules_table(summary: dict[str, Any], seconds: float) -> Table:
    """Build a table with one line."""
    table = _make_table("kinds", "hosts", "seconds", "failures")
    table.add_row(
        f"{summary['programs']:,}",
        ", ".join(summary["kinds"]),
        summary["hosts"],
        f"{seconds:.0f}",
        str(len(summary["wrong"])),
    )
    return table


def write_record(path: Path, title: str, table: Table, results: dict[str, Any]) -> None:
    """Write the results to `path` with the suffixes .json and .md."""
    facts = {
        "command": f"make faults ARGS={shlex.quote(shlex.join(sys.argv[1:]))}",
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "versions": versions(),
    }
    path.with_suffix(".json").write_text(json.dumps({**facts, **results}, indent=1) + "\n")
    text = io.StringIO()
    Console(file=text, width=110).print(table)
    lines = [line.rstrip() for line in text.getvalue().splitlines()]
    machine_text = f"{facts['machine']['processor']}, {facts['machine']['cores']} cores"
    header = [f"# {title}", "", f"`{facts['command']}`, {facts['date']}, {machine_text}:", ""]
    path.with_suffix(".md").write_text("\n".join([*header, "```", *lines, "```", ""]))
