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

__all__ = ["measure_network", "schedule_rounds"]

_OPEN_SECONDS = 90.0
"""Seconds for a host to import torch and run its checks, perhaps on a slow disk."""
_MEASURE_SECONDS = 30.0
_EVERY_PAIR = 8
"""Maximum number of ranks of a host to measure every pair; beyond it, only adjacent ranks are."""


def schedule_rounds(count: int) -> list[list[tuple[int, int]]]:
    """Return all pairs of `count` participants, in the fewest rounds of disjoint pairs.

    Uses the circle method for round-robin tournaments: one participant stays, the others rotate.
    """
    circle: list[int | None] = list(range(count))
    if count % 2:
        circle.append(None)  # its partner has no pair in that round
    schedule = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        schedule.append([(one, two) for one, two in pairs if one is not None and two is not None])
        circle.insert(1, circle.pop())
    return schedule


def measure_network(
    agents: Mapping[int, Agent],
    hosts: Sequence[tuple[int, ...]],
    names: Sequence[str] = (),
    on_progress: Callable[[str], None] = lambda _: None,
) -> Network:
    """Measure every pair of hosts, and the ranks of each host with each other.

    Args:
        agents: The agents, by rank.
        hosts: The ranks of each host; the first rank carries out the commands for its host.
        names: The user's names of the hosts, if they have no ranks of a job.
        on_progress: Callback that receives progress messages.
    """
    leaders = [agents[ranks[0]] for ranks in hosts]
    token = secrets.token_bytes(TOKEN_BYTES).hex()
    on_progress("checking the hosts")
    answers = _request_all(
        [(leader, {"do": "open", "token": token}) for leader in leaders], _OPEN_SECONDS
    )
    if names:
        hosts_found = [
            _parse_host(answer, (), name) for answer, name in zip(answers, names, strict=True)
        ]
    else:
        hosts_found = [
            _parse_host(answer, ranks) for answer, ranks in zip(answers, hosts, strict=True)
        ]
    network = Network(hosts_found)
    present = [number for number, host in enumerate(network.hosts) if not host.error]
    plan = schedule_rounds(len(present))
    for number, pairs in enumerate(plan):
        on_progress(f"measuring between hosts, round {number + 1} of {len(plan)}")
        links = [(present[one], present[two]) for one, two in pairs]
        for direction in (links, [(two, one) for one, two in links]):
            network.links += _measure_links(network, leaders, direction)
    for number, ranks in enumerate(hosts):
        if len(ranks) > 1:
            on_progress(f"measuring shared memory on {network.hosts[number].name}")
            network.links += _measure_memory(agents, number, ranks)
    return network


def _parse_host(answer: Mapping[str, Any], ranks: tuple[int, ...], name: str = "") -> Host:
    return Host(
        name or answer.get("name", "?"),
        ranks,
        answer.get("address", ""),
        answer.get("port", 0),
        answer.get("error", ""),
        [Finding.parse(finding) for finding in answer.get("findings", ())],
    )


def _request_all(
    requests: Sequence[tuple[Agent, Mapping[str, Any]]], seconds: float
) -> list[dict[str, Any]]:
    for agent, command in requests:
        agent.start(command)
    return [agent.answer(seconds) for agent, _ in requests]


def _measure_links(
    network: Network, leaders: Sequence[Agent], links: Sequence[tuple[int, int]]
) -> list[Link]:
    requests = []
    for source, target in links:
        host = network.hosts[target]
        command = {"do": "measure", "address": host.address, "port": host.port}
        requests.append((leaders[source], command))
    answers = _request_all(requests, _MEASURE_SECONDS)
    return [
        Link(source, target, "network", **answer)
        for (source, target), answer in zip(links, answers, strict=True)
    ]


def _measure_memory(agents: Mapping[int, Agent], host: int, ranks: tuple[int, ...]) -> list[Link]:
    """Measure the ranks of a host, one pair at a time since pairs share the memory bandwidth."""
    pairs = combinations(ranks, 2) if len(ranks) <= _EVERY_PAIR else pairwise(ranks)
    links = []
    for one, two in pairs:
        requests = [
            (agents[one], {"do": "memory", "peer": two, "first": True}),
            (agents[two], {"do": "memory", "peer": one, "first": False}),
        ]
        forward, reverse = _request_all(requests, _MEASURE_SECONDS)
        for pair, answer in (((two, one), forward), ((one, two), reverse)):
            links.append(Link(host, host, "memory", pair, **answer))
    return links
