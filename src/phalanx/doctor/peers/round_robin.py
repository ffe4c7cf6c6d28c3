"""The schedule of measurements: every pair of hosts, in rounds of disjoint pairs."""

from __future__ import annotations

import secrets
from itertools import combinations, pairwise
from typing import TYPE_CHECKING, Any

from phalanx.doctor.finding import Finding
from phalanx.doctor.peers.links import Host, Link, Network
from phalanx.doctor.peers.tcp_probe import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from phalanx.doctor.peers.agents import Agent

__all__ = ["explore", "rounds"]

_OPEN_SECONDS = 90.0
"""Seconds for a host to import torch and examine itself, perhaps on a slow disk."""
_MEASURE_SECONDS = 30.0
_EVERY_PAIR = 8
"""Maximum number of ranks of a host to measure every pair; beyond it, only adjacent ranks are."""


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """Return all pairs of `count` participants, in the fewest rounds of disjoint pairs.

    Uses the circle method of round-robin tournaments: one participant stays, the others rotate.
    """
    places: list[int | None] = list(range(count))
    if count % 2:
        places.append(None)  # its partner has no pair in that round
    found = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        found.append([(one, two) for one, two in pairs if one is not None and two is not None])
        places.insert(1, places.pop())
    return found


def explore(
    agents: Mapping[int, Agent],
    hosts: Sequence[tuple[int, ...]],
    names: Sequence[str] = (),
    told: Callable[[str], None] = lambda _: None,
) -> Network:
    """Measure every pair of hosts, and the ranks of each host with each other.

    Args:
        agents: The agents, by rank.
        hosts: The ranks of each host; the first rank carries out the commands for its host.
        names: The user's names of the hosts, if they have no ranks of a job.
        told: Callback that receives progress messages.
    """
    leaders = [agents[ranks[0]] for ranks in hosts]
    token = secrets.token_bytes(TOKEN_BYTES).hex()
    told("asking the hosts what they are")
    opened = _ask([(leader, {"do": "open", "token": token}) for leader in leaders], _OPEN_SECONDS)
    if names:
        described = [_host(said, (), name) for said, name in zip(opened, names, strict=True)]
    else:
        described = [_host(said, ranks) for said, ranks in zip(opened, hosts, strict=True)]
    network = Network(described)
    present = [number for number, host in enumerate(network.hosts) if not host.error]
    plan = rounds(len(present))
    for number, pairs in enumerate(plan):
        told(f"measuring between hosts, round {number + 1} of {len(plan)}")
        ways = [(present[one], present[two]) for one, two in pairs]
        for way in (ways, [(two, one) for one, two in ways]):
            network.links += _measured(network, leaders, way)
    for number, ranks in enumerate(hosts):
        if len(ranks) > 1:
            told(f"measuring in the memory of {network.hosts[number].name}")
            network.links += _in_memory(agents, number, ranks)
    return network


def _host(said: Mapping[str, Any], ranks: tuple[int, ...], name: str = "") -> Host:
    return Host(
        name or said.get("name", "?"),
        ranks,
        said.get("address", ""),
        said.get("port", 0),
        said.get("error", ""),
        [Finding.parse(finding) for finding in said.get("findings", ())],
    )


def _ask(asked: Sequence[tuple[Agent, Mapping[str, Any]]], seconds: float) -> list[dict[str, Any]]:
    for agent, command in asked:
        agent.start(command)
    return [agent.answer(seconds) for agent, _ in asked]


def _measured(
    network: Network, leaders: Sequence[Agent], ways: Sequence[tuple[int, int]]
) -> list[Link]:
    asked = []
    for source, target in ways:
        host = network.hosts[target]
        command = {"do": "measure", "address": host.address, "port": host.port}
        asked.append((leaders[source], command))
    answers = _ask(asked, _MEASURE_SECONDS)
    return [
        Link(source, target, "network", **answer)
        for (source, target), answer in zip(ways, answers, strict=True)
    ]


def _in_memory(agents: Mapping[int, Agent], host: int, ranks: tuple[int, ...]) -> list[Link]:
    """Measure the ranks of a host, one pair at a time since pairs share the memory bandwidth."""
    pairs = combinations(ranks, 2) if len(ranks) <= _EVERY_PAIR else pairwise(ranks)
    links = []
    for one, two in pairs:
        asked = [
            (agents[one], {"do": "memory", "peer": two, "first": True}),
            (agents[two], {"do": "memory", "peer": one, "first": False}),
        ]
        there, back = _ask(asked, _MEASURE_SECONDS)
        for pair, answer in (((two, one), there), ((one, two), back)):
            links.append(Link(host, host, "memory", pair, **answer))
    return links
