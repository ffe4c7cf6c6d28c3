"""The manifest on the page about Kubernetes is consistent; no cluster runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

from tests.docs.fences import read_fences

PAGE = Path(__file__).parents[2] / "docs" / "kubernetes.md"


@pytest.fixture(scope="module")
def manifest() -> list[dict[str, Any]]:
    (text,) = (fence.text for fence in read_fences(PAGE) if fence.language == "yaml")
    return list(yaml.safe_load_all(text))


def test_names_and_numbers_agree(manifest: list[dict[str, Any]]) -> None:
    service, job = manifest
    spec = job["spec"]
    pod = spec["template"]["spec"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert spec["completions"] == spec["parallelism"]
    (container,) = pod["containers"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes


def test_command_is_one_of_torchrun(manifest: list[dict[str, Any]]) -> None:
    job = manifest[1]
    container = job["spec"]["template"]["spec"]["containers"][0]
    program, *arguments = container["command"]
    assert program == "torchrun"
    arguments = [argument.replace("$(JOB_COMPLETION_INDEX)", "1") for argument in arguments]
    options = get_args_parser().parse_args(arguments)
    assert options.training_script == "train.py"
    assert (options.nnodes, options.node_rank) == (str(job["spec"]["completions"]), 1)
    assert options.master_addr == f"{job['metadata']['name']}-0.{manifest[0]['metadata']['name']}"
    assert options.nproc_per_node == container["resources"]["requests"]["cpu"]
