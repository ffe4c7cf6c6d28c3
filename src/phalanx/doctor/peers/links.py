"""Links between hosts: the schedule of their measurement, the results, and the findings."""

from __future__ import annotations

import dataclasses
import secrets
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from typing import TYPE_CHECKING, Any, Literal

from phalanx import env
from phalanx.doctor.finding import Finding, FindingFactory
from phalanx.doctor.peers import methods
from phalanx.doctor.peers.probes import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from phalanx.doctor.peers.agents import Agent

_finding = FindingFactory("hosts")
_SLOW = 0.5
"""Fraction of the best bandwidth below which a link counts as slow."""
_LATE = 3.0
"""Multiple of the best latency above which a link counts as late.

The difference must also exceed `_LATE_SECONDS`.
"""
_LATE_SECONDS = 200e-6
_OPEN_SECONDS = 90.0
"""Seconds for a host to import torch and run its checks, perhaps on a slow disk."""
_MEASURE_SECONDS = 30.0
_EVERY_PAIR = 8
"""Maximum number of ranks of a host to measure every pair; beyond it, only adjacent ranks are."""


@dataclass(frozen=True)
class Host:
    """A host, as described by its answer to the command `open`."""

    name: str
    ranks: tuple[int, ...]
    """Ranks of the job on this host; empty if there is no job."""
    address: str
    port: int
    error: str
    findings: list[Finding]


@dataclass(frozen=True)
class Link:
    """A one-way link from one host to another, or between two ranks of a host.

    Attributes:
        source: Index of the sending host.
        target: Index of the receiving host.
        via: Medium of the link.
        ranks: Sending and receiving rank if the medium is memory; else None.
        latency: Round-trip time in seconds; None if it was not measured.
        bandwidth: Bandwidth in bytes per second; None if it was not measured.
        error: Reason why the link was not measured; empty if it was.
    """

    source: int
    target: int
    via: Literal["network", "memory"]
    ranks: tuple[int, int] | None = None
    latency: float | None = None
    bandwidth: float | None = None
    error: str = ""


@dataclass
class Network:
    """All hosts, and all links between them."""

    hosts: list[Host]
    links: list[Link] = field(default_factory=list)

    def link(self, source: int, target: int) -> Link | None:
        """Return the link between two hosts; within a host, the link of the lowest bandwidth."""
        found = [link for link in self.links if (link.source, link.target) == (source, target)]
        return min(found, key=lambda link: link.bandwidth or 0.0, default=None)

    def is_slow(self, link: Link) -> bool:
        """Return whether a link's bandwidth is far below the best of the network."""
        best = max(self._network_values("bandwidth"), default=0.0)
        return link.via == "network" and (link.bandwidth or best) < _SLOW * best

    def is_late(self, link: Link) -> bool:
        """Return whether a link's latency is far above the best of the network."""
        best = min(self._network_values("latency"), default=0.0)
        limit = max(_LATE * best, best + _LATE_SECONDS)
        return link.via == "network" and (link.latency or 0.0) > limit

    def findings(self) -> list[Finding]:
        """Return the findings about hosts and links; empty if all is well."""
        return [
            *self._absent_hosts(),
            *self._version_differences(),
            *self._blocked_links(),
            *self._outliers(),
            *self._methods(),
            *self._remote_findings(),
        ]

    def as_json(self) -> dict[str, Any]:
        """Return hosts and links as a JSON object."""
        links = [
            {**dataclasses.asdict(link), "slow": self.is_slow(link), "late": self.is_late(link)}
            for link in self.links
        ]
        return {"hosts": [dataclasses.asdict(host) for host in self.hosts], "links": links}

    def _network_values(self, attribute: str) -> Iterator[float]:
        for link in self.links:
            value = getattr(link, attribute)
            if link.via == "network" and value is not None:
                yield value

    def _absent_hosts(self) -> Iterator[Finding]:
        for host in self.hosts:
            if host.error:
                message, _, advice = host.error.partition("\n")
                advice = advice or "Check that machine; the others were measured without it."
                yield _finding.problem("absent", f"{host.name}: {message}", advice, host=host.name)

    def _version_differences(self) -> Iterator[Finding]:
        for name in ("torch", "phalanx"):
            versions: dict[str, list[str]] = {}
            for host in self.hosts:
                for finding in host.findings:
                    if (finding.area, finding.name) == ("versions", name):
                        versions.setdefault(finding.values["version"], []).append(host.name)
            if len(versions) > 1:
                message = "; ".join(f"{name} {v} on {', '.join(on)}" for v, on in versions.items())
                advice = "Install the same version everywhere: ranks refuse to join otherwise."
                yield _finding.problem("versions", message, advice, versions=versions)

    def _blocked_links(self) -> Iterator[Finding]:
        for link in self.links:
            if not link.error:
                continue
            source, target = self.hosts[link.source], self.hosts[link.target]
            values = {"from": source.name, "to": target.name, "ranks": link.ranks}
            if link.ranks is not None:
                one, two = link.ranks
                message = f"rank {one} can't send to rank {two} on {source.name}: {link.error}"
                yield _finding.problem("memory", message, "Run `phalanx test` there.", **values)
                continue
            reverse = self.link(link.target, link.source)
            suffix = (
                f"; {target.name} can reach {source.name}" if reverse and not reverse.error else ""
            )
            relayed = env.transport() == "relay"  # then hosts need not reach each other
            yield (_finding.note if relayed else _finding.problem)(
                "blocked",
                f"{source.name} can't reach {target.name}: {link.error}{suffix}",
                f"Check the firewall of {target.name}, which must allow ephemeral ports, and the "
                f"route: `ip route get {target.address}` on {source.name}. If that address is "
                "wrong, set PHALANX_INTERFACE there. If no route is possible (NAT), use the "
                "transport relay: PHALANX_TRANSPORT=relay.",
                **values,
            )

    def _outliers(self) -> Iterator[Finding]:
        for link in self.links:
            deviations = []
            if link.bandwidth and self.is_slow(link):
                deviations.append(f"{format_bandwidth(link)}, less than half of the best")
            if link.latency and self.is_late(link):
                deviations.append(
                    f"a round trip of {format_latency(link)}, more than {_LATE:g} times the best"
                )
            if deviations:
                source, target = self.hosts[link.source].name, self.hosts[link.target].name
                yield _finding.note(
                    "outlier",
                    f"{source} to {target}: {' and '.join(deviations)}",
                    "A group is as slow as its slowest link: check the cable, the port at the "
                    "switch (`ethtool`), and other users of the link.",
                    **{"from": source, "to": target},
                )

    def _methods(self) -> Iterator[Finding]:
        """Compare the methods of training if the slowest link is slow."""
        links = [link for link in self.links if link.via == "network" and link.bandwidth]
        slowest = min(links, key=lambda link: link.bandwidth or 0.0, default=None)
        if slowest is None or not slowest.bandwidth or slowest.bandwidth >= methods.SLOW:
            return
        present = sum(not host.error for host in self.hosts)
        seconds = methods.seconds_per_step(1e6, present, slowest.bandwidth)
        times = {name: methods.format_seconds(value) for name, value in seconds.items()}
        source, target = self.hosts[slowest.source].name, self.hosts[slowest.target].name
        yield _finding.note(
            "methods",
            f"the slowest link, {source} to {target}, carries {format_bandwidth(slowest)}: for "
            f"each million parameters, each of {present} hosts sends "
            f"{methods.elements_sent(present):.3g} million values in a step, in "
            f"{times['float32']} (float32, {methods.FLOAT32:g} bytes each) or {times['int8']} "
            f"(int8, {methods.INT8:.3g} bytes); DiLoCo with every={methods.EVERY} in int8 needs "
            f"{times['diloco']} per step",
            "Compare with the time that a step computes. Where float32 takes longer, pass "
            "phalanx.Options(compress='int8') to the group; where int8 does, use "
            "phalanx.parallel.DiLoCo. The guide 'Train across slow links' has figures.",
            seconds_per_million_parameters=seconds,
            **{"from": source, "to": target},
        )

    def _remote_findings(self) -> Iterator[Finding]:
        """Yield the findings of the other hosts about themselves, equal findings only once."""
        merged: dict[tuple[str, str], list[tuple[str, Finding]]] = {}
        for host in self.hosts[1:]:
            for finding in host.findings:
                # The name of a host matters only on host 0.
                if finding.level != "ok" and finding.name != "host_name":
                    key = finding.name, finding.message
                    merged.setdefault(key, []).append((host.name, finding))
        for found in merged.values():
            names, (finding, *_) = zip(*found, strict=True)
            message = f"{', '.join(names)}: {finding.message}"
            yield dataclasses.replace(finding, area="hosts", message=message)


def format_bandwidth(link: Link) -> str:
    """Return a link's bandwidth with its unit: bits for a network, bytes for memory."""
    value = link.bandwidth or 0.0
    if link.via == "memory":
        return f"{value / 1e9:.1f} GB/s"
    bits = 8 * value
    return f"{bits / 1e9:.2f} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"


def format_latency(link: Link) -> str:
    """Return a link's round-trip time with its unit."""
    value = link.latency or 0.0
    return f"{value * 1e3:.1f} ms" if value >= 1e-3 else f"{value * 1e6:.0f} us"


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
        named = zip(answers, names, strict=True)
        network = Network([_parse_host(answer, (), name) for answer, name in named])
    else:
        placed = zip(answers, hosts, strict=True)
        network = Network([_parse_host(answer, ranks) for answer, ranks in placed])
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
        [Finding(**finding) for finding in answer.get("findings", ())],
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
