"""The page of PyTorch's debug server: what `phalanx explain` says of the job, on any backend.

`torch.distributed.debug` runs a small server in each rank and, on rank 0, one with pages that ask
all of them. The page here asks for the records of PyTorch's Flight Recorder.
"""

from __future__ import annotations

import html
import time
from typing import Any

from phalanx import torch_versions
from phalanx.diagnosis.explain import as_text
from phalanx.diagnosis.torch_jobs import build_job

_frontend = torch_versions.debug_server_frontend()

_PATH = "/phalanx_explain"
_TEMPLATE = """
{% extends "base.html" %}
{% block header %}<h1>{% block title %}phalanx explain{% endblock %}</h1>{% endblock %}
{% block content %}<pre>{{ text | safe }}</pre>{% endblock %}
"""


class ExplainHandler(_frontend.DebugHandler):  # type: ignore[misc, name-defined]
    """The page, as a handler for `torch.distributed.debug.start_debug_server(handlers=...)`."""

    def routes(self) -> list[Any]:
        """Return the page's address."""
        return [_frontend.Route(_PATH, self._handle)]

    def nav_links(self) -> list[Any]:
        """Return the page's entry in the menu."""
        return [_frontend.NavLink(_PATH, "phalanx explain")]

    def templates(self) -> dict[str, str]:
        """Return the page's template."""
        return {"phalanx_explain.html": _TEMPLATE}

    def dump(self) -> str:
        """Return the text of the page."""
        addresses, answers = _frontend.fetch_all("fr_trace_json", timeout=self.fetch_timeout)
        contents, problems = {}, {}
        for rank, (address, answer) in enumerate(zip(addresses, answers, strict=True)):
            if answer.status_code == 200:
                contents[rank] = answer.text.encode()
            else:
                problems[rank] = f"{address} has not answered: {answer.text}"
        return as_text(build_job("the debug server", contents, time.time_ns(), problems))

    def dump_filename(self) -> str:
        """Return the beginning of the name of the files for `dump_dir`."""
        return "phalanx_explain"

    def _handle(self, request: Any) -> bytes:
        text = html.escape(self.dump())
        page: bytes = request.frontend.render_template("phalanx_explain.html", text=text)
        return page
