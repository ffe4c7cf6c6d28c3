"""Messages by a single copy through the kernel, beside those of Phalanx: about a minute.

    python benchmarks/single_copy.py [--output FILE]

Two ranks send each other messages: in turns, as in a ping-pong, and both at once (`exchange`).
`phalanx` is a prepared send and recv: two copies, by way of shared memory. `single copy` is the
best that `process_vm_readv` can do, by which the reader copies from the memory of the other
process: the sender announces its message by one of 4 B, and must know by another one that it has
been read. In a ping-pong this is the answer; in an exchange both send one more message of 4 B.
The systems take turns, and the sender rewrites its buffer before each message, outside of the
measured time.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import phalanx
from phalanx.bench.machine import machine, versions
from phalanx.bench.results import Timing

SIZES = [2**exponent for exponent in range(14, 25, 2)]
PR_SET_PTRACER = 0x59616D61


def make_reader(pid: int, address: int, tensor: torch.Tensor) -> Callable[[], None]:
    """Return a function that copies from the memory of another process to a tensor."""
    process_vm_readv = ctypes.CDLL(None, use_errno=True).process_vm_readv
    vector = ctypes.c_size_t * 2  # struct iovec: an address and a length
    own, one = vector(tensor.data_ptr(), tensor.nbytes), ctypes.c_ulong(1)
    other = vector(address, tensor.nbytes)

    def read() -> None:
        if process_vm_readv(pid, own, one, other, one, ctypes.c_ulong(0)) != tensor.nbytes:
            raise OSError(ctypes.get_errno(), "process_vm_readv was refused or incomplete")

    return read


class PingPong:
    """One rank's side: messages of `size` bytes in turns, each received into the same buffer."""

    def __init__(self, size: int, *, single_copy: bool) -> None:
        self.rank = dist.get_rank()
        self.sent = torch.empty(size // 4)
        self.received = torch.full_like(self.sent, -1)
        peer = 1 - self.rank
        own = torch.tensor([os.getpid(), self.sent.data_ptr()])
        theirs = [torch.empty_like(own) for _ in range(2)]
        dist.all_gather(theirs, own)
        outgoing, incoming = self.sent, self.received
        if single_copy:
            outgoing, incoming = torch.zeros(1), torch.zeros(1)
        self.send = phalanx.prepare(dist.send, outgoing, peer)
        self.recv = phalanx.prepare(dist.recv, incoming, peer)
        self.read: Callable[[], None] = lambda: None
        if single_copy:
            self.read = make_reader(*theirs[peer].tolist(), self.received)

    def run(self, value: float) -> float:
        """Send a message there and one back; return half of the seconds."""
        self.sent.fill_(value)
        dist.barrier()
        start = time.perf_counter()
        if self.rank == 0:
            self.send()
        self.recv()
        self.read()
        if self.rank == 1:
            self.send()
        seconds = (time.perf_counter() - start) / 2
        dist.barrier()  # until then the peer may read
        if not (self.received == value).all():
            raise AssertionError("a message is wrong")
        return seconds


class Exchange(PingPong):
    """The same with messages in both directions at once."""

    def __init__(self, size: int, *, single_copy: bool) -> None:
        super().__init__(size, single_copy=single_copy)
        self.both = phalanx.plan([self.send, self.recv])
        self.confirm: Callable[[], None] = self.both if single_copy else lambda: None

    def run(self, value: float) -> float:
        """Send and receive a message; return the seconds."""
        self.sent.fill_(value)
        dist.barrier()
        start = time.perf_counter()
        self.both()
        self.read()
        self.confirm()
        seconds = time.perf_counter() - start
        dist.barrier()
        if not (self.received == value).all():
            raise AssertionError("a message is wrong")
        return seconds


def measure(rounds: int) -> dict[int, dict[str, list[float]]]:
    # Otherwise Yama lets only ancestors read.
    ctypes.CDLL(None).prctl(PR_SET_PTRACER, ctypes.c_ulong(-1), 0, 0, 0)
    results = {}
    with phalanx.init():
        for size in SIZES:
            systems = {
                "phalanx": PingPong(size, single_copy=False),
                "single copy": PingPong(size, single_copy=True),
                "exchange, phalanx": Exchange(size, single_copy=False),
                "exchange, single copy": Exchange(size, single_copy=True),
            }
            seconds: dict[str, list[float]] = {name: [] for name in systems}
            for number in range(-5, rounds):  # the first ones warm up
                for name, system in systems.items():
                    taken = system.run(number)
                    if number >= 0:
                        seconds[name].append(taken)
            results[size] = seconds
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--output", type=Path, metavar="FILE")
    options = parser.parse_args()
    results = phalanx.launch(measure, 2, (options.rounds,))[0]
    document: dict[str, Any] = {"machine": machine(), "versions": versions(), "results": {}}
    for size, seconds in results.items():
        timings = {name: Timing.of(values) for name, values in seconds.items()}
        cells = (f"{name} {each.median * 1e6:7.1f} us" for name, each in timings.items())
        ratios = (
            f"{timings[f'{kind}single copy'].median / timings[f'{kind}phalanx'].median:.2f} times"
            for kind in ("", "exchange, ")
        )
        print(f"{size >> 10:6} KiB  {'  '.join(cells)}  {', '.join(ratios)}")
        document["results"][size] = {name: vars(each) for name, each in timings.items()}
    if options.output:
        options.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
