"""What runs at `import torch`: one name is registered, nothing else is imported.

Only with `PHALANX_REPLACE` in the environment there is more to do, for `phalanx.backend.replace`.

PyTorch calls `register` through the `torch.backends` entry point. An exception here would break
`import torch` itself, and time spent here is spent by every user of torch.
"""

import os


def register() -> None:
    """Make `torch.distributed.init_process_group("phalanx")` known."""
    from torch.distributed import Backend, is_available

    if is_available() and "PHALANX" not in Backend._plugins:
        Backend.register_backend("phalanx", _create, extended_api=True, devices=["cpu", "cuda"])
        if os.environ.get("PHALANX_REPLACE"):
            from phalanx.backend.replace import install

            install(_create)


def _create(options: object, backend_options: object = None) -> object:
    from phalanx.backend.process_group import create

    return create(options, backend_options)
