"""The simulation of docs/design/scale.md, in the cases that arithmetic can check."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import scale

NO_COSTS = scale.Costs(latency=0.0, rate=1e9, step=0.0, rank_bandwidth=float("inf"))


@pytest.mark.parametrize("hosts", (2, 3, 8))
def test_one_chunk_without_memory_costs_matches_the_formula(hosts: int) -> None:
    costs = replace(NO_COSTS, latency=1e-3)
    simulated = scale.simulate(costs, hosts, 2, scale.CHUNK)
    assert simulated == pytest.approx(scale.formula(costs, hosts, scale.CHUNK))


@pytest.mark.parametrize("plan", (scale.CURRENT, scale.Plan("halving")))
@pytest.mark.parametrize("hosts", (2, 8, 64))
def test_link_carries_the_minimum_of_bytes(hosts: int, plan: scale.Plan) -> None:
    size = 10.5 * scale.CHUNK
    least = 2 * (hosts - 1) / hosts * size / NO_COSTS.rate
    assert scale.simulate(NO_COSTS, hosts, 2, size, plan) == pytest.approx(least)


def test_chunks_hide_latency() -> None:
    costs = replace(NO_COSTS, latency=1e-3)
    size = 16 * scale.CHUNK
    alone = 16 * scale.simulate(costs, 4, 2, scale.CHUNK)
    assert scale.formula(NO_COSTS, 4, size) < scale.simulate(costs, 4, 2, size) < 0.9 * alone


def test_fit_recovers_simulated_costs(tmp_path: Path) -> None:
    costs = replace(NO_COSTS, rate=scale.MEASURED_RATE, step=4e-4, rank_bandwidth=2e9)
    paths = []
    for hosts in (2, 3):
        results = []
        for size in (1 << 20, 16 << 20, 64 << 20):
            seconds = scale.simulate(costs, hosts, 2, size)
            results.append({"bytes": size, "seconds": {"phalanx": [seconds]}})
        paths.append(tmp_path / f"{hosts}.json")
        paths[-1].write_text(json.dumps({"hosts": hosts, "results": results}))
    fitted = scale.fit(scale.read_measurements(paths), scale.MEASURED_RATE)
    assert fitted.step == pytest.approx(costs.step, rel=0.2)
    assert fitted.rank_bandwidth == pytest.approx(costs.rank_bandwidth, rel=0.2)
