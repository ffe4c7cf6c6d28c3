"""The file of one flight recorder: its content, validated, and whether its process ended well."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from phalanx import _native
from phalanx.recorder.job_directory import get_recorder_name

if TYPE_CHECKING:
    from phalanx.recorder.job_directory import JobDirectory

# Suffices for recorders of any version: the native reader reports a version that it cannot read.
_LIMIT = 16 * 2**20


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
