"""PyTorch's debug server with the page of Phalanx, in a job on Gloo that hangs."""

from __future__ import annotations

import os
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import phalanx
from tests.ports import find_free_port
from tests.ranks import RankServer, marker_file, meet, wait_for_file
from tests.waiting import wait_for

pytestmark = pytest.mark.slow

URL = "http://localhost:{}/phalanx_explain"


def serve(ports: tuple[int, int]) -> None:
    """Let rank 1 of a job stay in its own code, and keep the page that rank 0 gets."""
    store_port, page_port = ports
    os.environ |= {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store_port),
        "TORCH_FR_BUFFER_SIZE": "100",
    }
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    dist.broadcast(torch.ones(2, 3), 1)
    phalanx.start_debug_server(port=page_port)
    meet("served")
    if rank != 1:
        call: Any = dist.all_reduce
        threading.Thread(target=call, args=(torch.ones(4),), daemon=True).start()
    text = ""
    if rank == 0:

        def is_explained() -> bool:
            nonlocal text
            try:
                with urllib.request.urlopen(URL.format(page_port), timeout=60) as page:
                    text = page.read().decode()
            except urllib.error.URLError:  # it doesn't listen yet
                return False
            return "Rank 1 has been in its own code" in text

        wait_for(is_explained)
        torch.distributed.debug.stop_debug_server()  # type: ignore[attr-defined]
        marker_file("page").write_text(text)
        marker_file("read").touch()
    wait_for_file("read")
    os._exit(0)  # the all-reduce waits for ever


def test_the_page(ranks: RankServer) -> None:
    ports = find_free_port(), find_free_port()
    run = ranks.start(2, serve, ports, timeout=None)
    for rank in run.join():
        assert rank.code == 0, rank.report()
    text = Path(run.folder, "page").read_text()
    assert "Rank 0 has waited for rank 1 in all_reduce #2 float32[4]" in text
    assert "phalanx explain</a>" in text
