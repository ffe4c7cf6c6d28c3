"""Replacement of other backends by Phalanx: names, and cases in which it is impossible."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from phalanx import env
from phalanx.backend import replace
from phalanx.errors import UsageError
from phalanx.launcher.arguments import parse_arguments
from phalanx.launcher.options import make_job

NAMES = {"gloo": ("gloo",), " Gloo, MPI": ("gloo", "mpi"), "tcp,mpi,tcp": ("tcp", "mpi")}


@pytest.fixture
def restored_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the state that `install` changes."""
    for module, name in (
        (c10d, "_new_process_group_helper"),
        (c10d, "init_process_group"),
        (c10d, "_MPI_AVAILABLE"),
        (dist, "init_process_group"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name))


def create(*_arguments: object) -> None:
    raise AssertionError("the creator of the backend is not called")


@pytest.mark.parametrize("text", NAMES)
def test_names(text: str) -> None:
    assert env.replaced_backends({"PHALANX_REPLACE": text}) == NAMES[text]


def test_nothing_is_replaced_by_default() -> None:
    assert env.replaced_backends({}) == ()
    assert env.replaced_backends({"PHALANX_REPLACE": " "}) == ()


@pytest.mark.parametrize(
    ("text", "wrong"), [("glo", "glo"), ("gloo,", ""), ("nccl", "nccl"), ("mpi gloo", "mpi gloo")]
)
def test_wrong_names(text: str, wrong: str) -> None:
    message = rf"PHALANX_REPLACE in the environment is '{text}': '{wrong}' cannot .* gloo, mpi, tcp"
    with pytest.raises(ValueError, match=message):
        env.replaced_backends({"PHALANX_REPLACE": text})


@pytest.mark.usefixtures("restored_torch")
def test_wrong_name_raises_when_a_group_is_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_REPLACE", "glo")
    replace.install(create)
    for form in (dist.init_process_group, c10d.init_process_group, c10d._new_process_group_helper):
        with pytest.raises(UsageError, match="'glo' cannot be replaced"):
            form("gloo")


@pytest.mark.parametrize("helper", (None, lambda group_size, backend: None))
@pytest.mark.usefixtures("restored_torch")
def test_another_torch(monkeypatch: pytest.MonkeyPatch, helper: object) -> None:
    monkeypatch.setenv("PHALANX_REPLACE", "gloo")
    monkeypatch.setattr(c10d, "_new_process_group_helper", helper)
    replace.install(create)
    with pytest.raises(UsageError, match=r"torch .* forms groups in a way .* unset"):
        dist.init_process_group("gloo")


@pytest.mark.usefixtures("restored_torch")
def test_mpi_needs_ranks_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PHALANX_REPLACE", "mpi")
    assert not dist.is_mpi_available()
    replace.install(create)
    assert dist.is_mpi_available()
    with pytest.raises(UsageError, match="start the script with `phalanx run --replace mpi`"):
        dist.init_process_group("mpi")


@pytest.mark.parametrize(
    ("backend", "options", "why"),
    [
        ("cpu:gloo,cuda:nccl", {"backend_options": "its own"}, "the options of nccl"),
        ("cpu:gloo,cuda:ucc", {}, "ucc"),
        ("cpu:gloo,xpu:xccl", {}, "xccl"),
    ],
)
@pytest.mark.usefixtures("restored_torch")
def test_backends_that_would_be_lost_are_not_replaced(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    backend: str,
    options: dict[str, str],
    why: str,
) -> None:
    asked = []
    monkeypatch.setenv("PHALANX_REPLACE", "gloo")
    monkeypatch.setattr(replace, "_logged", set())

    def helper(
        group_size,
        group_rank,
        global_ranks_in_group,
        backend,
        store,
        group_name,
        backend_options=None,
        timeout=None,
        device_id=None,
    ):
        asked.append(backend)

    monkeypatch.setattr(c10d, "_new_process_group_helper", helper)
    replace.install(create)
    c10d._new_process_group_helper(1, 0, [], backend, None, "name", timeout=None, **options)
    assert asked == [backend]
    said = capsys.readouterr().err
    assert said == f"phalanx: {backend!r} is not replaced: {why} would be lost\n"


def test_the_option_wins_over_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_REPLACE", "mpi")
    make_job(parse_arguments(["--replace", "Gloo,tcp", "--nproc-per-node", "1", __file__]))
    assert os.environ["PHALANX_REPLACE"] == "gloo,tcp"


@pytest.mark.parametrize(("option", "variable"), [("glo", ""), (None, "glo"), ("", "gloo")])
def test_wrong_names_on_the_command_line(
    monkeypatch: pytest.MonkeyPatch, option: str | None, variable: str
) -> None:
    monkeypatch.setenv("PHALANX_REPLACE", variable)
    argv = [] if option is None else ["--replace", option]
    with pytest.raises(UsageError, match=r"cannot be replaced; expected some of gloo, mpi, tcp"):
        make_job(parse_arguments([*argv, "--nproc-per-node", "1", __file__]))


def test_replacement_needs_autoload(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    with pytest.raises(UsageError, match="TORCH_DEVICE_BACKEND_AUTOLOAD"):
        make_job(parse_arguments(["--replace", "gloo", "--nproc-per-node", "1", __file__]))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("value", ("gloo", "glo"))
@pytest.mark.parametrize("first", ("torch", "phalanx.errors", "phalanx.backend.process_group"))
def test_importing_torch_never_fails(value: str, first: str) -> None:
    """Modules of Phalanx that import torch may be partly imported when torch loads its backends."""
    result = subprocess.run(
        [sys.executable, "-c", f"import {first}, torch.distributed as d; d.Backend('gloo')"],
        env={**os.environ, "PHALANX_REPLACE": value},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")
