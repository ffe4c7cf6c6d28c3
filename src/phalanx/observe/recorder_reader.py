"""Validated reading of one flight recorder.

Its content, its rank in the objects of `model`, and whether its process ended well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from phalanx import _native
from phalanx.observe import model
from phalanx.observe.job_directory import get_recorder_name

if TYPE_CHECKING:
    from phalanx.observe.job_directory import JobDirectory

# Suffices for recorders of any version: the native reader reports a version that it cannot read.
_LIMIT = 16 * 2**20
_SAME_NAMES = (
    *("rank", "pid", "host", "clock", "opened", "ending", "exception", "ended"),
    *("operations", "note", "main_thread_wait", "lone_wait"),
)
"""The entries of a recorder that `model.Rank` has under the same names."""
_MAX_RANKS = 2**16
"""Maximum number of ranks of a group; a longer list was not written by a rank."""


def read_recorder(job: JobDirectory, name: str, history: int) -> dict[str, Any]:
    """Return the content of a flight recorder, as `_native.read_flight_recorder` returns it.

    Args:
        job: The directory that contains it.
        name: The name of the file.
        history: The maximum number of ended operations to return, the newest.

    Raises:
        OSError: The file does not exist or cannot be read.
        ValueError: The recorder is damaged or of another layout version.
    """
    recorder = _native.read_flight_recorder(job.read(name, _LIMIT), history)
    if name != get_recorder_name(recorder["pid"]):
        raise ValueError(f"it belongs to process {recorder['pid']}")
    if not 0 <= recorder["rank"] < recorder["world_size"] or recorder["attempt"] < 0:
        raise ValueError(
            f"damaged: rank {recorder['rank']} of {recorder['world_size']}, "
            f"attempt {recorder['attempt']}"
        )
    # While the file was copied, newer entries may have replaced the oldest.
    recorder["done"].sort(key=lambda operation: operation["end"])
    recorder["reports"].sort(key=lambda report: report[0])
    if not recorder["ending"] and recorder["groups"] and _has_left(recorder):
        recorder["ending"] = "left"
    return recorder


def build_rank(recorder: dict[str, Any], start: model.Start | None = None) -> model.Rank:
    """Return the rank that wrote a flight recorder.

    Args:
        recorder: The content of the recorder, as returned by `read_recorder` or by the native core.
        start: The launcher's record of the rank.
    """
    return model.Rank(
        **{name: recorder[name] for name in _SAME_NAMES},
        groups=tuple(map(_build_group, recorder["groups"])),
        open=tuple(model.Operation(**operation) for operation in recorder["open"]),
        history=tuple(model.Operation(**operation) for operation in recorder["done"]),
        reports=tuple(model.Report(*report) for report in recorder["reports"]),
        links=tuple(model.Link(**link) for link in recorder["links"]),
        start=start,
    )


def _build_group(record: dict[str, Any]) -> model.Group:
    members = parse_rank_ranges(record["members"])
    # A list that is longer than the group was not written by a rank.
    members = members if len(members) <= record["size"] else ()
    return model.Group(**{**record, "members": members})


def parse_rank_ranges(text: str) -> tuple[int, ...]:
    """Parse the members of a recorded group, such as "0-3,6"; empty if malformed.

    Returns:
        The ranks in the job by rank in the group.
    """
    ranks: list[int] = []
    for run in filter(None, text.split(",")):
        first, _, last = run.partition("-")
        if not (first.isdecimal() and (last or first).isdecimal()):
            return ()
        numbers = range(int(first), int(last or first) + 1)
        if len(ranks) + len(numbers) > _MAX_RANKS:
            return ()
        ranks += numbers
    return tuple(ranks)


def ended_well(recorders: list[dict[str, Any]]) -> bool:
    """Return whether all processes of a job recorded their end, and none ended due to a failure.

    A script may exit normally after an operation has failed, with an exit code that only its parent
    sees. Therefore the last operation of a process must have succeeded, unless the process has left
    all its groups; a group that could not be formed always counts as a failure. Only the newest
    attempt counts.
    """
    attempt = max((recorder["attempt"] for recorder in recorders), default=0)
    return bool(recorders) and all(
        _ended_well(recorder) for recorder in recorders if recorder["attempt"] == attempt
    )


def _ended_well(recorder: dict[str, Any]) -> bool:
    done = recorder["done"]
    return recorder["ending"] in ("left", "exited") and (
        _has_left(recorder) or not done or bool(done[-1]["outcome"] == "ok")
    )


def _has_left(recorder: dict[str, Any]) -> bool:
    """Return whether a process has left all its groups and the last one had been formed.

    A group that could not be formed is recorded as left too, but its process has failed.
    """
    last = recorder["done"][-1] if recorder["done"] else None
    unformed = last is not None and last["kind"] == "join" and last["outcome"] != "ok"
    return not unformed and all(group["left_time"] for group in recorder["groups"])
