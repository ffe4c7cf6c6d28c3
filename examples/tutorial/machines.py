"""Show on which machine each rank runs, and whether the others can connect to it.

phalanx run --nproc-per-node 4 --simulate-hosts 2 machines.py
phalanx run --hosts node-a:2,node-b:2 machines.py
"""

import ipaddress
import os
import socket
import sys

import torch
import torch.distributed as dist

import phalanx


def own_address() -> str:
    """Return the address by which this machine knows its own name."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""


def describe_rank() -> tuple[str, str]:
    """Return the host of this rank, simulated or real, and its address."""
    return os.environ.get("PHALANX_HOST_ID", socket.gethostname()), own_address()


def advise(host: str, address: str) -> str:
    """Return advice about a host that others cannot reach; empty if there is none."""
    if not address:
        return f"{host}: its name has no address; set PHALANX_INTERFACE there"
    if ipaddress.ip_address(address).is_loopback:
        return f"{host}: its name means {address}, which no other machine can reach"
    return ""


if __name__ == "__main__":
    with phalanx.init(*sys.argv[1:2]) as session:
        ranks: list[tuple[str, str]] = [("", "")] * session.world_size
        dist.all_gather_object(ranks, describe_rank())
        total = torch.ones(1)
        dist.all_reduce(total)
        if session.is_main:
            for host in dict.fromkeys(host for host, _ in ranks):
                here = [str(rank) for rank, (name, _) in enumerate(ranks) if name == host]
                print(f"{host}: ranks {', '.join(here)}")
            if len({host for host, _ in ranks}) > 1:
                print(*filter(None, (advise(*each) for each in dict.fromkeys(ranks))), sep="\n")
            print(f"all {total.item():g} ranks are connected")
