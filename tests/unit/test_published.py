"""What changes the imports of PyTorch's examples, and what compares their runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.published.cases import Case
from tests.published.comparing import differences
from tests.published.imports import changed
from tests.published.running import Ran

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


def test_imports_are_changed_and_nothing_else() -> None:
    assert changed(BEFORE) == (AFTER, 6)
    assert changed(AFTER) == (AFTER, 0)


CASE = Case("name", "folder", "what", ())
RAN = Ran(["10:11:12 a", "loss 0.5"], ["a warning"], {"0": [2.0, 1.0]}, 1.0, 0)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (replace(RAN, lines=["loss 0.5", "10:11:13.7 a"], complaints=[]), []),
        (replace(RAN, code=None), ["on phalanx.rpc it was ended after 1 s"]),
        (replace(RAN, code=3), ["on phalanx.rpc it ended with exit code 3"]),
        (replace(RAN, complaints=["a warning", "new"]), ["stderr: new"]),
        (replace(RAN, lines=["loss 0.5"]), ["not printed: TIME a"]),
        (replace(RAN, lines=[*RAN.lines, "loss 0.5"]), ["2 lines printed, and 3"]),
        (replace(RAN, losses={"0": [2.0, 1.5]}), ["0: loss 1 is 1.0, and 1.5"]),
        (replace(RAN, losses={"0": [2.0]}), ["0: 2 losses, and 1"]),
        (replace(RAN, losses={}), ["0: 2 losses, and 0"]),
    ],
)
def test_differences_are_found(other: Ran, words: list[str]) -> None:
    assert differences(CASE, RAN, other) == words


def test_where_threads_decide_the_last_losses_count() -> None:
    case = replace(CASE, tolerance=0.1)
    near = replace(RAN, lines=["10:11:12 a", "loss 0.6"], losses={"0": [1.0, 2.1]})
    assert differences(case, RAN, near) == []
    far = replace(RAN, losses={"0": [2.0, 2.0]})
    assert differences(case, RAN, far) == ["0: at the end a loss of 1.5000, and 2.0000"]
