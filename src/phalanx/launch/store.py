"""The store in which the ranks of one host find each other, hosted by whoever starts them."""

import socket
from typing import Any

import torch.distributed as dist

__all__ = ["HOST", "host_store"]

HOST = "127.0.0.1"


def host_store(port: int = 0) -> Any:
    """Host a `TCPStore` on the loopback interface; it lives as long as the object.

    A free port is bound before its number is told to anyone, so nobody can take it in between.

    Args:
        port: which one; 0 for a free one.

    Raises:
        OSError: the port can't be had.
    """
    listener = socket.create_server((HOST, port), backlog=512)
    port = listener.getsockname()[1]
    fd = listener.detach()  # the store takes it over
    return dist.TCPStore(  # type: ignore[attr-defined] # exported at run time
        HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=fd
    )
