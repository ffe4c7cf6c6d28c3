"""Reading one black box, checked: what a file holds, and whether its process ended well."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from phalanx import _native

if TYPE_CHECKING:
    from phalanx.observe.directory import Directory

__all__ = ["ended_well", "read_box"]

# Of boxes of any version: the native reader says what is wrong with one of another.
_LIMIT = 16 * 2**20


def read_box(job: Directory, name: str, history: int) -> dict[str, Any]:
    """What a black box holds, as `_native.read_black_box` gives it.

    Args:
        job: where it is.
        name: of the file.
        history: how many ended operations to return, the newest.

    Raises:
        OSError: there is none, or it is no file that can be read.
        ValueError: it is damaged, or of another layout version.
    """
    box = _native.read_black_box(job.read(name, _LIMIT), history)
    if name != f"{box['pid']}.box":
        raise ValueError(f"it is that of process {box['pid']}")
    if not 0 <= box["rank"] < box["world_size"] or box["attempt"] < 0:
        raise ValueError(
            f"damaged: rank {box['rank']} of {box['world_size']}, attempt {box['attempt']}"
        )
    # While the file was copied, newer ones may have taken the place of the oldest.
    box["done"].sort(key=lambda operation: operation["end"])
    box["reports"].sort(key=lambda report: report[0])
    if not box["ending"] and box["groups"] and _has_left(box):
        box["ending"] = "left"
    return box


def ended_well(boxes: list[dict[str, Any]]) -> bool:
    """Whether the processes of a job said that they end, and not because of a failure.

    A script may end of itself after an operation has failed, with an exit code that its parent
    alone sees. So a process's last operation counts, unless it has left all its groups; if that is
    a group that couldn't be formed, in any case. Of several attempts the newest counts.
    """
    attempt = max((box["attempt"] for box in boxes), default=0)
    return bool(boxes) and all(_ended_well(box) for box in boxes if box["attempt"] == attempt)


def _ended_well(box: dict[str, Any]) -> bool:
    if box["ending"] not in ("left", "exited"):
        return False
    if _has_left(box):
        return True
    return not box["done"] or bool(box["done"][-1]["outcome"] == "ok")


def _has_left(box: dict[str, Any]) -> bool:
    """Whether a process has left all its groups, of which the last was formed.

    One that couldn't be formed counts as left too, but whoever wanted it has failed.
    """
    last = box["done"][-1] if box["done"] else None
    unformed = last is not None and last["kind"] == "join" and last["outcome"] != "ok"
    return not unformed and all(group["left"] for group in box["groups"])
