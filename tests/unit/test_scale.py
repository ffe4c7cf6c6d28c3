"""The simulation of docs/design/scale.md: where it must agree with arithmetic, it does."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import scale

FREE = scale.Costs(latency=0.0, rate=1e9, step=0.0, copying=float("inf"))


@pytest.mark.parametrize("hosts", (2, 3, 8))
def test_one_chunk_without_memory_is_the_formula(hosts: int) -> None:
    costs = replace(FREE, latency=1e-3)
    said = scale.simulate(costs, hosts, 2, scale.CHUNK)
    assert said == pytest.approx(scale.formula(costs, hosts, scale.CHUNK))


@pytest.mark.parametrize("plan", (scale.NOW, scale.Plan("halving")))
@pytest.mark.parametrize("hosts", (2, 8, 64))
def test_no_bytes_more_than_the_least_cross_the_link(hosts: int, plan: scale.Plan) -> None:
    size = 10.5 * scale.CHUNK
    least = 2 * (hosts - 1) / hosts * size / FREE.rate
    assert scale.simulate(FREE, hosts, 2, size, plan) == pytest.approx(least)


def test_chunks_hide_the_latency_of_one_another() -> None:
    costs = replace(FREE, latency=1e-3)
    size = 16 * scale.CHUNK
    alone = 16 * scale.simulate(costs, 4, 2, scale.CHUNK)
    assert scale.formula(FREE, 4, size) < scale.simulate(costs, 4, 2, size) < 0.9 * alone


def test_costs_that_were_simulated_are_found_again(tmp_path: Path) -> None:
    costs = replace(FREE, rate=scale.MEASURED_RATE, step=4e-4, copying=2e9)
    paths = []
    for hosts in (2, 3):
        results = []
        for size in (1 << 20, 16 << 20, 64 << 20):
            seconds = scale.simulate(costs, hosts, 2, size)
            results.append({"bytes": size, "seconds": {"phalanx": [seconds]}})
        paths.append(tmp_path / f"{hosts}.json")
        paths[-1].write_text(json.dumps({"hosts": hosts, "results": results}))
    found = scale.fit(scale.read(paths), scale.MEASURED_RATE)
    assert found.step == pytest.approx(costs.step, rel=0.2)
    assert found.copying == pytest.approx(costs.copying, rel=0.2)
