"""The formation of the native group that a process group stands on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from torch.distributed import Store  # type: ignore[attr-defined]

from phalanx import topology
from phalanx.backend.failure import FailureFormatter
from phalanx.backend.membership import UnusableGroup
from phalanx.topology import HostLink


class Formed(NamedTuple):
    """A native group that was formed, as this rank sees it.

    Attributes:
        native: The native group, or the group that takes its place if ranks are on several hosts.
        store: A store that only the ranks of this native group use.
        hosts: The ranks of each host.
        places: The place of each rank in its machine (`topology.places`).
        job_ranks: The rank in the job, as at its start, of each rank.
    """

    native: Any
    store: Store
    hosts: tuple[tuple[int, ...], ...]
    places: tuple[Sequence[int], ...]
    job_ranks: tuple[int, ...]

    def close(self) -> None:
        """Leave the native group."""
        self.native.close()


Form = Callable[..., Formed]
"""`form` with the name and the link of a process group."""


def form(
    store: Store,
    rank: int,
    size: int,
    timeout: timedelta,
    members: Sequence[int],
    describe_missing: Callable[[int, str], str] | None = None,
    check: Callable[[], None] | None = None,
    reference: int = 0,
    *,
    name: str,
    link: HostLink,
) -> Formed:
    """Form a native group with the other ranks; blocks until all of them do. See `topology.join`.

    Args:
        store: A store of the group's ranks.
        rank: This rank in the group.
        size: World size of the group.
        timeout: The time to wait for the other ranks.
        members: Ranks in the job by rank in the group; all if empty.
        describe_missing: Returns a description of a missing rank, by rank and claimant.
        check: A function that is called during all waits, and may raise to end them.
        reference: The rank with which all others must agree in versions and link.
        name: The group's name.
        link: The link between hosts.
    """
    store, layout, records, native = topology.join(
        store, rank, size, timeout, name, members, describe_missing, link, check, reference
    )
    group: Any = native
    if len(layout.hosts) > 1:
        # Groups of one host, the common case, do not need the modules of `hierarchical`.
        from phalanx.hierarchical import form_group

        group = form_group(native, layout, records, store, link, timeout, FailureFormatter, check)
    places = tuple(each.place for each in records)
    return Formed(group, store, layout.hosts, places, tuple(members) or tuple(range(size)))


def unformed(store: Store, size: int, members: Sequence[int]) -> Formed:
    """Return the substitute for a group that has no ranks before `reconfigure` is called."""
    reason = (
        "the group was made with enable_reconfigure=True, and has no ranks yet: call "
        "reconfigure() on all of them first"
    )
    ranks = tuple(range(size))
    return Formed(UnusableGroup(reason), store, (ranks,), (), tuple(members) or ranks)
