"""The layout of ranks on hosts: derivation, rails, watched counterparts, and memory probes."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.hierarchical.failure import counterparts
from phalanx.system.host_identity import MemoryProbe
from phalanx.topology.layout import HostLink, Layout, RankRecord, group_by_host


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12))
def test_ranks_that_can_open_each_other_share_a_host(hosts: list[int]) -> None:
    opened = {
        rank: {other for other, other_host in enumerate(hosts) if other_host == host}
        for rank, host in enumerate(hosts)
    }
    layouts = [group_by_host(rank, opened) for rank in opened]
    assert len({layout.hosts for layout in layouts}) == 1
    for layout in layouts:
        assert {hosts[rank] for rank in layout.ranks} == {hosts[layout.rank]}
        assert len(layout.hosts) == len(set(hosts))
        assert layout.ranks[layout.local_rank] == layout.rank
        assert [ranks[0] for ranks in layout.hosts] == sorted(layout.leaders)
        assert layout.size == len(hosts)
        assert layout.is_even == (len({hosts.count(host) for host in hosts}) == 1)


def test_one_sided_access_is_not_sharing() -> None:
    """For example, rank 0 runs as root and rank 1 as another user."""
    opened = {0: {0, 1, 2}, 1: {1}, 2: {0, 2}}
    assert group_by_host(0, opened).hosts == ((0, 2), (1,))


def test_rails() -> None:
    layout = Layout(3, ((0, 2), (1, 3), (4, 5)))
    assert (layout.host, layout.local_rank, layout.is_even) == (1, 1, True)
    assert layout.rail == (2, 3, 5)
    assert layout.leaders == (0, 1, 4)
    assert not Layout(0, ((0, 1), (2,))).is_even


@given(st.lists(st.integers(1, 4), min_size=2, max_size=5))
def test_every_rank_is_watched_from_each_neighbouring_host(sizes: list[int]) -> None:
    ends = list(itertools.accumulate(sizes))
    hosts = tuple(tuple(range(end - size, end)) for size, end in zip(sizes, ends, strict=True))
    watches = {rank: counterparts(Layout(rank, hosts)) for rank in range(ends[-1])}
    for rank, peers in watches.items():
        assert all(rank in watches[peer] for peer in peers), "watching must be mutual"
        host = Layout(rank, hosts).host
        watching_hosts = {Layout(peer, hosts).host for peer in peers}
        assert watching_hosts == {(host + 1) % len(hosts), (host - 1) % len(hosts)}


def test_probe_is_identified_by_its_nonce() -> None:
    with MemoryProbe() as probe, MemoryProbe() as other:
        record = RankRecord.for_current_process(2, HostLink("gloo"), probe)
        assert RankRecord.parse(record.text) == record
        assert record.probe_is_accessible()
        other_record = RankRecord.parse(
            RankRecord.for_current_process(2, HostLink("gloo"), other).text
        )
        assert not other_record._replace(nonce=probe.nonce).probe_is_accessible()
        assert not record._replace(pid=2**22 - 1).probe_is_accessible()
    assert not record.probe_is_accessible()


def test_probe_is_accessible_from_another_process() -> None:
    with MemoryProbe() as probe:
        record = RankRecord.for_current_process(2, HostLink("gloo"), probe)
        code = (
            "from phalanx.topology.layout import RankRecord; "
            f"print(RankRecord.parse({record.text!r}).probe_is_accessible())"
        )
        result = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
        )
    assert result.stdout == "True\n", result.stderr


@pytest.mark.parametrize("variable", ("one", ""))
def test_host_id_variable(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with MemoryProbe() as probe:
        before = RankRecord.for_current_process(2, HostLink("gloo"), probe).machine
        monkeypatch.setenv("PHALANX_HOST_ID", variable)
        after = RankRecord.for_current_process(2, HostLink("gloo"), probe).machine
        assert (after == before) == (not variable)
