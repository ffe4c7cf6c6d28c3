"""Places of ranks, and trees over them, on machines like published ones."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from phalanx.topology import places
from phalanx.topology.places import cache_chain, meeting_tree, own_place


def machine(sysfs: Path, *, sockets: int, nodes: int, caches: int, cores: int) -> int:
    """Write the files of a machine with `cores` per cache, and return the number of its cores."""

    def write(path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")

    def part(core: int, size: int) -> str:
        first = core // size * size
        return f"{first}-{first + size - 1}" if size > 1 else f"{first}"

    per_node = caches * cores
    total = sockets * nodes * per_node
    for core in range(total):
        folder = sysfs / "cpu" / f"cpu{core}"
        for level, size in ((1, 1), (2, 1), (3, cores)):
            write(folder / "cache" / f"index{level}" / "level", str(level))
            write(folder / "cache" / f"index{level}" / "shared_cpu_list", part(core, size))
        write(folder / "topology" / "package_cpus_list", part(core, nodes * per_node))
        node = core // per_node
        write(sysfs / "node" / f"node{node}" / "cpulist", part(core, per_node))
        (folder / f"node{node}").symlink_to(sysfs / "node" / f"node{node}")
    return total


def all_places(sysfs: Path, total: int, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    found = []
    for core in range(total):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _pid, core=core: {core})
        found.append(own_place(sysfs))
    return found


def test_the_place_of_a_process_on_one_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = machine(tmp_path, sockets=2, nodes=2, caches=2, cores=4)
    found = all_places(tmp_path, total, monkeypatch)
    assert found[0] == (0, 0, 0)
    assert found[7] == (0, 0, 4)
    assert found[13] == (0, 8, 12)
    assert found[31] == (16, 24, 28)


def test_a_process_on_cores_of_one_cache_has_a_place_and_on_several_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(tmp_path, sockets=1, nodes=1, caches=2, cores=4)
    for cores, place in (({4, 5, 7}, (0, 0, 4)), ({3, 4}, ())):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _pid, cores=cores: cores)
        assert own_place(tmp_path) == place


def test_a_kernel_that_tells_nothing_gives_no_place(tmp_path: Path) -> None:
    assert own_place(tmp_path) == ()


def test_this_machine_is_read() -> None:
    place = own_place()
    assert place == () or (len(place) == 3 and all(core >= 0 for core in place))


def test_a_tree_joins_caches_then_nodes_then_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = machine(tmp_path, sockets=2, nodes=2, caches=2, cores=4)
    tree = meeting_tree(all_places(tmp_path, total, monkeypatch))
    assert tree[:8] == [-1, 0, 0, 0, 0, 4, 4, 4]  # the second cache of the first node
    assert tree[8:16] == [0, 8, 8, 8, 8, 12, 12, 12]  # the second node
    assert tree[16:24] == [0, 16, 16, 16, 16, 20, 20, 20]  # the second socket
    assert tree[24:] == [16, 24, 24, 24, 24, 28, 28, 28]


@pytest.mark.parametrize("seed", range(5))
def test_ranks_in_any_order_have_a_tree_with_one_edge_between_caches(seed: int) -> None:
    generator = random.Random(seed)
    where = [(core // 16 * 16, core // 8 * 8, core // 4 * 4) for core in range(64)]
    generator.shuffle(where)
    tree = meeting_tree(where)
    assert tree[0] == -1
    assert all(0 <= parent < rank for rank, parent in enumerate(tree) if rank)
    for depth in (1, 2, 3):
        crossing = sum(
            where[rank][:depth] != where[parent][:depth] for rank, parent in enumerate(tree) if rank
        )
        assert crossing == len({place[:depth] for place in where}) - 1


def test_groups_without_a_gain_are_flat() -> None:
    apart = [(core // 8, core // 8, core // 8) for core in range(places.MIN_RANKS)]
    assert meeting_tree(apart)
    assert meeting_tree(apart[1:]) == []  # few ranks
    assert meeting_tree([(0, 0, 0)] * 64) == []  # one cache
    assert meeting_tree([*apart, ()]) == []  # a rank that isn't bound


def test_the_chain_of_caches_that_are_filled_in_order() -> None:
    caches = [0] * 8 + [8] * 3 + [16] * 8
    assert cache_chain([(0, 0, cache) for cache in caches]) == [0, 8, 11]


def test_no_chain_without_a_gain() -> None:
    assert cache_chain([(0, 0, core // 2) for core in range(8)]) == [0, 2, 4, 6]
    assert cache_chain([(0, 0, core % 2) for core in range(8)]) == []  # in turns
    assert cache_chain([(0, 0, cache) for cache in (0, 0, 0, 1, 1, 1, 0)]) == []
    assert cache_chain([(0, 0, cache) for cache in (0, 0, 1, 1, 2)]) == []  # few ranks per cache
