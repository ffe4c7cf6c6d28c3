"""The runner of PyTorch's examples: the change of imports and the comparison of runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.published.cases import Case
from tests.published.comparison import differences
from tests.published.imports import change_imports
from tests.published.runner import RunResult

BEFORE = """\
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch.distributed.nn import RemoteModule
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rpc import (
    RRef,
)
import torch.distributed.rpcs
print("import torch.distributed.rpc")
if rpc:
    from torch.distributed.rpc import remote  # here
"""
AFTER = """\
import torch.distributed as dist
import phalanx.rpc.autograd as dist_autograd
import phalanx.rpc as rpc
from phalanx.rpc import RemoteModule
from phalanx.rpc import DistributedOptimizer
from phalanx.rpc import (
    RRef,
)
import torch.distributed.rpcs
print("import torch.distributed.rpc")
if rpc:
    from phalanx.rpc import remote  # here
"""


def test_only_imports_are_changed() -> None:
    assert change_imports(BEFORE) == (AFTER, 6)
    assert change_imports(AFTER) == (AFTER, 0)


CASE = Case("name", "folder", "what", ())
RESULT = RunResult(["10:11:12 a", "loss 0.5"], ["a warning"], {"0": [2.0, 1.0]}, 1.0, 0)


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (replace(RESULT, lines=["loss 0.5", "10:11:13.7 a"], stderr_lines=[]), []),
        (replace(RESULT, code=None), ["on phalanx.rpc: killed after 1 s"]),
        (replace(RESULT, code=3), ["on phalanx.rpc: exit code 3"]),
        (replace(RESULT, stderr_lines=["a warning", "new"]), ["stderr: new"]),
        (replace(RESULT, lines=["loss 0.5"]), ["not printed: TIME a"]),
        (replace(RESULT, lines=[*RESULT.lines, "loss 0.5"]), ["2 lines printed, then 3"]),
        (replace(RESULT, losses={"0": [2.0, 1.5]}), ["0: loss 1 is 1.0, then 1.5"]),
        (replace(RESULT, losses={"0": [2.0]}), ["0: 2 losses, then 1"]),
        (replace(RESULT, losses={}), ["0: 2 losses, then 0"]),
    ],
)
def test_differences_are_found(other: RunResult, expected: list[str]) -> None:
    assert differences(CASE, RESULT, other) == expected


def test_only_the_last_losses_count_if_threads_decide_the_order() -> None:
    case = replace(CASE, tolerance=0.1)
    close = replace(RESULT, lines=["10:11:12 a", "loss 0.6"], losses={"0": [1.0, 2.1]})
    assert differences(case, RESULT, close) == []
    far = replace(RESULT, losses={"0": [2.0, 2.0]})
    assert differences(case, RESULT, far) == ["0: final loss 1.5000, then 2.0000"]
