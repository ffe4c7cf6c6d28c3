"""The runner of PyTorch's tests of its distributed libraries, on a checkout with one small file.

`make conformance-libraries` runs PyTorch's own files and writes the record.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.conformance.library_suite import record
from tests.conformance.library_suite.runner import COLUMNS, run

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conformance.torch_suite.results_file import Results

FILE = "algorithms/test_join.py"
# A file that cannot be imported.
BROKEN = "algorithms/ddp_comm_hooks/test_broken.py"
# Time limits of the test that hangs and of those that end, in seconds.
SHORT, LIMIT = 20, 60
TESTS = """\
import time
import unittest

import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcessTestCase


def form(case, backend):
    init = f"file://{case.file_name}"
    dist.init_process_group(backend, init_method=init, rank=case.rank, world_size=2)
    # Gloo connects each pair of ranks by itself: a rank that exits before its peer has seen
    # the connection makes the peer's init_process_group fail.
    dist.barrier()


class Ranks(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_passes(self):
        form(self, "gloo")
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [2, 2, 2]

    def test_passes_on_gloo_alone(self):
        form(self, "cpu:gloo")
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        assert type(backend).__name__ == "ProcessGroupGloo"

    def test_fake_group(self):
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)

    def test_hangs(self):
        form(self, "gloo")
        if self.rank == 0:
            time.sleep(600)

    def test_skipped(self):
        self.skipTest("no GPU")


class Plain(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.prepared = True

    def test_no_group(self):
        assert self.prepared

    def test_fails(self):
        raise ValueError("on both")
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    checkout: Path = tmp_path_factory.mktemp("pytorch")
    for file, text in ((FILE, TESTS), (BROKEN, "import torch.no_such_module\n")):
        path = checkout / "test" / "distributed" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return {
        column: {
            **run(
                column, checkout, [FILE, BROKEN], lambda test: not hangs(test), jobs=2, limit=LIMIT
            ),
            **run(column, checkout, [FILE], hangs, jobs=1, limit=SHORT),
        }
        for column in COLUMNS
    }


def hangs(test: str) -> bool:
    return test.endswith("test_hangs")


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("column", COLUMNS)
def test_outcomes_and_groups(results: Results, column: str) -> None:
    found = {
        test.rpartition(".")[2]: (outcome.outcome, outcome.groups)
        for test, outcome in results[column].items()
        if test.startswith(FILE)
    }
    assert found == {
        "test_passes": ("pass", column),
        "test_passes_on_gloo_alone": ("pass" if column == "gloo" else "fail", column),
        "test_fake_group": ("pass", "fake"),
        "test_hangs": ("fail", column),
        "test_skipped": ("skip", ""),
        "test_no_group": ("pass", ""),
        "test_fails": ("fail", ""),
    }, "\n".join(f"{test}: {outcome.reason}" for test, outcome in results[column].items())
    broken = results[column][f"{BROKEN}::import"]
    assert broken.outcome == "fail"
    assert "no_such_module" in broken.reason


@pytest.mark.slow
def test_only_tests_that_pass_on_gloo_count(results: Results) -> None:
    expected = f"{FILE}::Ranks.test_passes_on_gloo_alone"
    assert [test for test, _ in record.unexplained_failures(results)] == [expected]
    counted = record.counts(results)[FILE]
    assert counted == record.Counts(
        on_gloo=2, on_phalanx=1, different=0, without_group=2, skipped=1, failed=2
    )
    assert f"- {expected}: fail: AssertionError" in record.table(results, "0.0.0")
