"""PyTorch's debug server, with a page that explains the job."""

from __future__ import annotations

from typing import Any

from phalanx import torch_versions
from phalanx.system.extras import install_command
from phalanx.usage_errors import UsageError


def start_debug_server(**options: Any) -> None:
    """Start PyTorch's debug server with a page that says which rank is at fault, and why.

    Call it on every rank after `init_process_group`, whatever the backend; it blocks until the
    server of this rank listens. The page is http://HOST:25999/phalanx_explain, where HOST is the
    host of rank 0. With `dump_dir`, the text is written there periodically, too. Whoever can reach
    the ports can read stacks and settings of the job: use it in trusted networks only.

    Args:
        options: The arguments of `torch.distributed.debug.start_debug_server`, such as `port`. The
            pages in `handlers` stay beside this one.

    Raises:
        UsageError: This version of PyTorch has no debug server to which a page can be added, or a
            package that it needs is missing.

    Example:
        >>> phalanx.start_debug_server(port=port)
    """
    try:
        from phalanx.diagnosis.debug_page import ExplainHandler  # its base class is PyTorch's

        torch_versions.start_debug_server(ExplainHandler(), options)
    except NotImplementedError as error:
        raise UsageError(f"start_debug_server: {error}: a newer one is needed") from error
    except ImportError as error:
        raise UsageError(
            f"start_debug_server: PyTorch's debug server cannot be imported ({error}): install "
            f"what it needs with {install_command('debug-server')}"
        ) from error
