"""The examples in the docstrings of `phalanx.rpc` and `phalanx.embedding`, executed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import doctest
import importlib
import os
import pkgutil
import sys

import torch
import torch.distributed as dist

from phalanx import embedding, rpc

folder = sys.argv[1]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
public = {name: getattr(embedding, name) for name in embedding.__all__}
names = {**public, "embedding": embedding, "os": os, "rpc": rpc, "torch": torch}
names["checkpoints"] = folder
finder = doctest.DocTestFinder()
runner = doctest.DocTestRunner()
found = {}
for package in (rpc, embedding):
    for info in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        module = importlib.import_module(info.name)
        for test in finder.find(module, info.name, extraglobs=names):
            if test.examples:
                found[test.name] = test
# `load` reads the files that `save` writes.
for name in sorted(found, key=lambda name: (name.endswith(".load"), name)):
    is_worker = not any("init_rpc(" in each.source for each in found[name].examples)
    if is_worker:
        rpc.init_rpc("ps")
    found[name].globs = {**names, "__name__": "__main__"}
    runner.run(found[name])
    if rpc.is_initialized():
        rpc.shutdown()
print(len(found), runner.summarize(verbose=False).failed)
dist.destroy_process_group()
"""


def test_examples(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "RANK": "0"},
    )
    assert result.returncode == 0, result.stderr
    count, failed = result.stdout.splitlines()[-1].split()
    assert int(count) >= 40, result.stdout
    assert failed == "0", result.stdout
