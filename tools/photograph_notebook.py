"""Run a notebook in JupyterLab, check how the browser shows its outputs, and take a picture.

The tests run cells in a kernel (`tests/multiprocess/test_notebook.py`); this shows what a user sees
of them. Chromium must be installed, and the packages jupyterlab and playwright, which are not
requirements of the project:

    pip install jupyterlab playwright
    python tools/photograph_notebook.py notebook.png
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import nbformat

SIZE = {"width": 1200, "height": 1500}
"""All cells fit, because JupyterLab draws only those in view."""
LIMIT = 300_000
"""Milliseconds for each step."""

TRAIN = """\
import time, torch, phalanx
from torch import nn
from torch.utils.data import TensorDataset
from phalanx.train import Trainer

def loss(model, batch):
    time.sleep(0.2)
    return model(*batch).square().mean()

def train():
    with phalanx.init() as session:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = TensorDataset(torch.randn(80, 4))
        Trainer(model, optimizer, data, loss, global_batch=4, epochs=2).fit()
        return session.rank
"""
FAIL = "if train() == 1:\n    raise ValueError('no data')\n"
PHALANX = f"!{sys.executable} -m phalanx"
CELLS = (
    TRAIN,
    "phalanx.launch(train, 2)",
    f"{PHALANX} run --nproc-per-node 2 train.py",
    f"{PHALANX} explain",
    f"{PHALANX} watch",
)
HAS_RUN = f"""() => {len(CELLS)} === [...document.querySelectorAll('.jp-InputArea-prompt')]
    .filter(prompt => /\\[\\d+\\]/.test(prompt.textContent)).length"""
OUTPUTS = "() => [...document.querySelectorAll('.jp-OutputArea-output')].map(each => [\
each.dataset.mimeType || each.getAttribute('data-mime-type'), each.textContent])"


def photograph(picture: Path, folder: Path) -> list[tuple[str, str]]:
    """Run all cells in a window of JupyterLab, save the window, and return the outputs."""
    from playwright.sync_api import sync_playwright

    cells = [nbformat.v4.new_code_cell(each) for each in CELLS]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), folder / "try.ipynb")
    (folder / "train.py").write_text(TRAIN + FAIL)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    token = secrets.token_hex(16)
    server = start_server(address, token, folder)
    try:
        wait_for_server(server, f"{address}/api?token={token}")
        with sync_playwright() as play:
            browser = play.chromium.launch(
                executable_path=shutil.which("chromium"),
                args=["--disable-gpu", "--disable-quic", "--no-sandbox", "--no-first-run"],
            )
            page = browser.new_page(viewport=SIZE)
            page.set_default_timeout(LIMIT)
            page.goto(f"{address}/doc/tree/try.ipynb?token={token}")
            page.wait_for_selector(".jp-CodeCell")
            page.wait_for_selector("[data-status=idle]")  # the kernel
            page.locator(".jp-CodeCell .cm-content").first.click()
            for _ in CELLS:
                page.keyboard.press("Shift+Enter")
            page.wait_for_function(HAS_RUN)
            page.screenshot(path=picture)
            outputs: list[tuple[str, str]] = page.evaluate(OUTPUTS)
            browser.close()
            return outputs
    finally:
        server.terminate()
        server.wait()


def start_server(address: str, token: str, folder: Path) -> subprocess.Popen[bytes]:
    """Start JupyterLab's server for a folder."""
    port = address.rpartition(":")[2]
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"),
            *("--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}"),
            *(f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={folder}"),
        ],
        env={**os.environ, "PHALANX_JOBS_DIR": str(folder / "jobs")},
    )


def wait_for_server(server: subprocess.Popen[bytes], url: str) -> None:
    """Wait until the server answers."""
    while server.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=10).close()
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise SystemExit(f"JupyterLab has ended with code {server.returncode}")


def check(outputs: list[tuple[str, str]]) -> list[str]:
    """Return the defects: an output on stderr, which is red, a control code, or no bar."""
    defects = [f"on stderr: {text!r}" for kind, text in outputs if kind and "stderr" in kind]
    control = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]|\[\?\d+[hl]|\[\d*[ABCDHJK]\b")
    defects += [f"a control code: {text!r}" for _, text in outputs if control.search(text)]
    bars = [text for _, text in outputs if re.search(r"training ━+ 40/40", text)]
    return defects + ([] if len(bars) == 1 else [f"{len(bars)} full bars, expected 1"])


def main(arguments: list[Any]) -> int:
    """Take the picture at the path that is the argument; return 1 if a defect is found."""
    with tempfile.TemporaryDirectory() as folder:
        defects = check(photograph(Path(arguments[0]), Path(folder)))
    for defect in defects:
        print(defect, file=sys.stderr)
    return 1 if defects else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
